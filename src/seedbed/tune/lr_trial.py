"""Short trainings at a multiple of the configured rates: equal weights, equal items, the run's schedule."""

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from seedbed.config import Schedule
from seedbed.data.feed import Source
from seedbed.train.optim import multiplier
from seedbed.tune.workload import Rig, preserved

DIVERGED = 2.0  # a loss that rose by this many times its first value has diverged
FIRST_LOSSES = 5
MAX_WARMUP = 0.2  # of a trial: the run's own number of warm-up steps where they fit
MIN_SCORED, MAX_SCORED = 4, 16


@dataclass(frozen=True)
class Trial:
    """One training of `num_steps` steps at `factor` times the configured rates, and its losses; infinite if it diverged.

    `loss` is the training loss on the next items, `score` the first number of the recipe's evaluation, None without one.
    """

    factor: float
    num_steps: int
    repeat: int
    loss: float
    score: float | None = None


@dataclass
class Study:
    """Trials of one system, each made once. `run_steps` is the length of the run in question.

    With `valid`, every trial is evaluated with its last weights, as the run is.
    """

    rig: Rig
    run_steps: int
    tick: Callable[[], None] = lambda: None
    valid: Source | None = None
    trials: dict[tuple[float, int, int], Trial] = field(default_factory=dict)

    def trial(self, factor: float, num_steps: int, repeat: int = 0, evaluated: bool = True) -> Trial:
        """A training at `factor` times the rates; every repeat has its own items and noise."""
        key, evaluated = (factor, num_steps, repeat), evaluated and self.valid is not None
        if key not in self.trials or (evaluated and self.trials[key].score is None):
            with preserved(self.rig.engine):
                fine = factor == 0.0 or self._train(factor, num_steps, repeat)
                loss = self._score(num_steps, repeat) if fine else math.inf
                score = (self.evaluate() if fine else math.inf) if evaluated else None
            self.trials[key] = Trial(*key, loss if math.isfinite(loss) else math.inf, score)
        return self.trials[key]

    def evaluate(self) -> float:
        """The metric by which a run chooses its best weights, for the current weights."""
        engine = self.rig.engine
        assert self.valid is not None
        with engine.evaluating():
            value = next(iter(engine.system.evaluate(self.valid, engine).values()))
        return value if math.isfinite(value) else math.inf

    def _train(self, factor: float, num_steps: int, repeat: int) -> bool:
        """Trains along the shortened schedule; False when the loss diverges."""
        rig, schedule = self.rig, trial_schedule(self.rig.engine.config.schedule, self.run_steps, num_steps)
        watch = Divergence()
        for i in range(num_steps + 1):
            if i < num_steps:
                progress = (i + 1) / num_steps
                self._step(i, num_steps, repeat, progress, factor * multiplier(schedule, progress, i + 1))
            result = rig.pop_result(lag=1 if i < num_steps else 0)
            self.tick()
            if result is not None and (result.halted or watch.add(result.loss)):
                rig.readback.drop()
                return False
        return True

    def _score(self, num_steps: int, repeat: int) -> float:
        """The mean loss on the next items, equal for every rate; with EMA weights where a run has them."""
        rig, losses = self.rig, []
        averaged = rig.engine.ema.swapped_in() if rig.engine.ema else contextlib.nullcontext()
        with averaged, rig.engine.dry_run():
            for i in range(num_scored(num_steps)):
                self._step(num_steps + i, num_steps, repeat, 1.0, 0.0)
                result = rig.pop_result(lag=0)
                assert result is not None
                losses.append(result.loss)
        return statistics.fmean(losses)

    def _step(self, step: int, num_steps: int, repeat: int, progress: float, rate: float) -> None:
        rig, first = self.rig, repeat * (num_steps + MAX_SCORED)
        rig.load(min(step, num_steps - 1), (first + step) * rig.engine.config.batch, num_steps)
        rig.run(first + step, progress, rate)


def num_scored(num_steps: int) -> int:
    return min(max(num_steps // 8, MIN_SCORED), MAX_SCORED)


def trial_schedule(schedule: Schedule, run_steps: int, num_steps: int) -> Schedule:
    """The schedule of a trial: the same shape, with as many warm-up steps as the run has, where they fit."""
    return replace(schedule, warmup=min(schedule.warmup * run_steps / num_steps, max(schedule.warmup, MAX_WARMUP)))


class Divergence:
    """Detects losses that are not finite, or far above the first ones."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def add(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        self.losses.append(loss)
        if len(self.losses) < 2 * FIRST_LOSSES:
            return False
        first, last = statistics.median(self.losses[:FIRST_LOSSES]), statistics.median(self.losses[-FIRST_LOSSES:])
        return last - first > DIVERGED * max(abs(first), 1e-12)
