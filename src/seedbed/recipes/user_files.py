"""Recipes in Python files of the user's: loaded from the bytes that were checked, with errors that name their line."""

import hashlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import traceback
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from seedbed import trust
from seedbed.errors import UserError
from seedbed.recipes import Recipe, presets_of
from seedbed.trust import Code


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
    # The file to read: a cluster job uses the copy from its submission, even if the file was edited since.
    kept = os.environ.get("SEEDBED_CODE")
    copy = Path(kept, "files", *path.resolve().parts[1:]) if kept else path
    return trust.inspect(path, copy if copy.is_file() else path)


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
        # An error while the user's file was loading, as one line with its position in that file.
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        reason = f"{kind}{error}".strip().splitlines()[0]
        if isinstance(error, SyntaxError) and error.filename == str(source):
            raise UserError(f"{source}:{error.lineno}: {error.msg}") from None
        places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(source)]
        raise UserError(f"{source}{f':{places[-1]}' if places else ''}: {reason}") from None
    return module


def place_of(error: BaseException) -> str:
    """Where in a user's file an error arose, with its source line; empty when no such file has to do with it."""
    whole = "".join(traceback.format_exception(error))  # with its causes, and the text of a DataLoader's worker
    mine = [found for found in re.findall(r'File "(.+?)", line (\d+), in (\S+)', whole) if found[0] in _contents]
    path, line, function = mine[-1] if mine else _returned(error)
    if not path:
        return ""
    whose = "by your recipe" if mine else f"by what `{function}` of your recipe returned"
    source = linecache.getline(path, int(line)).strip()
    return f"{whose}, {path}:{line}, in {function}" + (f"\n  {source}" if source else "")


def _returned(error: BaseException) -> tuple[str, int, str]:
    """File, line and name of the method of a user's System whose result made our own code fail."""
    mine = {module.__name__ for _, module in _loaded.values()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name[0] != "_"]
    for frame in reversed(frames):
        owner = next((frame.f_locals[name] for name in ("job", "trained", "self") if name in frame.f_locals), None)
        kinds = [kind for kind in type(getattr(owner, "system", owner)).__mro__ if kind.__module__ in mine]
        called = (frame.f_code.co_name, "loss") if frame.f_code.co_name == "update" else (frame.f_code.co_name,)
        own = [vars(kind)[name] for name in called for kind in kinds if name in vars(kind)]
        if code := next((getattr(inspect.unwrap(one), "__code__", None) for one in own), None):
            return code.co_filename, code.co_firstlineno, code.co_name
    return "", 0, ""


def without_our_frames(error: Exception) -> Exception:
    """The error with its traceback from the first line of a user's file on, where it passes through one."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename not in _contents:
        step = step.tb_next
    return error.with_traceback(step or error.__traceback__)


def at_work(error: BaseException) -> str:
    """The user's recipe that a function under way was given; empty where none was."""
    given = [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    recipes = (getattr(value, "recipe", value) for value in given)
    return next((one.name for one in recipes if isinstance(one, Recipe) and one.code), "")
