"""The subject of checks on a user's model: systems are copies of it, batches rows of the user's, places lines of the user's."""

from __future__ import annotations

import functools
import inspect
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from seedbed.checks.foreign.system import Case, ForeignSystem
from seedbed.checks.subject import ROWS, Subject, is_installed, short, source_line
from seedbed.config import Config, Optim
from seedbed.data.feed import Data, Source
from seedbed.recipes import Recipe
from seedbed.train.engine import Engine, mix
from seedbed.train.system import Batch, ParamGroup, System

if TYPE_CHECKING:
    from seedbed.checks.registry import Check
    from seedbed.report.findings import Finding

PACKAGE = Path(__file__).parents[2]
# Rows that short trainings use: few enough to be memorised, so that random data, as in many tests, can be learned too.
NUM_ROWS = 64
# Checks that train with the user's optimizer; all others use the engine's AdamW.
TUNED = ("O1", "O2", "O6", "H1", "H2")
TRAINING = ("M5", "C6", "O6", "H1", "H2", "E1", "E2", "E3", "V4", "G2", "G3")
NOT_HERE = {
    **dict.fromkeys(("A1", "A2", "A4", "D4", "D6", "O7", "I1", "I2", "I7"), "only a recipe has this"),
    **dict.fromkeys(("O3", "O4", "H3", "T1", "T2", "T6", "V2", "V3", "G1", "G4"), "your training loop does this"),
    **dict.fromkeys(("D7", "D8"), "your loader does this"),
    "L0": "the objective is the loss itself",
}
# Possibly meant, so no errors.
WARNINGS = ("A3", "M1", "L1", "C6", "E2", "T3")
REMEDIES = {
    "A3": "change it; where it is meant, write `# check: allow` behind the line",
    "O2": "see that the optimizer holds and steps it; look for detach, no_grad and unused modules; where meant: dead=[name]",
    "H1": "lower the learning rate",
    "H2": "raise the learning rate where the ratio is low, lower it where it is high",
}


class ForeignSubject(Subject):
    """A user's model, loss and batches. With `is_tuned`, training uses the user's optimizers."""

    unsure: ClassVar[Literal["", "note"]] = "note"

    def __init__(self, case: Case, name: str, site: str, is_tuned: bool = False) -> None:
        self.case, self.title, self.site = case, name, site
        rates = [base_lr(group) for optimizer in case.parts.optimizers for group in optimizer.param_groups]
        optim = Optim(lr=min(max(rates), 10.0), clip=0.0) if is_tuned else Optim(weight_decay=0.0)
        config, source = Config(model=None, data=None, optim=optim, device="cpu", batch=16), Source()
        source.num_items = case.pool.num_rows
        files = {_own_file(thing) for thing in (case.parts.places["loss"], *map(type, case.parts.model.modules()))}
        module: Any = SimpleNamespace(build=lambda config, data: ForeignSystem(case))
        recipe = Recipe(name, {}, lambda part: module, tuple(Path(file) for file in sorted(files) if file))
        super().__init__(recipe, None, config, Path(), full=True, data=Data(source, source, {}))
        self.engine_type = UserEngine if is_tuned else Engine

    @property
    def name(self) -> str:
        return self.title

    def batch(self, n: int = 0, size: int = ROWS) -> Batch:
        pool = self.case.pool
        if size >= pool.num_rows:
            return pool.take(torch.arange(size) % pool.num_rows)
        few = torch.randperm(pool.num_rows, generator=torch.Generator().manual_seed(1))[:NUM_ROWS]
        return pool.take(few[torch.arange(n * size, (n + 1) * size) % len(few)])

    def loss_of(self, system: System, batch: Batch, seed: int = 0, variant: Any = None) -> Tensor:
        seed = mix(self.config.seed, seed)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        foreign: Any = system
        return foreign.loss(batch)[0]

    @functools.cached_property
    def tuned(self) -> ForeignSubject:
        return ForeignSubject(self.case, self.title, self.site, True) if self.case.parts.optimizers else self

    def version(self, check: Check) -> Callable[[Subject], Finding] | str:
        from seedbed.checks.foreign.versions import VERSIONS  # these need the subject

        if reason := NOT_HERE.get(check.id) or self._reason(check.id):
            return reason
        if own := VERSIONS.get(check.id):
            return lambda subject: own(self, check)
        if check.needs and self.case.roles.point is None:
            return self.case.roles.reason
        found = super().version(check)
        if isinstance(found, str):
            return found.replace("the recipe's probe does not declare", "not given, and not to be seen in a batch:")
        severity = "warn" if check.id in WARNINGS else ""
        target = self.tuned if check.id in TUNED else self
        return lambda subject: replace(result := found(target), severity=result.severity or severity)

    def _reason(self, id: str) -> str:
        """Why a check has nothing to work on."""
        if id in TUNED and id != "O2" and not self.case.parts.optimizers:
            return "no optimizer was given"
        if id in ("C2", "E2", "V4", "L2") and not self.case.roles.targets:
            return "inputs and targets are not separate entries of a batch"
        if id not in TRAINING:
            return ""
        loss = self.once("loss", lambda: self.loss_of(self.fresh_system(), self.batch()))
        return "the loss has no gradient (see O2)" if not loss.requires_grad else "" if loss.isfinite().all() else "see M3"

    # ---- places ------------------------------------------------------------------------------------------------------

    def advice(self, finding: Finding, id: str) -> tuple[str, str]:
        again = f"seedbed check {self.title} --only {id}" if "::" in self.title else f'seedbed.check(..., only=["{id}"])'
        match, where = re.match(r"(.+?\.py):\d+", finding.where), finding.where
        if not match or match[1].startswith("seedbed/") or is_installed(match[1]):
            line = {"O": self.optimizer_line, "H": self.optimizer_line, "D": self.batch_line}.get(id[0], self.loss_line)
            where = line()
        return where, f"{REMEDIES.get(id, finding.fix)}; then: {again}"

    def line_of(self, *things: Any) -> str:
        """The line of the first of these that is the user's own; else the line of the call."""
        return next((source_line(_function(thing)) for thing in things if _own_file(thing)), self.site)

    def loss_line(self) -> str:
        return self.line_of(self.case.parts.places["loss"], type(self.case.parts.model).forward)

    def batch_line(self) -> str:
        batches = self.case.parts.batches
        collate = getattr(batches, "collate_fn", None)
        dataset = getattr(batches, "dataset", None)
        return self.line_of(batches, collate, type(collate).__call__, getattr(type(dataset), "__getitem__", None))

    def optimizer_line(self) -> str:
        return self.line_of(self.case.parts.places.get("optimizer"))


