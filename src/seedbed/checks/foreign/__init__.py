"""seedbed.check: the checks on any torch.nn.Module with a loss function and batches; no recipe, config or run folder needed."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from seedbed.checks import runner
from seedbed.checks.foreign.batches import collect
from seedbed.checks.foreign.parts import make_parts
from seedbed.checks.foreign.subject import ForeignSubject, call_site
from seedbed.checks.foreign.system import Case
from seedbed.checks.subject import preserve_global_state, source_line
from seedbed.errors import UserError
from seedbed.recipes import load_file
from seedbed.report.findings import Report
from seedbed.train.probe import Probe

DECLARATIONS = ("causal", *(name for name in Probe.__dataclass_fields__ if name not in ("batch", "predict", "objective")))
PARTS = ("model", "loss", "batches", "optimizer", "scheduler", "evaluate", "sample")


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
    given = [model, loss, batches, optimizer, scheduler, evaluate, sample]
    checks = runner.select(only, skip)
    with _subject(given, declared, type(model).__name__, call_site()) as subject:
        return runner.run(subject, checks)


@contextlib.contextmanager
def _subject(given: list[Any], declared: dict[str, Any], name: str, site: str) -> Iterator[ForeignSubject]:
    """The subject; inside the block the user's own model cannot be called, only its copies."""
    for key in declared:
        if key not in DECLARATIONS:
            near = difflib.get_close_matches(key, (*DECLARATIONS, *PARTS), 1)
            raise UserError(
                f"unknown keyword {key}" + (f", did you mean {near[0]}?" if near else f"; there are: {', '.join(DECLARATIONS)}")
            )
    with preserve_global_state():
        parts = make_parts(*given)
        case = Case(parts, collect(parts.batches), declared)
    hooks = [module.register_forward_pre_hook(_refuse) for module in given[0].modules()]
    try:
        yield ForeignSubject(case, name, site)
    finally:
        for hook in hooks:
            hook.remove()


def _refuse(module: nn.Module, args: Any) -> None:
    raise UserError("the model itself was called; loss, evaluate and sample must use the model that they are given")


def script_subject(name: str) -> contextlib.AbstractContextManager[ForeignSubject]:
    """The subject of `script.py::make`, where make() returns a dict of the arguments of `check`."""
    path, _, function = name.partition("::")
    with preserve_global_state():
        make = getattr(load_file(path), function, None)
        if not callable(make):
            raise UserError(f"{path} has no function {function!r}; write one that returns a dict with model, loss and batches")
        found = make()
    if not isinstance(found, Mapping) or "model" not in found:
        raise UserError(f"{name} returned {type(found).__name__}, not a dict with model, loss and batches")
    declared = {key: value for key, value in found.items() if key not in PARTS}
    return _subject([found.get(key) for key in PARTS], declared, name, source_line(make))
