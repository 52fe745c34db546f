"""Recipes in Python files of the user's: loaded from the bytes that were checked, with errors that name their line."""

import hashlib
import importlib.util
import os
import sys
import traceback
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from seedbed.errors import UserError
from seedbed.recipes import Recipe, presets_of
from seedbed.trust import Code, inspect


class _FreshLoader(SourceFileLoader):
    """Executes the bytes that were checked, never a .pyc, which may belong to another source."""

    def path_stats(self, path: str) -> Any:
        raise OSError

    def get_data(self, path: str) -> bytes:
        found = _contents.get(path)
        return super().get_data(path) if found is None else found


_contents: dict[str, bytes] = {}
_loaded: dict[Path, tuple[str, ModuleType]] = {}


def load_recipe(code: Code) -> Recipe:
    """The recipe in a file that has been checked."""
    path, module = code.path, load_module(code)
    presets = presets_of(module)
    if not presets:
        raise UserError(f"{path.name} has no preset: write a function annotated `-> Config` that returns one")
    return Recipe(str(path), presets, lambda part: module, (next(iter(code.contents)),), code)


def load_module(code: Code) -> ModuleType:
    """The module in a file that has been checked. The same file gives the same module, so configs are instances of one class."""
    source = next(iter(code.contents))
    if source not in _loaded or _loaded[source][0] != code.sha256:
        _loaded[source] = (code.sha256, _load(code, source))
    return _loaded[source][1]


def code_of(name: str) -> Code:
    """The recipe file that would be executed, by its name on the command line or in a run folder."""
    path = Path(name.partition(".py:")[0] + ".py" if ".py:" in name else name)
    return inspect(path, source_of(path))


def source_of(path: Path) -> Path:
    """The file to read: a cluster job uses the copy from its submission, even if the file was edited since."""
    kept = os.environ.get("SEEDBED_CODE")
    copy = Path(kept, "files", *path.resolve().parts[1:]) if kept else path
    return copy if copy.is_file() else path


def _load(code: Code, source: Path) -> ModuleType:
    name = f"seedbed_recipe_{hashlib.sha256(str(code.path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, source, loader=_FreshLoader(name, str(source)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _contents.update({str(path): content for path, content in code.contents.items()})
    if str(source.parent) not in sys.path:
        # At the end, so that a helper module next to the recipe is found and hides no other module.
        sys.path.append(str(source.parent))
        for folder in {str(path.parent) for path in code.contents}:
            loaders = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_FreshLoader, SOURCE_SUFFIXES)
            sys.path_importer_cache[folder] = FileFinder(folder, *loaders)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _explain(error, source)
    return module


def _explain(error: BaseException, path: Path) -> NoReturn:
    """An error while the user's file was loading, as one line with its position in that file."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    reason = f"{kind}{error}".strip().splitlines()[0]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        raise UserError(f"{path}:{error.lineno}: {error.msg}") from None
    places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    raise UserError(f"{path}{f':{places[-1]}' if places else ''}: {reason}") from None


def place_of(error: BaseException) -> str | None:
    """Where in such a file an error arose, as file:line; None when it did not pass through one."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames if Path(frame.filename) in _loaded]
    return places[-1] if places else None
