"""Recipes and configs of saved runs and sweeps: the only way from a run folder to code, which must be trusted."""

from pathlib import Path
from typing import Any

from seedbed import trust
from seedbed.config import Config
from seedbed.config.saved import from_json
from seedbed.recipes import Recipe, find, function_code, is_file_name, user_files


def find_saved(name: str, folder: Path) -> Recipe:
    """The recipe that a run's or a sweep's folder names. A file must have been trained from here, or be trusted."""
    if not is_file_name(name):
        return find(name)[0]
    code = user_files.code_of(name)
    trust.require(code, folder, _trusting(folder))
    return user_files.load_recipe(code)


def open_saved(facts: dict[str, Any], folder: Path) -> tuple[Recipe, Config]:
    """Recipe and config of a run by its config.json: the only way from a run folder to code, which must be trusted."""
    recipe = find_saved(facts["recipe"], folder)
    config = from_json(recipe.preset(facts["preset"]), facts["config"])
    require_trusted(config, folder)
    return recipe, config


def require_trusted(config: Config, folder: Path) -> None:
    """Refuse functions that the settings in a folder name and the user has neither trained with nor confirmed."""
    for code in function_code(config):
        trust.require(code, folder, _trusting(folder))


def confirm_saved(facts: dict[str, Any]) -> list[trust.Code]:
    """Trust the code that a run or a sweep names, at the user's request; returns what that is."""
    found = [user_files.code_of(facts["recipe"])] if is_file_name(facts["recipe"]) else []
    for code in found:
        trust.record(code, "confirmed")
    if "config" in facts:
        recipe = find(facts["recipe"])[0]
        found += confirm_functions(from_json(recipe.preset(facts["preset"]), facts["config"]))
    return found


def confirm_functions(config: Config) -> list[trust.Code]:
    """Trust the functions that settings name, at the user's request."""
    found = function_code(config)
    for code in found:
        trust.record(code, "confirmed")
    return found


def _trusting(folder: Path) -> str:
    verb = "sweep --join" if (folder / "sweep.json").is_file() else "sample"
    return f"seedbed {verb} {folder.name} --trust"
