"""Faults as small edits of the real source: the functions that an edit changes run with its code while it is applied."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from seedbed import config as configs
from seedbed.checks import runner
from seedbed.checks.subject import Subject
from seedbed.recipes import find
from seedbed.report.findings import Report

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
GPT, TOY, EXAMPLE = "gpt/demo", "tests/toy_recipe.py", "examples/my_recipe.py"


@dataclass(frozen=True)
class Fault:
    """Something wrong with a recipe, and the checks that should say so.

    `place` is one of data, model, objective, optimizer, loop, evaluation and inference; `file` is the source that is wrong.
    """

    id: str
    recipe: str
    place: str
    expected: set[str]
    apply: Callable[[], AbstractContextManager[Any]]
    file: str = ""
    settings: tuple[str, ...] = ()


def fault(recipe: str, place: str, id: str, expected: str, file: str, old: str, new: str, *settings: str) -> Fault:
    """One edit: `old`, which must stand in the file exactly once, becomes `new`."""
    return Fault(id, recipe, place, set(expected.split()), lambda: edited(file, old, new), file, settings)


@contextlib.contextmanager
def edited(file: str, old: str, new: str) -> Iterator[None]:
    """Let every function of a source file run as if `old` read `new`; classes and objects stay the same."""
    path = SRC / file if (SRC / file).is_file() else ROOT / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} holds the text {text.count(old)} times: {old!r}"
    before, after = (dict(_codes(compile(t, str(path), "exec", dont_inherit=True))) for t in (text, text.replace(old, new)))
    changed = {name: code for name, code in after.items() if name in before and before[name] != code}
    assert changed, f"the edit of {file} changes no function: {new!r}"
    module = _module(path)
    undo: list[tuple[FunctionType, CodeType]] = []
    try:
        for name, code in changed.items():
            function = _function(module, name)
            if function is not None:
                undo.append((function, function.__code__))
                function.__code__ = code
        assert undo, f"none of {list(changed)} is a function of {file}"
        yield
    finally:
        for function, code in undo:
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """The code of every function and method by its qualified name; what is nested in a function goes with it."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if "<" not in inner.co_qualname:
                yield inner.co_qualname, inner
            yield from _codes(inner)


def _module(path: Path) -> ModuleType:
    if path.is_relative_to(SRC):
        return importlib.import_module(".".join(path.relative_to(SRC).with_suffix("").parts))
    return find(str(path))[0]._module("")


def _function(module: ModuleType, name: str) -> FunctionType | None:
    """The live function behind a qualified name, without the wrappers of decorators."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    found = getattr(found, "fget", found)
    found = getattr(found, "__func__", found)
    found = inspect.unwrap(found) if callable(found) else found
    return found if isinstance(found, FunctionType) else None


def check(recipe: str, *settings: str, only: Sequence[str] = ()) -> Report:
    """The checks on a recipe as it stands, by its name in the catalogue."""
    found, preset = find(str(ROOT / recipe) if recipe.endswith(".py") else recipe)
    subject = Subject(found, preset, configs.override(found.preset(preset), settings), Path("nowhere"))
    return runner.run(subject, runner.select(only))
