"""find-lr: ramp one multiplier over every group's learning rate and read from the loss where it falls and where it breaks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seedbed.errors import UserError
from seedbed.tune.bench import Bench, Rig, num_parameters, preserved, rigged

REACH = 1000.0  # how far below and above the configured rate the ramp goes
EXPLODED = 4.0  # a loss of so many times the best ends a ramp
WATCH_BETA = 0.9  # slow enough that a lucky batch is not the best and an unlucky one no explosion
AGREEMENT = 3.0  # repeats that differ by more than this factor have found nothing
MOST_STEPS, FEWEST_STEPS, GOOD_STEPS = 200, 30, 100
CPU_SECONDS = 40.0


@dataclass(frozen=True)
class Ramp:
    """One pass over the rates, as far as it got: the learning rate and the loss of every step, raw and smoothed."""

    rates: np.ndarray
    losses: np.ndarray
    smooth: np.ndarray
    broke: bool


@dataclass(frozen=True)
class Reading:
    """What one ramp says: where the smoothed loss falls fastest and where it is lowest; `found` is False on a plain."""

    steepest: float
    minimum: float
    found: bool


@dataclass(frozen=True)
class Suggestion:
    """A rate worth trying, its ratio to the configured one, and the range over the repeats where there is one."""

    name: str
    lr: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Finding:
    """Everything find-lr has to tell; `assignments` are the keys to change, none where the configured rate is fine."""

    configured: float
    assignments: dict[str, float]
    num_params: int
    suggestions: list[Suggestion]
    clear: bool
    advice: str
    notes: list[str]
    ramps: list[Ramp]

    def to_json(self) -> dict[str, Any]:
        ramps = [
            {"lr": r.rates.tolist(), "loss": r.losses.tolist(), "smoothed": r.smooth.tolist(), "broke": r.broke}
            for r in self.ramps
        ]
        suggestions = {s.name: {"lr": s.lr, "ratio": s.ratio, "low": s.low, "high": s.high} for s in self.suggestions}
        plain = {"configured": self.configured, "parameters": self.num_params, "clear": self.clear, "advice": self.advice}
        return {**plain, "try": self.assignments, "suggestions": suggestions, "notes": self.notes, "ramps": ramps}


def prior(num_params: int) -> float:
    """A power law through the sizes and learning rates of GPT-3's table: 5.7e-4 at 124M parameters."""
    return 1.952 * num_params**-0.4368


def smooth(losses: Sequence[float] | np.ndarray, beta: float) -> np.ndarray:
    """Exponential weights to both sides of every point, divided by their sum: no bias at the ends and no lag behind the ramp."""
    values = np.asarray(losses, dtype=np.float64)
    forward, backward = _decayed(values, beta), _decayed(values[::-1], beta)[::-1]
    ones = np.ones_like(values)
    weight = _decayed(ones, beta) + _decayed(ones, beta)[::-1] - ones
    return (forward + backward - values) / weight


