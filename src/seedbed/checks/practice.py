"""Short trainings on the small config that several checks share, through the real engine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.checks.case import CPU, ROWS, Case, place
from seedbed.config import Config, override
from seedbed.errors import UserError
from seedbed.train.engine import Engine, mix
from seedbed.train.system import Batch, System

# Rows per step of a short run, whatever the preset's batch: enough that a curve is not only noise.
ROWS_PER_STEP, FEW_ROWS, MANY_ROWS, NUMBERS_PER_STEP = 16, 8, 128, 256
# Narrower models bear almost any rate: at width 32 thirty times too much goes unseen, at 64 it costs 15 % of the drop.
WIDTH = 64
# Above this many parameters, which is a large vocabulary, a step is made smaller so that a check stays a matter of seconds.
LARGE = 1_000_000
NUM_STEPS, NUM_MORE_STEPS, WARMUP, TAIL = 60, 200, 15, 15
# Where the question is what can be learned, not how fast: a rate at which small models learn something in so few steps.
BRISK = 3e-3
NUM_HELD_OUT = 8


@dataclass
class Trace:
    """What a short run left: the losses it measured, and the engine with the system as it ended."""

    engine: Engine
    losses: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    held_out: list[tuple[float, float]] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.losses[0]

    @property
    def end(self) -> float:
        """The mean of the last losses; infinite when one of them is not finite."""
        last = self.losses[-TAIL:]
        return sum(last) / len(last) if all(map(math.isfinite, self.losses)) else math.inf

    @property
    def unseen(self) -> tuple[float, float]:
        """Mean losses at birth and at the end on batches that were not trained on."""
        births, ends = zip(*self.held_out, strict=True)
        return sum(births) / len(births), sum(ends) / len(ends)

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.losses))


def config_of(case: Case) -> Config:
    """The small config for steps of one part, with as much of its width given back as a short run can bear."""
    config = override(case.small, ["accum=1"])
    for key, (full, cut) in case.shrunk.items():
        if key.rpartition(".")[2] == "width":
            for width in range(min(full, WIDTH), cut, -8):
                with contextlib.suppress(UserError):
                    return override(config, [f"{key}={width}"])
    return config


def start(case: Case) -> Engine:
    """A new engine for a short run, at the same start for all of them."""
    config = config_of(case)
    torch.manual_seed(mix(case.config.seed))
    system = case.recipe.build(config, case.data)
    engine = Engine(system, config, CPU)
    engine.variant = system.variant(0, config.steps)
    return engine


def take_step(case: Case, engine: Engine, batch: Batch, step: int, rate: float = 1.0) -> dict[str, Tensor]:
    """One step of the real engine on a given batch, with the dice of `step`."""
    engine.begin(step, min(1.0, (step + 1) / case.small.steps), rate)
    return engine.step(lambda part: batch)


def rows_per_step(case: Case) -> int:
    """About as many numbers per step whatever an item is: a point says less than a text."""

    def count() -> int:
        if sum(p.numel() for p in case.fresh_system().parameters()) > LARGE:
            return FEW_ROWS
        per_row = sum(v.numel() for v in case.batch(0).values()) / ROWS
        return int(min(max(ROWS_PER_STEP, NUMBERS_PER_STEP // per_row), MANY_ROWS))

    return case.once("practice.rows", count)


def nothing_to_learn(case: Case) -> str:
    """Why no short run can teach anything: data that says of itself that it is noise. Empty otherwise."""
    name = str(case.data.facts.get("name", ""))
    return f"the data is {name}: there is nothing to learn from it" if name.startswith("random") else ""


def ramp(step: int) -> float:
    """A warm-up that fits into a short run."""
    return min(1.0, (step + 1) / WARMUP)


def train(case: Case, rate: float = 1.0, blank: bool = False, num_steps: int = NUM_STEPS) -> Trace:
    """A short run on fresh batches, at the preset's peak rate times `rate`; with `blank`, on inputs that say nothing."""
    engine = start(case)
    if blank:
        _blind(engine.system)
    trace = Trace(engine)
    at_birth = _held_out_losses(case, engine.system)
    rows = rows_per_step(case)
    for step in range(num_steps):
        before = [p.detach().clone() for p in matrices(engine.system)] if step >= num_steps - 3 else []
        measured = take_step(case, engine, case.batch(step, rows), step, rate * ramp(step))
        trace.losses.append(float(measured["loss"]))
        if before:
            trace.ratios += [_ratio(p, old) for p, old in zip(matrices(engine.system), before, strict=True)]
        if not math.isfinite(trace.losses[-1]):
            break
    trace.held_out = list(zip(at_birth, _held_out_losses(case, engine.system), strict=True))
    return trace


