"""Short trainings on the small config that several checks share, through the real engine."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from seedbed.checks.registry import skipped
from seedbed.checks.subject import CPU, ROWS, Subject, is_installed, probe_of, source_line
from seedbed.config import Config, override
from seedbed.data.text import TextData, TextSource
from seedbed.errors import UserError
from seedbed.report.findings import Finding
from seedbed.train.engine import Engine
from seedbed.train.stepper import build
from seedbed.train.system import Batch, System

# Rows per step of a short run, whatever the preset's batch: enough that a curve is not only noise.
ROWS_PER_STEP, FEW_ROWS, MANY_ROWS, NUMBERS_PER_STEP = 16, 8, 128, 256
# Narrower models tolerate almost any lr: at width 32 a factor of thirty goes unnoticed, at 64 it costs 15 % of the drop.
WIDTH = 64
# Above this many parameters a step is made smaller so that a check takes seconds.
LARGE = 1_000_000
# Above this many ids a vocabulary is reduced for short runs: with all 4,096 ids, H, E and V4 of gpt/code took 27 s of a busy
# core. A lr thirty times too high then costs .21 of the drop (2,048 ids .72, 128 ids .13, 64 ids too little to say).
MANY_IDS, NUM_IDS = 1024, 256
# Rows with this many values, such as image sequences: a few suffice.
MANY_NUMBERS = 2048
NUM_STEPS, NUM_MORE_STEPS, WARMUP = 60, 200, 15
# Lengths of the runs of slow learners; all are in the first stage of a run this long.
LENGTHS, LONG = (NUM_STEPS, 120, NUM_MORE_STEPS), 100 * NUM_MORE_STEPS
# An lr at which small models learn something in this few steps.
FAST_LR, MAX_FACTOR = 3e-3, 4.0
NUM_HELD_OUT = 8


@dataclass
class ShortRun:
    """A short run: its losses, and the engine with the final system."""

    engine: Engine
    rate: float = 1.0
    initial_losses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    held_out: list[tuple[float, float]] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.losses[0]

    @property
    def held_out_loss(self) -> tuple[float, float]:
        """Mean held-out losses at initialisation and at the end."""
        initial_losses, ends = zip(*self.held_out, strict=True)
        return sum(initial_losses) / len(initial_losses), sum(ends) / len(ends)

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.losses))


def learner(subject: Subject) -> Subject:
    """The subject of checks that train: of a large vocabulary only its commonest ids, so that a step takes milliseconds.

    Whether inputs help is known after seconds then, while a full vocabulary would first have to learn its frequencies.
    """
    data = subject.data
    if subject.full or not isinstance(data, TextData) or data.vocab_size <= MANY_IDS or nothing_to_learn(subject):
        return subject
    return subject.once("learner", lambda: subject.with_data(with_fewer_ids(data, NUM_IDS)))


def with_fewer_ids(data: TextData, num: int) -> TextData:
    """The same tokens with `num` ids: the commonest have one of their own, all others share the last."""
    ids_N = np.asarray(data.train.tokens, np.int64)
    rank_V = np.empty(data.vocab_size, np.int64)
    rank_V[np.argsort(-np.bincount(ids_N, minlength=data.vocab_size), kind="stable")] = np.arange(data.vocab_size)

    def reduced(source: TextSource) -> TextSource:
        tokens = np.minimum(rank_V, num - 1)[np.asarray(source.tokens, np.int64)]
        return type(source)(tokens, source.block, source.mode, source.seed)

    return replace(data, train=reduced(data.train), valid=reduced(data.valid), tokenizer=None, vocab_size=num)


def config_of(subject: Subject) -> Config:
    """The small config with accum=1 and as much of its width as a short run can afford."""
    config = override(subject.small, ["accum=1"])
    full, cut = subject.shrunk.get("model.width", (0, WIDTH))
    for width in range(min(full or WIDTH, WIDTH), cut, -8):  # a width of 0 follows from another field
        with contextlib.suppress(UserError):
            return override(config, [f"model.width={width}"])
    return config


def start(subject: Subject, more_seed: int = 0) -> Engine:
    """A new engine for a short run, at the same start for all runs of a seed."""
    config = config_of(subject)
    config = override(config, [f"seed={config.seed + more_seed}"]) if more_seed else config
    engine = build(subject.recipe, config, subject.data, CPU, make=subject.engine_type)
    engine.variant = engine.system.variant(0, engine.config.steps)
    return engine


def take_step(subject: Subject, engine: Engine, batch: Batch, step: int, rate: float = 1.0) -> dict[str, Tensor]:
    """One step of the real engine on a given batch, with the random numbers of `step`."""
    engine.begin(step, min(1.0, (step + 1) / subject.small.steps), rate)
    return engine.step(lambda part: batch)


def rows_per_step(subject: Subject) -> int:
    """About the same number of values per step, whatever the size of an item."""

    def count() -> int:
        if sum(p.numel() for p in subject.fresh_system().parameters()) > LARGE:
            return FEW_ROWS
        per_row = sum(v.numel() for v in subject.batch(0).values()) / ROWS
        if per_row > MANY_NUMBERS:
            return FEW_ROWS
        return int(min(max(ROWS_PER_STEP, NUMBERS_PER_STEP // per_row), MANY_ROWS))

    return subject.once("short_runs.rows", count)


def nothing_to_learn(subject: Subject) -> str:
    """The reason when the data declares itself random; empty otherwise."""
    name = str(subject.data.facts.get("name", ""))
    return f"the data is {name}: there is nothing to learn from it" if name.startswith("random") else ""


def ramp(step: int) -> float:
    """A warm-up that fits into a short run."""
    return min(1.0, (step + 1) / WARMUP)


def train(subject: Subject, rate: float = 1.0, blank: bool = False, more_seed: int = 0) -> ShortRun:
    """A short run on fresh batches at the preset's peak lr times `rate`; with `blank`, on constant inputs."""
    return continue_run(subject, begin(subject, rate, blank, more_seed), NUM_STEPS)


