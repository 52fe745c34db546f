"""A user's model and loss as a System, and the Probe that one run of the loss allows: what predicts, and from what."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seedbed.checks.foreign.batches import Pool
from seedbed.checks.foreign.parts import Parts, scalar
from seedbed.checks.random_draws import RecordDraws, ReplayDraws
from seedbed.checks.structure_checks import altered
from seedbed.checks.subject import ROWS, take_rows
from seedbed.train.engine import EvalEngine
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, System

TARGET_NAMES = ("labels", "label", "targets", "target", "y")
# Attention does not depend on the bias of its keys.
KEY_BIAS = re.compile(r"(^|[._])(k|key|wk|k_proj|key_proj|to_k|k_lin)\.bias$")
IGNORED = -100  # torch's `ignore_index`
COUNTED, NOISE = "counted", "noise"


class ForeignSystem(System):
    """A copy of the user's model, optimizers and schedulers. `case` is shared by all copies."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, parts = case, case.parts
        self.model, self.optimizers, self.schedulers = copy.deepcopy((parts.model, parts.optimizers, parts.schedulers))
        self.train()

    def loss(self, batch: Batch, engine: EvalEngine | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        return scalar(self.case.parts.loss(self.model, self.case.pool.restore(batch))), {}

    def num_targets(self, batch: Batch) -> Tensor | int:
        return self.case.num_targets(batch)

    def probe(self, batch: Batch) -> Probe:
        return self.case.probe(self, batch)


@dataclass
class Roles:
    """What the entries of a batch are for. `point` is the path of the module whose output is the prediction, if there is one."""

    inputs: str
    targets: str = ""
    uses: tuple[str, ...] = ()
    point: str | None = None
    reason: str = ""
    draws: bool = False
    class_axis: int | None = None
    num_classes: int = 0
    is_supervised: bool = False
    guess: float = 0.0
    per_target: bool = False


@dataclass
class Case:
    """The user's parts and rows, and what the user declared about them."""

    parts: Parts
    pool: Pool
    declared: dict[str, Any] = field(default_factory=dict)

    def num_targets(self, batch: Batch) -> Tensor | int:
        """The targets that count, where the loss is a mean over these; else rows."""
        return self.counted(batch).sum() if self.roles.per_target else len(batch[self.roles.inputs])

    def counted(self, batch: Batch) -> Tensor:
        """Where a target counts: not at -100, and not at the first position where the model shifts its targets."""
        kept = batch[self.roles.targets] != IGNORED
        if self.parts.shifts_targets and kept.ndim > 1:
            kept[:, 0] = False
        return kept

    @functools.cached_property
    def roles(self) -> Roles:
        """Runs the loss on a few rows in evaluation mode, and looks at what reaches the model and what it returns."""
        system, batch = ForeignSystem(self).eval(), self.pool.take(torch.arange(ROWS) % self.pool.num_rows)
        before = torch.get_rng_state()
        with torch.no_grad():
            given, (point, reason) = _watch(system.model, lambda: system.loss(batch)[0])
        reached = [name for name in batch if any(batch[name] is value for value in given)]
        targets, is_certain = self._targets(batch, reached)
        rest = [name for name in (*reached, *batch) if name != targets] or list(batch)
        inputs = self.pool.name_of(self.declared.get("inputs", rest[0]))
        used = self.declared.get("uses", [n for n in reached if n not in (inputs, targets) and "mask" not in n])
        self.roles = roles = Roles(
            inputs, targets if targets != inputs else "", tuple(map(self.pool.name_of, used)), point, reason
        )
        roles.draws = not torch.equal(before, torch.get_rng_state())
        if roles.targets and (point is not None or not is_certain):
            with torch.no_grad():
                self._learn_form(self.probe(system, batch) if point is not None else None, is_certain)
        return roles

    def _targets(self, batch: Batch, reached: list[str]) -> tuple[str, bool]:
        """The entry that predictions are compared with, and whether the user or its name says so."""
        if "targets" in self.declared:
            return self.pool.name_of(self.declared["targets"]), True
        named = [name for name in TARGET_NAMES if name in batch]
        last = list(batch)[-1]
        return (named[0], True) if named else ("" if len(batch) < 2 or last in reached else last, False)

    def _learn_form(self, probe: Probe | None, is_certain: bool) -> None:
        """Whether the loss uses the target; classification or regression; what a guess costs; what the loss is a mean over."""
        roles = self.roles
        if probe is None:
            roles.targets = ""
            return
        prediction, targets = probe.predict(probe.batch), probe.batch[roles.targets]
        loss = probe.objective(prediction, probe.batch)
        other = {**probe.batch, roles.targets: altered(targets, (slice(None),))}
        if not is_certain and torch.equal(loss, probe.objective(prediction, other)):
            roles.targets = ""  # the last entry of a tuple is not always used
            return
        if targets.is_floating_point():
            roles.is_supervised = targets.shape == prediction.shape and not roles.draws
            roles.num_classes = 2 if roles.is_supervised and bool(((targets == 0) | (targets == 1)).all()) else 0
        elif prediction.ndim == targets.ndim + 1:
            axes = (axis for axis in (-1, 1) if prediction.select(axis, 0).shape == targets.shape)
            roles.class_axis = next((axis for axis in axes if prediction.shape[axis] > targets.max()), None)
            roles.is_supervised = roles.class_axis is not None
            roles.num_classes = prediction.shape[roles.class_axis] if roles.class_axis is not None else 0
        if roles.num_classes > 1:
            flat = float(probe.objective(torch.zeros_like(prediction), probe.batch))
            roles.guess = flat if math.isclose(flat, math.log(roles.num_classes), rel_tol=1e-3) else 0.0
        if not targets.is_floating_point():
            rows = [slice(i, i + 1) for i in range(len(targets))]
            losses = [float(probe.objective(prediction[row], take_rows(probe.batch, row))) for row in rows]
            counts = (
                [float(count) for count in self.counted(probe.batch).flatten(1).sum(1)] if targets.ndim > 1 else [1.0] * len(rows)
            )
            mean = sum(n * part for n, part in zip(counts, losses, strict=True) if n) / max(sum(counts), 1.0)
            roles.per_target = math.isclose(mean, float(loss), rel_tol=1e-5)

    def probe(self, system: ForeignSystem, batch: Batch) -> Probe:
        """The model as a function of the batch; noise that the loss draws becomes entries of the batch."""
        roles, made = self.roles, dict(batch)
        rng = torch.get_rng_state(), random.getstate(), np.random.get_state()
        if roles.draws:
            draws: list[Tensor] = []
            with RecordDraws(draws), torch.no_grad():
                system.loss(batch)
            made |= {f"{NOISE} {i}": drawn for i, drawn in enumerate(draws)}
        if roles.targets and not batch[roles.targets].is_floating_point():
            made[COUNTED] = self.counted(batch)

        def run(given: Batch) -> Tensor:
            torch.set_rng_state(rng[0])
            random.setstate(rng[1])
            np.random.set_state(rng[2])
            drawn = [value for name, value in given.items() if name.startswith(NOISE)]
            with ReplayDraws(drawn) if drawn else contextlib.nullcontext():
                return system.loss(given)[0]

        def predict(given: Batch) -> Tensor:
            with _output_of(system.model.get_submodule(roles.point or "")) as seen:
                run(given)
            return seen[-1]

        def objective(prediction: Tensor, given: Batch) -> Tensor:
            with _output_of(system.model.get_submodule(roles.point or ""), prediction):
                return run(given)

        # A Probe without a prediction skips the checks that need one.
        pair: Any = (
            {"predict": predict, "objective": objective} if roles.point is not None else dict.fromkeys(("predict", "objective"))
        )
        return Probe(batch=made, **pair, **self._declarations(system, made))

    def _declarations(self, system: ForeignSystem, batch: Batch) -> dict[str, Any]:
        """The fields of the probe: what the user gave, else what is known."""
        roles, given = self.roles, {n: v for n, v in self.declared.items() if n in Probe.__dataclass_fields__}
        dead = tuple(name for name, _ in system.named_parameters() if KEY_BIAS.search(name))
        known = {
            "mask": COUNTED if COUNTED in batch and not batch[COUNTED].all() else "",
            "constant": tuple(name for name in self.pool.rows if name not in (roles.inputs, roles.targets)),
            "order": "causal" if self.declared.get("causal", self.parts.causal) else None,
            "at_init": (lambda batch: roles.guess) if roles.guess else None,
            "oracle": self.oracle if roles.is_supervised else None,
        }
        fixed = {"inputs": roles.inputs, "targets": roles.targets, "uses": roles.uses}
        return known | given | fixed | {"dead": (*dead, *(f"model.{name}" for name in given.get("dead", ())))}

    def oracle(self, batch: Batch) -> Tensor:
        """The prediction that fits the targets best: themselves, or a large logit for each of their classes."""
        roles, targets = self.roles, batch[self.roles.targets]
        if roles.class_axis is None:
            return targets
        targets = targets.roll(-1, 1) if self.parts.shifts_targets else targets
        return 30.0 * nn.functional.one_hot(targets.clamp_min(0), roles.num_classes).movedim(-1, roles.class_axis).double()


# ---- one run of the loss -------------------------------------------------------------------------------------------------


def _watch(model: nn.Module, run: Callable[[], Tensor]) -> tuple[list[Any], tuple[str | None, str]]:
    """What the outermost modules were given, and the module whose output the loss is computed from, or why none is."""
    depth, outer, made = [0], [], []

    def enter(module: nn.Module, args: Any) -> None:
        depth[0] += 1

    def leave(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        depth[0] -= 1
        made.append((name, main_tensor(out)[1]))
        if not depth[0]:
            outer.append((name, [*args, *kwargs.values()], out))

    hooks = [module.register_forward_pre_hook(enter) for module in model.modules()]
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(functools.partial(leave, name), with_kwargs=True))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    given, names = [value for _, values, _ in outer for value in values], [name for name, _, _ in outer]
    if not names or len({*names}) < len(names):
        return given, (None, f"the loss calls {'a' if names else 'no'} module of the model{' several times' if names else ''}")
    name, _, out = outer[-1]
    prediction = main_tensor(out)[1]
    if any(isinstance(value, Tensor) and not value.ndim for value in pytree.tree_leaves(out)):  # the loss is computed inside
        name = next((inner for inner, value in made if value is prediction and inner != name), None)
    if name is None or prediction is None or prediction.shape[0] != ROWS:
        return given, (None, "no module returns one prediction per row")
    return given, (name, "")


def main_tensor(out: Any) -> tuple[int, Tensor | None]:
    """The first tensor of numbers in a module's output, which is its prediction, and its place among the leaves."""
    leaves = pytree.tree_leaves(out)
    found = (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim and leaf.is_floating_point())
    place = next(found, None)
    return (0, None) if place is None else (place, leaves[place])


@contextlib.contextmanager
def _output_of(module: nn.Module, instead: Tensor | None = None) -> Iterator[list[Tensor]]:
    """The predictions of a module inside the block; with `instead`, it returns that tensor."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        place, value = main_tensor(out)
        assert value is not None
        seen.append(value)
        if instead is None:
            return None
        leaves, spec = pytree.tree_flatten(out)
        return pytree.tree_unflatten([*leaves[:place], instead.to(value.dtype), *leaves[place + 1 :]], spec)

    handle = module.register_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()
