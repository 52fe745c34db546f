"""What recipes offer, for listings: presets with their first lines, and dataset kinds."""

import difflib
import importlib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seedbed import recipes
from seedbed.data import kinds
from seedbed.errors import UserError
from seedbed.recipes import find, names


def describe(name: str) -> dict[str, str]:
    """Preset to the first line of its docstring; for a recipe that does not load, the error."""
    try:
        recipe, _ = find(name)
    except Exception as error:
        return {"?": f"does not load: {type(error).__name__}: {error}".partition("\n")[0]}
    return {preset: (make.__doc__ or "").strip().partition("\n")[0] for preset, make in recipe.presets.items()}


def measured() -> dict[str, dict[str, Any]]:
    """By recipe: what it is `about`, and by preset what it trains, the machine, the time and the result that was measured."""
    return tomllib.loads((Path(recipes.__file__).parent / "presets.toml").read_text())


def dataset_kinds() -> dict[str, kinds.DatasetKind]:
    """The dataset kinds that recipes register in their `dataset.py`, by name."""
    for name in names():
        if (Path(recipes.__path__[0]) / name / "dataset.py").is_file():
            importlib.import_module(f"seedbed.recipes.{name}.dataset")
    return kinds.KINDS


def not_among(wanted: str, known: Iterable[str], problem: str) -> UserError:
    """The error for a name that is not known, with the nearest names and all."""
    near = difflib.get_close_matches(wanted, list(known), 3, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return UserError(f"{problem}{hint}\nthere are: {', '.join(known) or 'none'}")