def begin(subject: Subject, rate: float, blank: bool = False, more_seed: int = 0) -> ShortRun:
    """A short run before its first step."""
    engine = start(subject, more_seed)
    if blank:
        _blank_inputs(engine.system)
    # Runs of one seed start at the same weights, whatever their lr.
    initial = subject.once(f"short_runs.initial {blank} {more_seed}", lambda: _held_out_losses(subject, engine.system))
    return ShortRun(engine, rate=rate, initial_losses=initial)


def continue_run(subject: Subject, trace: ShortRun, num_steps: int) -> ShortRun:
    """Continues the run up to `num_steps` steps in all."""
    engine, rows = trace.engine, rows_per_step(subject)
    for step in range(len(trace.losses), num_steps):
        before = [p.detach().clone() for p in matrices(engine.system)] if step >= num_steps - 3 else []
        engine.variant = engine.system.variant(step, LONG)
        measured = take_step(subject, engine, subject.batch(step, rows), step, trace.rate * ramp(step))
        trace.losses.append(float(measured["loss"]))
        if before:
            pairs = zip(matrices(engine.system), before, strict=True)
            trace.ratios += [float((p.detach() - old).norm() / old.norm().clamp_min(1e-12)) for p, old in pairs]
        if not math.isfinite(trace.losses[-1]):
            break
    trace.held_out = list(zip(trace.initial_losses, _held_out_losses(subject, engine.system), strict=True))
    return trace


def overfit(subject: Subject, rate: float, num_steps: int, target: float) -> ShortRun:
    """Steps on one batch with one seed, until the loss is `target` times the first."""
    engine, batch = start(subject), subject.batch(0)
    trace = ShortRun(engine)
    for step in range(num_steps):
        engine.begin(0, 1.0 / subject.small.steps, rate * ramp(step))
        trace.losses.append(float(engine.step(lambda part: batch)["loss"]))
        if not math.isfinite(trace.losses[-1]) or trace.losses[-1] <= target * trace.first:
            break
    return trace


def real_run(subject: Subject, more_seed: int = 0) -> ShortRun:
    return subject.once(f"short_runs.real {more_seed}", lambda: train(subject, more_seed=more_seed))


def slow_run(subject: Subject, share: float, more_seed: int) -> ShortRun:
    return subject.once(f"short_runs.slow {share} {more_seed}", lambda: train(subject, share, more_seed=more_seed))


def on_every_seed(find: Callable[[int], Finding], others: tuple[int, ...] = (1, 2)) -> Finding:
    """What is found on a first seed; an alarm only where the other seeds raise it too, since one short run may have bad luck."""
    first = find(0)
    if first.alarm and any(not find(more).alarm for more in others):
        return skipped(f"seeds disagree; on the first, {first.what}")
    return first


