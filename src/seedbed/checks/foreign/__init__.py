"""seedbed.check: the checks on any torch.nn.Module with a loss function and batches; no recipe, config or run folder needed.

Systems are copies of the user's model, batches rows of the user's, places lines of the user's.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from seedbed.checks import runner
from seedbed.checks.foreign.case import Case, ForeignSystem, make_parts
from seedbed.checks.registry import Check
from seedbed.checks.subject import ROWS, Subject, is_installed, preserve_global_state, source_line
from seedbed.checks.watch_ops import caller
from seedbed.config import Config, Optim
from seedbed.data.feed import Data, Source
from seedbed.errors import UserError
from seedbed.recipes import Recipe, user_files
from seedbed.report.findings import Finding, Report
from seedbed.train.engine import Engine, mix
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, ParamGroup, System

PARTS = ("model", "loss", "batches", "optimizer", "scheduler", "evaluate", "sample")
DECLARATIONS = {"causal", *Probe.__dataclass_fields__} - {"batch", "predict", "objective"}
PACKAGE = Path(__file__).parents[2]
# Rows that short trainings use: few enough to be memorised, so that random data, as in many tests, can be learned too.
NUM_ROWS = 64
# Checks that train with the user's optimizers; all others use the engine's AdamW.
TUNED = ("O1", "O2", "O6", "H1", "H2")
TRAINING = ("M5", "C6", "O2", "O6", "H1", "H2", "E1", "E2", "E3", "V4", "G2", "G3")
NOT_HERE = {
    **dict.fromkeys(("A1", "A2", "A4", "D4", "D6", "O7", "I1", "I2", "I7", "V5", "V6"), "only a recipe has this"),
    **dict.fromkeys(("O3", "O4", "H3", "T1", "T2", "T6", "V2", "V3", "G1", "G4"), "your training loop does this"),
    **dict.fromkeys(("D7", "D8"), "your loader does this"),
    "L0": "the objective is the loss itself",
}
# Possibly meant, so no errors.
WARNINGS = ("M1", "L1", "E2", "T3")
# Targets that AdamW does not reach in a few hundred steps.
FAR = 50.0
REMEDIES = {"H1": "lower the learning rate", "H2": "raise the learning rate where the ratio is low, else lower it"}


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
    with _subject(given, declared, type(model).__name__, caller(PACKAGE, "the command line")) as subject:
        return runner.run(subject, checks)


@contextlib.contextmanager
def script_subject(name: str) -> Iterator[ForeignSubject]:
    """The subject of `script.py::make`, where make() returns a dict of the arguments of `check`."""
    path, _, function = name.partition("::")
    with preserve_global_state():
        make = getattr(user_files.load_module(user_files.code_of(path)), function, None)
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
    with contextlib.ExitStack() as hooks:
        for module in given[0].modules():
            hooks.enter_context(module.register_forward_pre_hook(_refuse))
        yield subject


def _refuse(module: nn.Module, args: Any) -> None:
    raise UserError("the model itself was called; loss, evaluate and sample must use the model that they are given")


class ForeignSubject(Subject):
    """A user's model, loss and batches. With `is_tuned`, training uses the user's optimizers."""

    unsure: ClassVar[Literal["", "note"]] = "note"

    def __init__(self, case: Case, name: str, site: str, is_tuned: bool = False) -> None:
        self.case, self.title, self.site = case, name, site
        rates = [base_lr(group) for optimizer in case.parts.optimizers for group in optimizer.param_groups]
        optim = Optim(lr=min(max(rates), 10.0), clip=0.0) if is_tuned else Optim(lr=3e-3, weight_decay=0.0)
        config, source = Config(model=None, data=None, optim=optim, device="cpu", batch=16), Source()
        source.num_items = case.num_rows
        written = filter(None, map(_own, (case.parts.loss, *map(type, case.parts.model.modules()))))
        module: Any = SimpleNamespace(build=lambda config, data: ForeignSystem(case))
        recipe = Recipe(name, {}, lambda part: module, tuple(sorted({Path(inspect.getfile(own)) for own in written})))
        super().__init__(recipe, None, config, Path(), full=True, data=Data(source, source, {}))
        self.engine_type = UserEngine if is_tuned else Engine

    @property
    def name(self) -> str:
        return self.title

    @functools.cached_property
    def tuned(self) -> ForeignSubject:
        return ForeignSubject(self.case, self.title, self.site, True) if self.case.parts.optimizers else self

    def batch(self, n: int = 0, size: int = ROWS) -> Batch:
        num = self.case.num_rows
        if size >= num:
            return self.case.take(torch.arange(size) % num)
        few = torch.randperm(num, generator=torch.Generator().manual_seed(1))[:NUM_ROWS]
        return self.case.take(few[torch.arange(n * size, (n + 1) * size) % len(few)])

    def loss_of(self, system: System, batch: Batch, seed: int = 0, variant: Any = None) -> Tensor:
        torch.manual_seed(mix(self.config.seed, seed))
        assert isinstance(system, ForeignSystem)
        return system.loss(batch)[0]

    def version(self, check: Check) -> Callable[[Subject], Finding] | str:
        from seedbed.checks.foreign.versions import VERSIONS  # these need the subject

        if reason := NOT_HERE.get(check.id) or self._reason(check.id):
            return reason
        if own := VERSIONS.get(check.id):
            return lambda subject: own(self, check)
        found = self.case.roles.reason if check.needs and self.case.roles.point is None else super().version(check)
        if isinstance(found, str):
            return found.replace("the recipe's probe does not declare", "not given, and not to be seen in a batch:")
        severity, target = "warn" if check.id in WARNINGS else "", self.tuned if check.id in TUNED else self
        return lambda subject: replace(result := found(target), severity=result.severity or severity)

    def _reason(self, id: str) -> str:
        """Why a check has nothing to work on."""
        if id in TUNED and id != "O2" and not self.case.parts.optimizers:
            return "no optimizer was given"
        if id[0] == "A" or id in ("D2", "M3"):  # these need no loss, or say what is wrong with it
            return ""
        loss = self.once("loss", self._first_loss)
        if loss is None or (id in TRAINING and not (loss.requires_grad and loss.isfinite().all())):
            return "the loss has no value, or no gradient (see M3)"
        targets = self.case.rows.get(self.case.roles.targets)
        if targets is None:
            return "inputs and targets are not separate" if id in ("E2", "V4", "L2") else ""
        is_far = id in ("E1", "E2", "E3", "V4") and targets.is_floating_point() and targets.abs().mean() > FAR
        return "targets are too large to be reached in a short run" if is_far else ""

    def _first_loss(self) -> Tensor | None:
        """The loss of the first batch; None where it cannot be computed, which is left to M3."""
        with contextlib.suppress(Exception):
            return self.loss_of(self.fresh_system(), self.batch())

    # ---- places ------------------------------------------------------------------------------------------------------

    def advice(self, finding: Finding, id: str) -> tuple[str, str]:
        again = f"seedbed check {self.title} --only {id}" if "::" in self.title else f'seedbed.check(..., only=["{id}"])'
        match, where = re.match(r"(.+?\.py):\d+", finding.where), finding.where
        if not match or match[1].startswith("seedbed/") or is_installed(match[1]):
            lines = {"O": self.optimizer_line, "H": self.optimizer_line, "D": self.batch_line}
            where = lines.get(id[0], self.loss_line)()
        return where, f"{REMEDIES.get(id, finding.fix)}; then: {again}"

    def line_of(self, *things: Any) -> str:
        """The line of the first of these that is the user's own; else the line of the call."""
        return next((source_line(own) for thing in things if (own := _own(thing))), self.site)

    def loss_line(self) -> str:
        kind = type(self.case.parts.model)
        return self.line_of(self.case.parts.loss, getattr(kind, "training_step", None), kind.forward)

    def batch_line(self) -> str:
        batches = self.case.parts.batches
        collate, dataset = getattr(batches, "collate_fn", None), getattr(batches, "dataset", None)
        return self.line_of(batches, collate, type(collate).__call__, getattr(type(dataset), "__getitem__", None))

    def optimizer_line(self) -> str:
        return self.line_of(getattr(type(self.case.parts.model), "configure_optimizers", None))