def cut(losses: np.ndarray) -> np.ndarray:
    """The explosion cut off as far above the start as the best is below: its height says nothing, and would drown the rest."""
    start = float(np.median(losses[: max(len(losses) // 10, 3)]))
    return np.minimum(losses, start + max(start - float(losses.min()), 0.1 * abs(start)))


def _decayed(values: np.ndarray, beta: float) -> np.ndarray:
    out, total = np.empty_like(values), 0.0
    for i, value in enumerate(values):
        out[i] = total = beta * total + value
    return out


class Watch:
    """Follows a ramp while it runs: a bias-corrected average, its best, and whether the loss has exploded."""

    def __init__(self, beta: float, patience: int) -> None:
        self.beta, self.patience = beta, patience
        self.total = self.weight = 0.0
        self.seen, self.first, self.best = 0, math.nan, math.inf

    def exploded(self, loss: float) -> bool:
        """Take the next loss. The first few are too few to average, neither for the best nor for an explosion."""
        self.total = self.beta * self.total + (1.0 - self.beta) * loss
        self.weight = self.beta * self.weight + (1.0 - self.beta)
        average = self.total / self.weight
        self.first = average if not self.seen else self.first
        self.seen += 1
        if self.seen >= self.patience:
            self.best = min(self.best, average)
        return self.seen > self.patience and average > self._limit()

    def _limit(self) -> float:
        if self.best > 0:
            return EXPLODED * self.best
        # "Times the best" means nothing below zero; the same distance, measured by what was gained so far.
        return self.best + (EXPLODED - 1.0) * max(-self.best, self.first - self.best)


def beta_for(num_steps: int) -> float:
    """Smoothing over a fixed share of the ramp, a tenth of it: 0.9 at 200 steps."""
    return max(0.0, 1.0 - 20.0 / num_steps)


def run_ramp(rig: Rig, multipliers: np.ndarray, base: float, repeat: int, tick: Callable[[], None]) -> Ramp:
    """Train once along the ramp on data of its own; ends early where the loss explodes or is no longer finite."""
    num_steps, losses = len(multipliers), []
    beta = beta_for(num_steps)
    watch, broke = Watch(WATCH_BETA, num_steps // 5), False
    batch = rig.engine.config.batch
    for i in range(num_steps + 1):
        if i < num_steps:
            step = repeat * num_steps + i
            rig.step(step, step * batch, rate=float(multipliers[i]))
        measured = rig.read(leave=1 if i < num_steps else 0)
        tick()
        if measured is None:
            continue
        if measured["halted"] or not math.isfinite(measured["loss"]):
            broke = True
            break
        losses.append(measured["loss"])
        if watch.exploded(measured["loss"]):
            broke = True
            break
    rig.readback.drop()
    if len(losses) < 3:
        raise UserError("the loss is not finite at the lowest rate of the ramp; lower it with --low, or look at the data")
    values = np.array(losses)
    return Ramp(base * multipliers[: len(losses)], values, smooth(cut(values), beta), broke)


def read(ramp: Ramp, beta: float) -> Reading:
    """The steepest descent before the lowest point, and that point; both need a fall that stands out of the noise."""
    lowest = int(np.argmin(ramp.smooth))
    slope = np.gradient(ramp.smooth, np.log(ramp.rates))
    steepest = int(np.argmin(slope[: lowest + 1]))
    quiet = max(len(ramp.losses) // 3, 3)  # the first third hardly learns: what moves there is noise
    noise = float(np.std(ramp.losses[:quiet] - ramp.smooth[:quiet])) * math.sqrt((1.0 - beta) / (1.0 + beta))
    fall = float(ramp.smooth[0] - ramp.smooth[lowest])
    return Reading(float(ramp.rates[steepest]), float(ramp.rates[lowest]), fall > max(4.0 * noise, 1e-6 * abs(ramp.smooth[0])))


def spread(values: Sequence[float]) -> float:
    return max(values) / min(values)


def conclude(ramps: list[Ramp], readings: list[Reading], configured: float, num_params: int, muon: float | None) -> Finding:
    """Weigh the repeats against each other, the prior and the configured rate, in numbers and in a sentence."""
    steepest, lowest = [r.steepest for r in readings], [r.minimum / 10.0 for r in readings]
    guess = prior(num_params)
    suggestions = [
        _suggest("steepest", steepest, configured),
        _suggest("minimum/10", lowest, configured),
        _suggest("prior for size", [guess], configured),
    ]
    notes = _notes(ramps, readings)
    # The valley is where its lowest point is; the steepest one may slide along a straight slope and says so itself.
    agree = all(r.found for r in readings) and spread(lowest) <= AGREEMENT
    advice = _advise(suggestions, configured) if agree else _no_valley(readings, spread(lowest), guess)
    change = suggestions[1].lr if agree and not _covered(suggestions, configured) else None
    assignments = {} if change is None else {"optim.lr": change}
    if change is not None and muon is not None:
        assignments["optim.muon_lr"] = change * muon / configured
    return Finding(configured, assignments, num_params, suggestions, agree, advice, notes, ramps)


def _suggest(name: str, values: list[float], configured: float) -> Suggestion:
    middle = statistics.median(values)
    return Suggestion(name, middle, middle / configured, min(values), max(values))


def _covered(suggestions: list[Suggestion], configured: float) -> bool:
    """Whether the configured rate lies among the suggestions, give or take a factor of 2."""
    return min(s.lr for s in suggestions) / 2 <= configured <= 2 * max(s.lr for s in suggestions)


def _advise(suggestions: list[Suggestion], configured: float) -> str:
    low, high = min(s.lr for s in suggestions), max(s.lr for s in suggestions)
    if _covered(suggestions, configured):
        return f"the configured {configured:.2g} lies within the suggestions: no reason to change it"
    side = "below" if configured < low else "above"
    factor = low / configured if configured < low else configured / high
    return f"the configured {configured:.2g} lies {factor:.1f}x {side} every suggestion: try {suggestions[1].lr:.2g}"


def _no_valley(readings: list[Reading], ratio: float, guess: float) -> str:
    found = all(r.found for r in readings)
    why = f"the repeats disagree by {ratio:.1f}x" if found else "the loss does not fall by more than its noise"
    return f"no clear valley: {why}. More --steps or a larger batch may show one; until then the prior says {guess:.2g}"


def _notes(ramps: list[Ramp], readings: list[Reading]) -> list[str]:
    notes = []
    if any(r.minimum == ramp.rates[-1] and not ramp.broke for r, ramp in zip(readings, ramps, strict=True)):
        notes.append("the loss still falls at the highest rate tried: the minimum lies beyond; raise --high")
    if len(ramps[0].rates) < 10:
        notes.append("the loss exploded almost at once: lower --low")
    return notes


def find(
    bench: Bench,
    *,
    num_steps: int | None = None,
    repeats: int = 3,
    low: float | None = None,
    high: float | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Finding:
    """Ramp the rate `repeats` times from the same weights over different data; nothing is left changed."""
    optim = bench.config.optim
    low, high = _range(optim.lr, low, high)
    if repeats < 3:
        raise UserError(f"repeats={repeats}: one or two ramps cannot show whether they agree; use at least 3")
    if num_steps is not None and num_steps < FEWEST_STEPS:
        raise UserError(f"steps={num_steps} is too few for a ramp; use at least {FEWEST_STEPS}")
    engine, said = bench.build(), []
    with rigged(engine, bench.data, said.append) as rig:
        if num_steps is None:
            num_steps = _affordable(rig, repeats)
            if num_steps < GOOD_STEPS:
                said.append(f"{num_steps} steps per ramp, to stay within a minute here; --steps {GOOD_STEPS} sees more")
        multipliers = np.geomspace(low, high, num_steps) / optim.lr
        ramps = []
        for repeat in range(repeats):
            done = iter(range(repeat * num_steps, (repeat + 2) * num_steps))
            with preserved(engine):
                ramps.append(run_ramp(rig, multipliers, optim.lr, repeat, lambda d=done: tick(next(d), repeats * num_steps)))
    readings = [read(ramp, beta_for(num_steps)) for ramp in ramps]
    muon = optim.muon_lr if optim.kind == "muon" else None
    finding = conclude(ramps, readings, optim.lr, num_parameters(engine.system), muon)
    finding.notes.extend(said)
    return finding


def _range(configured: float, low: float | None, high: float | None) -> tuple[float, float]:
    if configured <= 0:
        raise UserError("optim.lr=0 cannot be ramped; give a starting value such as optim.lr=1e-3")
    low = configured / REACH if low is None else low
    high = configured * REACH if high is None else high
    if not (low > 0 and math.isfinite(high) and low * 10 <= high):
        raise UserError(f"low={low:g} and high={high:g} are no range for a ramp; it must span at least a factor of 10")
    return low, high


def _affordable(rig: Rig, repeats: int) -> int:
    """As many steps as the instrument is worth; fewer where a step takes long and no accelerator is at hand."""
    if rig.engine.device.type != "cpu":
        return MOST_STEPS
    with preserved(rig.engine):
        rig.take_steps(1)
        seconds = rig.seconds_per_step(0.5, fewest=1)
    return int(min(max(CPU_SECONDS / repeats / seconds, FEWEST_STEPS), MOST_STEPS))