def lr_factor(subject: Subject, wanted: float = FAST_LR) -> float:
    """The factor that raises the preset's lr to `wanted`; 1 where it is higher already."""
    optim = subject.small.optim
    highest = max(optim.lr, optim.muon_lr if optim.kind == "muon" else 0.0)
    return max(1.0, wanted / highest) if highest else 1.0


def paired_runs(subject: Subject, more_seed: int = 0) -> Iterator[tuple[ShortRun, ShortRun]]:
    """Pairs of runs of growing length, with real and with blank inputs; first at the preset's lr unless it is low.

    Or unless a run at that lr ends above the score of the simplest predictor: its inputs can hardly have helped yet.
    """
    rate = lr_factor(subject)
    seeing, blind = None, None
    if rate == 1.0 or (rate <= MAX_FACTOR and real_run(subject, more_seed).held_out_loss[1] < first_baseline(subject)):
        seeing, blind = real_run(subject, more_seed), train(subject, blank=True, more_seed=more_seed)
        yield seeing, blind
    if seeing and blind and rate == 1.0:  # goes on; what other checks read of the real run stays as it is
        seeing = replace(seeing, losses=[*seeing.losses], ratios=[*seeing.ratios])
    else:
        seeing, blind = begin(subject, rate, False, more_seed), begin(subject, rate, True, more_seed)
    for num_steps in LENGTHS if rate > 1.0 else LENGTHS[1:]:
        yield continue_run(subject, seeing, num_steps), continue_run(subject, blind, num_steps)


def first_baseline(subject: Subject) -> float:
    """The score of the simplest predictor, which ignores the inputs; infinite when there is none."""
    if subject.declared.baselines is None:
        return math.inf
    return next(iter(subject.declared.baselines(subject.declared.batch).values()), math.inf)


def _blank_inputs(system: System) -> None:
    """Makes the system's update see constant inputs."""

    def update(batch: Batch, engine: Engine) -> dict[str, Tensor]:
        probe = probe_of(system, batch)
        blanked = {**probe.batch, probe.inputs: torch.zeros_like(probe.batch[probe.inputs])}
        loss = probe.objective(probe.predict(blanked), blanked)
        engine.minimize(loss)
        return {"loss": loss.detach()}

    system.update = update  # type: ignore[method-assign]


def _held_out_losses(subject: Subject, system: System) -> list[float]:
    """Losses on held-out batches with the same seeds for all runs, in evaluation mode."""
    was = system.training
    # The averages of batch norm lag behind in a short run at a high lr.
    system.train(bool(subject.unsure) and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in system.modules()))
    try:
        with torch.no_grad():
            rows = 4 * rows_per_step(subject)
            batches = (subject.batch(NUM_STEPS + n, rows) for n in range(NUM_HELD_OUT))
            return [float(subject.loss_of(system, batch, seed=n)) for n, batch in enumerate(batches)]
    finally:
        system.train(was)


def matrices(system: nn.Module) -> list[nn.Parameter]:
    """Trainable tensors with at least two axes."""
    return [p for p in system.parameters() if p.requires_grad and p.ndim >= 2]


@contextlib.contextmanager
def gradients(system: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The last gradient of each parameter from backward passes inside the block, by name."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, param: Tensor) -> None:
        if param.grad is not None:
            seen[name] = param.grad.detach().clone()

    with contextlib.ExitStack() as hooks:
        for name, param in system.named_parameters():
            if param.requires_grad:
                hooks.enter_context(param.register_post_accumulate_grad_hook(functools.partial(keep, name)))
        yield seen


def named_tensors(engine: Engine) -> dict[str, Tensor]:
    """A copy of everything a checkpoint stores, by file and name."""
    return {f"{file}: {n}": t.detach().clone() for file, group in engine.tensors().items() for n, t in group.items()}


def first_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    """The name of the first tensor that is not bitwise equal; empty when all are."""
    return next((n for n in {**a, **b} if n not in a or n not in b or not torch.equal(a[n], b[n])), "")


def owner_line(system: nn.Module, name: str) -> str:
    """Source line of the forward of the innermost module around a parameter that is not part of torch."""
    path = name.rpartition(".")[0]
    while path and is_installed(type(system.get_submodule(path)).forward):
        path = path.rpartition(".")[0]
    return source_line(type(system.get_submodule(path)).forward if path else type(system).__init__)