def overfit(case: Case, rate: float, num_steps: int, target: float) -> Trace:
    """Steps on one batch with one set of dice, until the loss has fallen to `target` times the first."""
    engine, batch = start(case), case.batch(0)
    trace = Trace(engine)
    for step in range(num_steps):
        engine.begin(0, 1.0 / case.small.steps, rate * ramp(step))
        trace.losses.append(float(engine.step(lambda part: batch)["loss"]))
        if not math.isfinite(trace.losses[-1]) or trace.losses[-1] <= target * trace.first:
            break
    return trace


def real_run(case: Case) -> Trace:
    return case.once("practice.real", lambda: train(case))


def slow_run(case: Case) -> Trace:
    return case.once("practice.slow", lambda: train(case, rate=0.1))


def brisk_rate(case: Case, wanted: float = BRISK) -> float:
    """The factor that lifts the preset's rate to `wanted`; 1 where it is higher already."""
    optim = case.small.optim
    highest = max(optim.lr, optim.muon_lr if optim.kind == "muon" else 0.0)
    return max(1.0, wanted / highest) if highest else 1.0


def seeing_and_blind(case: Case, num_steps: int = NUM_STEPS) -> tuple[Trace, Trace]:
    """Two brisk runs, one of them on inputs that say nothing."""
    rate = brisk_rate(case)
    shared = rate == 1.0 and num_steps == NUM_STEPS
    return (real_run(case) if shared else train(case, rate, num_steps=num_steps)), train(case, rate, True, num_steps)


def _blind(system: System) -> None:
    """Let the system's update see inputs that are the same for every row and place."""

    def update(batch: Batch, engine: Engine) -> dict[str, Tensor]:
        probe = system.probe(batch)
        assert probe is not None
        blanked = {**probe.batch, probe.inputs: torch.zeros_like(probe.batch[probe.inputs])}
        loss = probe.objective(probe.predict(blanked), blanked)
        engine.descend(loss)
        return {"loss": loss.detach()}

    system.update = update  # type: ignore[method-assign]


def _held_out_losses(case: Case, system: System) -> list[float]:
    """Losses on batches that no short run trains on, with the same dice for all runs, in evaluation mode."""
    was = system.training
    system.eval()
    try:
        with torch.no_grad():
            rows = 4 * rows_per_step(case)
            batches = (case.batch(NUM_STEPS + n, rows) for n in range(NUM_HELD_OUT))
            return [float(case.loss_of(system, batch, dice=n)) for n, batch in enumerate(batches)]
    finally:
        system.train(was)


def matrices(system: nn.Module) -> list[nn.Parameter]:
    """Trainable tensors with at least two axes."""
    return [p for p in system.parameters() if p.requires_grad and p.ndim >= 2]


def _ratio(now: Tensor, before: Tensor) -> float:
    return float((now.detach() - before).norm() / before.norm().clamp_min(1e-12))


@contextlib.contextmanager
def gradients(system: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What backward passes inside leave in each parameter, by name; the last value of each."""
    seen: dict[str, Tensor] = {}
    handles = []

    def hook(name: str) -> Callable[[Tensor], None]:
        def keep(param: Tensor) -> None:
            if param.grad is not None:
                seen[name] = param.grad.detach().clone()

        return keep

    for name, param in system.named_parameters():
        if param.requires_grad:
            handles.append(param.register_post_accumulate_grad_hook(hook(name)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def named_tensors(engine: Engine) -> dict[str, Tensor]:
    """Everything a checkpoint would keep, copied, by file and name."""
    return {f"{file}: {n}": t.detach().clone() for file, group in engine.tensors().items() for n, t in group.items()}


def first_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    """The name of the first tensor that is not bitwise the same in both; empty when all are."""
    return next((n for n in {**a, **b} if n not in a or n not in b or not torch.equal(a[n], b[n])), "")


def loss_place(case: Case) -> str:
    """Where the recipe says what is trained: on which inputs, against which targets."""
    kind = type(case.shaken())
    return place(kind.loss if kind.loss is not System.loss else kind.update)


def owner(system: nn.Module, name: str) -> Any:
    """The innermost module around a parameter that somebody wrote; torch's own layers tell nothing."""
    path = name.rpartition(".")[0]
    while path and type(system.get_submodule(path)).forward.__module__.startswith("torch."):
        path = path.rpartition(".")[0]
    return system.get_submodule(path) if path else type(system).__init__