def _own(thing: Any) -> Any:
    """The function or class itself if the user wrote it in a file; None for what is a library's or written nowhere."""
    thing = thing.func if isinstance(thing, functools.partial) else thing
    thing = inspect.unwrap(getattr(thing, "__func__", thing))
    try:
        path = inspect.getsourcefile(thing) or ""
    except TypeError:
        return None
    return None if Path(path).is_relative_to(PACKAGE) or is_installed(path) or not Path(path).is_file() else thing


def base_lr(group: dict[str, Any]) -> float:
    """The learning rate before a scheduler changed it."""
    return float(group.get("initial_lr", group["lr"]))


class UserEngine(Engine):
    """An engine that steps with the optimizers that the user gave."""

    def __init__(self, system: Any, config: Config, device: torch.device) -> None:
        super().__init__(system, config, device)
        names = {id(param): name for name, param in system.named_parameters()}
        self.rates = [(group, base_lr(group)) for optimizer in system.optimizers for group in optimizer.param_groups]
        named = [{names.get(id(p), str(i)): p for i, p in enumerate(group["params"])} for group, _ in self.rates]
        groups = [ParamGroup("given", "given", rate, 0.0, params) for (_, rate), params in zip(self.rates, named, strict=True)]
        held = [param for group in groups for param in group.params.values()]
        self.optimizers: dict[str, Any] = {"main": SimpleNamespace(groups=groups, params=held, step=self._step)}

    def _step(self, lr_factor: Tensor, divisor: Tensor, skip: Tensor) -> None:
        for group, rate in self.rates:
            group["lr"] = rate * float(lr_factor)
        system: Any = self.system
        for optimizer in system.optimizers if not skip else ():
            optimizer.step()
