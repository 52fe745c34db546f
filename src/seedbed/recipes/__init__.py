"""Recipes by name: the packages in this folder, and any Python file of the user's that is written the same way."""

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from seedbed.config import Config
from seedbed.errors import UserError

if TYPE_CHECKING:
    from seedbed.data.feed import Data
    from seedbed.train.system import System


@dataclass(frozen=True)
class Recipe:
    """A system that can be trained: its presets at once, its data and model when they are asked for."""

    name: str
    presets: dict[str, Callable[[], Config]]
    _module: Callable[[str], ModuleType] = field(repr=False)
    _files: tuple[Path, ...] = ()

    def preset(self, name: str | None) -> Config:
        """The config of a preset; there is no default, so that no run starts by accident."""
        if name is None:
            raise UserError(f"{self.name} has several presets, name one of: {', '.join(self.presets)}")
        return self.presets[_one_of(name, self.presets, f"{self.name} has no preset {name!r}")]()

    def open_data(self, config: Config) -> "Data":
        from seedbed.data.feed import limited

        return limited(self._function("data", "open_data")(config), config.limit)

    def build(self, config: Config, data: "Data") -> "System":
        return self._function("system", "build")(config, data)

    def files(self) -> list[Path]:
        """The source files, for whoever wants to show or hash them."""
        return list(self._files)

    def _function(self, module: str, name: str) -> Callable[..., Any]:
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
    path, colon, preset = name.partition(".py:")
    if colon or name.endswith(".py"):
        recipe = _from_file(Path(path + ".py" if colon else name))
    else:
        title, _, preset = name.partition("/")
        recipe = _from_package(_one_of(title, names(), f"there is no recipe {title!r}"))
    if preset:
        return recipe, _one_of(preset, recipe.presets, f"{recipe.name} has no preset {preset!r}")
    return recipe, next(iter(recipe.presets)) if len(recipe.presets) == 1 else None


def find_saved(name: str, root: Path) -> Recipe:
    """The recipe that a file below `root` names. Nothing that came with such a folder is run because the folder says so."""
    if name.endswith(".py") or ".py:" in name:
        path, home = Path(name), root.resolve()
        inside = path.resolve().is_relative_to(home) and path.resolve().parent != home
        if not path.is_absolute() or inside:
            raise UserError(
                f"{root} names the recipe file {name}, which came with it and would be run as a program\n"
                "if you have read and trust it, copy it elsewhere and correct `recipe` in config.json"
            )
    return find(name)[0]


def describe(name: str) -> dict[str, str]:
    """Preset to the first line of its docstring; a recipe that does not load says so instead of hiding the others."""
    try:
        recipe, _ = find(name)
    except Exception as error:
        return {"?": f"does not load: {type(error).__name__}: {error}".partition("\n")[0]}
    return {preset: (make.__doc__ or "").strip().partition("\n")[0] for preset, make in recipe.presets.items()}


def place_in_user_file(error: BaseException) -> str | None:
    """Where in a recipe of the user's own an error arose, as file:line; None when it passed through no such file."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames if Path(frame.filename) in _loaded]
    return places[-1] if places else None


def _one_of(wanted: str, known: Any, problem: str) -> str:
    """`wanted` as it is known, dashes and underscores being the same; or an error with the nearest names and all of them."""
    name = wanted.replace("_", "-") if wanted not in known else wanted
    if name in known:
        return name
    import difflib

    near = difflib.get_close_matches(wanted, known, 3, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"{problem}{hint}\nthere are: {', '.join(known) or 'none'}")


def _from_package(name: str) -> Recipe:
    def module(part: str) -> ModuleType:
        return importlib.import_module(f"{__name__}.{name}.{part}")

    folder = Path(__path__[0]) / name
    return Recipe(name, _presets(module("presets")), module, tuple(sorted(folder.glob("*.py"))))


def _presets(module: ModuleType) -> dict[str, Callable[[], Config]]:
    """Public functions made in this module and annotated `-> Config`, in the order of the file."""
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


class _FreshLoader(SourceFileLoader):
    """Reads the source every time: a cached .pyc is keyed by whole seconds, and a recipe may be edited within one."""

    def path_stats(self, path: str) -> Any:
        raise OSError


_loaded: dict[Path, tuple[bytes, ModuleType]] = {}


def _from_file(path: Path) -> Recipe:
    source = _source(path)
    try:
        content = source.read_bytes()
    except OSError as error:
        raise UserError(f"recipe file {path} cannot be read: {error.strerror}") from None
    path, source = path.resolve(), source.resolve()
    # The same file gives the same module, or one config would not be an instance of the other's class.
    if source not in _loaded or _loaded[source][0] != content:
        _loaded[source] = (content, _load(path, source))
    module = _loaded[source][1]
    presets = _presets(module)
    if not presets:
        raise UserError(f"{path.name} has no preset: write a function annotated `-> Config` that returns one")
    return Recipe(str(path), presets, lambda part: module, (source,))


def _source(path: Path) -> Path:
    """The file to read: a job of a cluster holds to the copy from when it was submitted, however the file is edited since."""
    kept = os.environ.get("SEEDBED_CODE")
    copy = Path(kept, "files", *path.resolve().parts[1:]) if kept else path
    return copy if copy.is_file() else path


def _load(path: Path, source: Path) -> ModuleType:
    import hashlib
    import importlib.util

    name = f"seedbed_recipe_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, source, loader=_FreshLoader(name, str(source)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        # At the end, so that a helper module beside the recipe is found and nothing else is hidden by it.
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _explain(error, source)
    return module


def _explain(error: BaseException, path: Path) -> NoReturn:
    """An error while the user's file was loading, as one line with the place in that file."""
    import traceback

    reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        raise UserError(f"{path}:{error.lineno}: {error.msg}") from None
    places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    raise UserError(f"{path}{f':{places[-1]}' if places else ''}: {reason}") from None