def call_site() -> str:
    """The innermost line of the stack that is neither of this package nor of a library."""
    frame = sys._getframe(1)
    while frame and (Path(frame.f_code.co_filename).is_relative_to(PACKAGE) or is_installed(frame.f_code.co_filename)):
        frame = frame.f_back
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_qualname}" if frame else "the command line"


def _function(thing: Any) -> Any:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return inspect.unwrap(getattr(thing, "__func__", thing))


def _own_file(thing: Any) -> str:
    """The file in which the user wrote this function or class; empty for what is a library's or written nowhere."""
    try:
        path = inspect.getsourcefile(_function(thing)) or ""
    except TypeError:
        return ""
    return "" if Path(path).is_relative_to(PACKAGE) or is_installed(path) or not Path(path).is_file() else path


# ---- the user's optimizers -----------------------------------------------------------------------------------------------


def base_lr(group: dict[str, Any]) -> float:
    """The learning rate before a scheduler changed it."""
    return float(group.get("initial_lr", group["lr"]))


class UserEngine(Engine):
    """An engine that steps with the optimizers that the user gave."""

    def __init__(self, system: Any, config: Config, device: torch.device) -> None:
        super().__init__(system, config, device)
        self.optimizers: dict[str, Any] = {"main": UserOptimizers(system)}


class UserOptimizers:
    """The user's optimizers behind the interface of the engine's."""

    def __init__(self, system: ForeignSystem) -> None:
        names = {id(param): name for name, param in system.named_parameters()}
        pairs = [(optimizer, group) for optimizer in system.optimizers for group in optimizer.param_groups]
        self.optimizers, self.rates = system.optimizers, [(group, base_lr(group)) for _, group in pairs]
        self.groups = [
            ParamGroup(
                kind, kind, base_lr(group), float(group.get("weight_decay", 0.0)), {names[id(p)]: p for p in group["params"]}
            )
            for optimizer, group in pairs
            if (kind := type(optimizer).__name__)
        ]
        self.params = [param for group in self.groups for param in group.params.values()]

    def step(self, lr_factor: Tensor, divisor: Tensor, skip: Tensor) -> None:
        for group, rate in self.rates:
            group["lr"] = rate * float(lr_factor)
        for optimizer in self.optimizers if not skip else ():
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        return {}
