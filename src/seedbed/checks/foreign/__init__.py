"""seedbed.check: the checks on any torch.nn.Module with a loss function and batches; no recipe, config or run folder needed."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from seedbed.checks import runner
from seedbed.checks.foreign.case import Case
from seedbed.checks.foreign.parts import make_parts
from seedbed.checks.foreign.subject import ForeignSubject, call_site
from seedbed.checks.subject import preserve_global_state, source_line
from seedbed.errors import UserError
from seedbed.recipes import load_file
from seedbed.report.findings import Report
from seedbed.train.probe import Probe

PARTS = ("model", "loss", "batches", "optimizer", "scheduler", "evaluate", "sample")
DECLARATIONS = {"causal", *Probe.__dataclass_fields__} - {"batch", "predict", "objective"}


def check(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    batches: Any = None,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    sample: Callable[[nn.Module], Any] | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    **declared: Any,
) -> Report:
    """Findings on a model of your own: `print` the report, or read its `findings` and `exit_code`.

    `loss(model, batch)` returns a scalar tensor; `batches` is a list, a loader, or a function that returns an iterator. Lightning
    modules need neither, models of transformers need no loss. `evaluate(model)` returns numbers by name; `sample` anything.
    Further keywords are `causal`, `inputs`, `targets` and the other fields of `Probe`. Everything you give is left as it was.
    """
    checks, given = runner.select(only, skip), [model, loss, batches, optimizer, scheduler, evaluate, sample]
    with _subject(given, declared, type(model).__name__, call_site()) as subject:
        return runner.run(subject, checks)


@contextlib.contextmanager
def script_subject(name: str) -> Iterator[ForeignSubject]:
    """The subject of `script.py::make`, where make() returns a dict of the arguments of `check`."""
    path, _, function = name.partition("::")
    with preserve_global_state():
        make = getattr(load_file(path), function, None)
        found = make() if callable(make) else None
    if not isinstance(found, Mapping) or "model" not in found:
        raise UserError(f"{path} needs a function {function!r} that returns a dict with model, loss and batches")
    declared = {key: value for key, value in found.items() if key not in PARTS}
    with _subject([found.get(key) for key in PARTS], declared, name, source_line(make)) as subject:
        yield subject


@contextlib.contextmanager
def _subject(given: list[Any], declared: dict[str, Any], name: str, site: str) -> Iterator[ForeignSubject]:
    """The subject; inside the block the user's own model cannot be called, only its copies."""
    for key in declared.keys() - DECLARATIONS:
        near = difflib.get_close_matches(key, (*PARTS, *DECLARATIONS), 1) or sorted(DECLARATIONS)
        raise UserError(f"there is no keyword {key!r}; did you mean {' or '.join(near)}?")
    with preserve_global_state():
        subject = ForeignSubject(Case(make_parts(*given), declared), name, site)
    hooks = [module.register_forward_pre_hook(_refuse) for module in given[0].modules()]
    try:
        yield subject
    finally:
        for hook in hooks:
            hook.remove()


def _refuse(module: nn.Module, args: Any) -> None:
    raise UserError("the model itself was called; loss, evaluate and sample must use the model that they are given")
