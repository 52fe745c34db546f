"""Recipes by name: the packages in this folder, and Python files of the user's with the same functions."""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from seedbed import config as configs
from seedbed.config import Config, Units
from seedbed.errors import UserError

if TYPE_CHECKING:
    from seedbed import trust
    from seedbed.data.feed import Data
    from seedbed.train.system import System


# The folder of a run with the part of its data that inference needs.
INFERENCE = "inference"


@dataclass(frozen=True)
class Recipe:
    """A recipe: its presets are loaded at once, its data and model on first use."""

    name: str
    presets: Mapping[str, Callable[[], Config]]
    _module: Callable[[str], ModuleType] = field(repr=False)
    _files: tuple[Path, ...] = ()
    code: "trust.Code | None" = field(default=None, repr=False)  # of a user's own file

    def preset(self, name: str | None) -> Config:
        """The config of a preset; there is no default, so that no run starts by accident."""
        if name is None:
            raise UserError(f"{self.name} has several presets, name one of: {', '.join(self.presets)}")
        return self.presets[_one_of(name, self.presets, f"{self.name} has no preset {name!r}")]()

    def open_data(self, config: Config) -> "Data":
        data = self.function("data", "open_data")(config)
        if config.limit == configs.Limit():
            return data
        from seedbed.data.limiting import limited

        return limited(data, config.limit)

    def save_inference_data(self, data: "Data", run: Path) -> None:
        """Save the part of the data that inference needs, by the recipe's `save_inference_data(data, folder)`; only once."""
        found = getattr(self._module("data"), "save_inference_data", None)
        if found and not (run / INFERENCE).is_dir():
            found(data, run / INFERENCE)

    def open_inference_data(self, config: Config, run: Path) -> "Data | None":
        """The data saved with a run; None for older runs, and for recipes whose inference needs all data."""
        found = getattr(self._module("data"), "open_inference_data", None)
        return found(config, run / INFERENCE) if found and (run / INFERENCE).is_dir() else None

    def evaluation_source(self, config: Config, data: "Data", given: Any) -> Any:
        """Given data as a source to evaluate on, by the recipe's `evaluation_source(config, data, given)`; else as they are."""
        return getattr(self._module("data"), "evaluation_source", lambda config, data, given: given)(config, data, given)

    def build(self, config: Config, data: "Data") -> "System":
        return self.function("system", "build")(config, data)

    def check_settings(self, config: Config) -> dict[str, Any]:
        """The settings of a small copy of a config, by key, from the recipe's `check_settings(config)`."""
        return getattr(self._module("presets"), "check_settings", lambda config: {})(config)

    def units(self, config: Config) -> Units:
        """What is counted and measured, by the recipe's `units(config)`."""
        return getattr(self._module("presets"), "units", lambda config: Units())(config)

    @property
    def is_playable(self) -> bool:
        """Whether its System is Playable, by `PLAYABLE` of its presets: pages ask without loading torch."""
        return getattr(self._module("presets"), "PLAYABLE", False)

    def check_data(self, config: Config, data: "Data") -> "Data":
        """The data of a small copy, made from the open data where the recipe has `check_data(config, data)`."""
        found = getattr(self._module("data"), "check_data", None)
        return found(config, data) if found else self.open_data(config)

    def files(self) -> list[Path]:
        """The source files, to show or hash them."""
        return list(self._files)

    def function(self, module: str, name: str) -> Callable[..., Any]:
        found = getattr(self._module(module), name, None)
        if found is None:
            raise UserError(
                f"recipe {self.name} defines no `{name}`; a recipe needs presets, open_data(config) and build(config, data)"
            )
        return found


def names() -> list[str]:
    """The recipes that come with the package."""
    found = (info.name for info in pkgutil.iter_modules(__path__) if info.ispkg and not info.name.startswith("_"))
    return sorted(name for name in found if (Path(__path__[0]) / name / "presets.py").is_file())


def find(name: str) -> tuple[Recipe, str | None]:
    """`gpt/demo`, `gpt`, `path/to/file.py` or `path/to/file.py:preset`: the recipe, and the preset if it is settled."""
    _, _, preset = name.partition(".py:")
    if is_file_name(name):
        from seedbed.recipes import user_files

        recipe = user_files.load_recipe(user_files.code_of(name))
    else:
        title, _, preset = name.partition("/")
        recipe = _from_package(_one_of(title, names(), f"there is no recipe {title!r}"))
    if preset:
        return recipe, _one_of(preset, recipe.presets, f"{recipe.name} has no preset {preset!r}")
    return recipe, next(iter(recipe.presets)) if len(recipe.presets) == 1 else None


def remember(recipe: Recipe, config: Config) -> None:
    """Trust what the user named for training, so that the run can be used later."""
    for code in named_code(recipe, config):
        from seedbed import trust

        trust.record(code, "trained")


def named_code(recipe: Recipe, config: Config) -> "list[trust.Code]":
    """All code outside the package that is executed for these settings."""
    return [*([recipe.code] if recipe.code else []), *function_code(config)]


def is_file_name(name: str) -> bool:
    return name.endswith(".py") or ".py:" in name


def function_code(config: Config) -> "list[trust.Code]":
    """The modules of functions that settings name; most name none."""
    names = [value for _, value, info, _ in configs.leaves(config) if info.metadata.get("code") and value]
    if not names:
        return []
    from seedbed import trust

    return [trust.inspect_module(name.partition(":")[0]) for name in names]


def _one_of(wanted: str, known: Any, problem: str) -> str:
    """The known name that equals `wanted`, with dashes equal to underscores; or an error with the nearest names and all."""
    name = wanted.replace("_", "-") if wanted not in known else wanted
    if name in known:
        return name
    from seedbed.recipes.catalogue import not_among

    raise not_among(wanted, known, problem)


def _from_package(name: str) -> Recipe:
    def module(part: str) -> ModuleType:
        return importlib.import_module(f"{__name__}.{name}.{part}")

    folder = Path(__path__[0]) / name
    return Recipe(name, _Presets(module, folder), module, tuple(sorted(folder.rglob("*.py"))))


class _Presets(Mapping[str, Callable[[], Config]]):
    """Presets of a recipe in the package: those of `presets.py`; where another is asked for, also those of `gpu_presets.py`."""

    def __init__(self, module: Callable[[str], ModuleType], folder: Path) -> None:
        self._module, self._folder, self._first = module, folder, presets_of(module("presets"))

    @functools.cached_property
    def _all(self) -> dict[str, Callable[[], Config]]:
        more = presets_of(self._module("gpu_presets")) if (self._folder / "gpu_presets.py").is_file() else {}
        return {**self._first, **more}

    def __getitem__(self, name: str) -> Callable[[], Config]:
        return self._first[name] if name in self._first else self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def presets_of(module: ModuleType) -> dict[str, Callable[[], Config]]:
    """Public functions defined in this module and annotated `-> Config`, in the order of the file."""
    return {
        name.replace("_", "-"): value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and _gives_config(value, module)
    }


def _gives_config(value: Any, module: ModuleType) -> bool:
    kind = getattr(value, "__annotations__", {}).get("return") if callable(value) and not isinstance(value, type) else None
    if isinstance(kind, str):
        # Written under `from __future__ import annotations`: follow the dotted name from the module.
        found: Any = module
        for part in kind.strip("'\"").split("."):
            found = getattr(found, part, None)
        kind = found
    return isinstance(kind, type) and issubclass(kind, Config)
