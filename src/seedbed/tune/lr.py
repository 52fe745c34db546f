"""find-lr: the best learning rate of a run, from short trials at several rates, extrapolated to the run's length."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from seedbed.config import Config
from seedbed.data.feed import Source
from seedbed.errors import UserError
from seedbed.train.optim import multiplier
from seedbed.tune.lr_curve import GRID, LrCurve, vertex
from seedbed.tune.lr_trial import Study, Trial, num_scored
from seedbed.tune.workload import Rig, Workload, num_parameters, preserved, rigged

# The best rate falls with the length of a run, roughly as a power of it: -0.12 to 0.54 in five shortened presets, by
# `benchmarks/find_lr.py`. Without decay at the end the noise stays in the weights, and the power is less certain.
DRIFT = {"decayed": (0.21, 0.33), "constant": (0.35, 0.45)}
REACH = 64.0  # search range below and above the configured rate
TRUSTED = 1.6  # an answer that may be wrong by more than this factor is given as a range
SCAN = 2  # distance between rates of the first scan, in powers of two
SCAN_SHARE = 8  # trials of the first scan are shorter by this factor
NUM_TRIALS = 7.5  # total cost, in trials of full length
NUM_EVALUATIONS = 8  # trials of full length that are evaluated, mostly
MAX_EVALUATION = 0.5  # of the time to spend: an evaluation that takes more of it is not made
MOST_RATES = 7  # a flat range wider than this many powers of two is not followed to its ends
SAME = 0.05  # a training loss that begins this near the evaluation's number is the same quantity
FEWEST_STEPS, FEWEST_SCANNED = 20, 10
SECONDS = {"cpu": 110.0, "cuda": 60.0, "mps": 60.0}


@dataclass(frozen=True)
class LrResult:
    """The result of find-lr; rates are values of `optim.lr`, and `assignments` are the keys to change, if any.

    `lr` is None where the trials do not single out a rate; `low` and `high` are the likely range of the best one, and `lowest`
    is the minimum of the trials, extrapolated to the run.
    """

    configured: float
    lr: float | None
    lowest: float
    low: float
    high: float
    clear: bool
    advice: str
    assignments: dict[str, float]
    num_params: int
    run_steps: int
    trial_steps: int
    notes: list[str]
    trials: list[Trial]
    metric: str

    @property
    def ratio(self) -> float | None:
        """The factor on all configured rates."""
        return self.lr / self.configured if self.lr is not None else None

    @property
    def compared(self) -> list[Trial]:
        """The trials that have the metric, with it as their loss."""
        if self.metric == TRAINING_LOSS.name:
            return self.trials
        return [replace(t, loss=t.score) for t in self.trials if t.score is not None]

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["try"] = found.pop("assignments")
        for trial, name in itertools.product(found["trials"], ("loss", "score")):
            trial[name] = trial[name] if trial[name] is not None and math.isfinite(trial[name]) else None
        return {**found, "ratio": self.ratio}


def scan(study: Study, num_steps: int, limits: tuple[int, int]) -> int:
    """The power of two with the lowest loss after a few steps, among every second one.

    By the training loss: an evaluation may not change in so few steps.
    """
    return local_minimum(lambda k: study.trial(2.0**k, num_steps, evaluated=False).loss, 0, SCAN, limits)


def local_minimum(loss: Callable[[int], float], start: int, step: int, limits: tuple[int, int]) -> int:
    """Moves downhill until both neighbours are higher, or a limit is reached."""
    best = start
    while True:
        near = [k for k in (best - step, best, best + step) if limits[0] <= k <= limits[1]]
        lowest = min(near, key=lambda k: (loss(k), abs(k - best), k))
        if not math.isfinite(loss(lowest)):  # all of them diverge
            lowest = near[0]
        if lowest == best:
            return best
        best = lowest


def search(score: Callable[[int, int], float], repeats: int, start: int, limits: tuple[int, int]) -> LrCurve:
    """Finds the best rate by trials of full length, then repeats it and its neighbours on other items.

    While the last rate on a side equals the best within noise, the next is tried too.
    """

    def curve(ks: Iterable[int]) -> LrCurve:
        scores = {k: [score(k, r) for r in range(repeats)] for k in sorted(ks)}
        found = LrCurve(scores, False, limits)
        return replace(found, bracketed=limits[0] < found.best < limits[1])

    best = local_minimum(lambda k: score(k, 0), start, GRID, limits)
    if repeats > 1:
        best = local_minimum(lambda k: statistics.fmean(score(k, r) for r in range(repeats)), best, GRID, limits)
    found = curve(k for k in (best - GRID, best, best + GRID) if limits[0] <= k <= limits[1])
    while len(found.scores) < MOST_RATES and math.isfinite(found.mean[found.best]) and (more := found.open_ends()):
        found = curve({*found.scores, *more})
    return found


@dataclass(frozen=True)
class Metric:
    """What trials are compared by: the first number of the recipe's evaluation on `valid`, or the training loss.

    `caveat` says why that is not the run's own metric; `seconds` is the time of one evaluation.
    """

    name: str = "training loss"
    valid: Source | None = None
    caveat: str = ""
    seconds: float = 0.0


TRAINING_LOSS = Metric()


def choose_metric(rig: Rig, valid: Source, seconds: float) -> Metric:
    """The recipe's own evaluation, where it takes no more than its share of the time."""
    engine = rig.engine
    start = time.perf_counter()
    try:
        with preserved(engine), engine.evaluating():
            name, value = next(iter(engine.system.evaluate(valid, engine).items()))
    except NotImplementedError:
        return TRAINING_LOSS
    took = time.perf_counter() - start
    if took * NUM_EVALUATIONS <= MAX_EVALUATION * seconds:
        return Metric(name, valid, seconds=took)
    with preserved(engine):
        loss = Study(rig, 1).trial(0.0, FEWEST_STEPS).loss
    if not engine.system.evaluation_steers and abs(loss - value) <= SAME * abs(value):
        return TRAINING_LOSS
    return Metric(caveat=f"the run is judged by {name}, and an evaluation takes {took:.3g} s, too long to compare trials by it")


def find(
    workload: Workload,
    *,
    num_steps: int | None = None,
    repeats: int = 2,
    seconds: float | None = None,
    low: float | None = None,
    high: float | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
    make_study: Callable[[Rig, int, Callable[[], None], Source | None], Study] = Study,
) -> LrResult:
    """Short trials at several rates, the best of them repeated, and the result for the run. All state is restored."""
    config = workload.config
    limits = _limits(config.optim.lr, low, high)
    if num_steps is not None and num_steps < FEWEST_STEPS:
        raise UserError(f"steps={num_steps} is too few to distinguish rates; use at least {FEWEST_STEPS}")
    engine, notes = workload.build(), []
    with rigged(engine, workload.data, notes.append) as rig:
        with preserved(engine):
            rig.take_steps(1)
            per_step = rig.seconds_per_step(0.5, fewest=1)
        run_steps = run_length(config, per_step)
        spend = SECONDS[workload.device.type] if seconds is None else seconds
        metric = choose_metric(rig, workload.data.valid, math.inf if num_steps else spend)
        length = min(num_steps or affordable(spend - NUM_EVALUATIONS * metric.seconds, per_step), run_steps)
        counter = iter(range(1 << 62))
        total = int(NUM_TRIALS * (length + num_scored(length)))
        study = make_study(rig, run_steps, lambda: tick(min(next(counter), total), total), metric.valid)
        start = scan(study, max(length // SCAN_SHARE, min(FEWEST_SCANNED, length)), limits)
        curve, untrained, metric = compare(study, metric, length, repeats, start, limits)
    if metric.valid is not None and engine.system.evaluation_steers:
        notes.append("evaluations steer this run, and trials have none before their end")
    if repeats < 2:
        notes.append("one repeat shows no noise: whether the curve is flat is not known")
    muon = config.optim.muon_lr if config.optim.kind == "muon" else None
    facts = {"num_params": num_parameters(engine.system), "run_steps": run_steps, "trial_steps": length}
    drift = DRIFT["constant" if multiplier(config.schedule, 1.0) > 0.5 else "decayed"]
    return conclude(curve, untrained, config.optim.lr, muon, facts, notes, list(study.trials.values()), drift, metric)


def compare(
    study: Study, metric: Metric, length: int, repeats: int, start: int, limits: tuple[int, int]
) -> tuple[LrCurve, float, Metric]:
    """The curve by the metric; by the training loss, with a note, where trials do not change the metric."""

    def loss(k: int, repeat: int) -> float:
        return study.trial(2.0**k, length, repeat).loss

    def score(k: int, repeat: int) -> float:
        found = study.trial(2.0**k, length, repeat).score
        assert found is not None
        return found

    untrained = study.trial(0.0, length)
    if metric.valid is None or untrained.score is None:
        return search(loss, repeats, start, limits), untrained.loss, metric
    curve = search(score, repeats, start, limits)
    if curve.mean[curve.best] < untrained.score - curve.noise():
        return curve, untrained.score, metric
    caveat = f"the run is judged by {metric.name}, which trials of {length:,} steps do not move from {untrained.score:.4g}"
    caveat += " by more than their noise" if curve.noise() else ""
    return search(loss, repeats, start, limits), untrained.loss, Metric(caveat=caveat)


def run_length(config: Config, per_step: float) -> int:
    """The steps of the run; with a time budget, as many as fit into it."""
    return max(1, int(config.budget / per_step)) if config.budget else config.steps


def affordable(seconds: float, per_step: float) -> int:
    """Steps per trial such that all trials together take `seconds`."""
    return max(FEWEST_STEPS, int(seconds / per_step / NUM_TRIALS / (1.0 + 1.0 / 8.0)))


def _limits(configured: float, low: float | None, high: float | None) -> tuple[int, int]:
    """The range of powers of two to search."""
    if configured <= 0:
        raise UserError("optim.lr=0 has no multiples; give a starting value such as optim.lr=1e-3")
    low = configured / REACH if low is None else low
    high = configured * REACH if high is None else high
    if not (low > 0 and math.isfinite(high) and low * 8 <= high and low <= configured <= high):
        raise UserError(
            f"low={low:g} and high={high:g} are no range: it must hold the configured {configured:g} and span a factor of 8"
        )
    return math.ceil(math.log2(low / configured) - 1e-9), math.floor(math.log2(high / configured) + 1e-9)


def conclude(
    curve: LrCurve,
    untrained: float,
    configured: float,
    muon: float | None,
    facts: dict[str, int],
    notes: Sequence[str],
    trials: list[Trial],
    drift: tuple[float, float],
    metric: Metric = TRAINING_LOSS,
) -> LrResult:
    """A rate, its likely range and a sentence; or why there is none."""
    longer, (power, error) = facts["run_steps"] / facts["trial_steps"], drift
    bottom = vertex(curve.mean, curve.best)
    lr = configured * 2.0**bottom * longer**-power
    # The power is known only roughly, and noise limits which rates can be distinguished.
    ends = (min(max(end, curve.limits[0]), curve.limits[1]) for end in curve.flat_range())
    low, high = (math.hypot(error * math.log(longer), (end - bottom) * math.log(2.0)) for end in ends)
    low, high = lr * math.exp(-low), lr * math.exp(high)
    common = {"configured": configured, "lowest": lr, "low": low, "high": high, "notes": list(notes), "trials": trials, **facts}
    common["metric"] = metric.name
    within = low <= configured <= high
    left_alone = ". The configured rate lies within: no reason to change it" if within else ""
    if reason := _why_no_rate(curve, untrained, (lr, low, high), facts, metric):
        reason += left_alone if reason.startswith("no single") else ""
        return LrResult(**common, lr=None, clear=False, advice=reason, assignments={})
    assignments = {} if within else {"optim.lr": lr} | ({"optim.muon_lr": lr * muon / configured} if muon is not None else {})
    text = f"train at about {lr:.2g}, {lr / configured:.2g} times the configured {configured:.2g}; likely {low:.2g} to {high:.2g}"
    return LrResult(**common, lr=lr, clear=True, advice=text + left_alone, assignments=assignments)


def _why_no_rate(
    curve: LrCurve, untrained: float, rates: tuple[float, float, float], facts: dict[str, int], metric: Metric
) -> str:
    """Why no single rate is named; empty where one is."""
    lr, low, high = rates
    best = curve.mean[curve.best]
    if not math.isfinite(best) or not best < untrained - 1e-6 * abs(untrained):
        return f"no answer: at no rate does the loss fall below {untrained:.4g}, where it begins; look at the data or the model"
    if not curve.bracketed:
        side, option = ("highest", "--high") if curve.best > 0 else ("lowest", "--low")
        return f"no answer: the {side} rate that was tried is the best; set {option}"
    between = f"between {low:.2g} and {high:.2g}, lowest at {lr:.2g}"
    if metric.caveat:
        return f"no answer: {metric.caveat}. By the training loss it lies {between}; more --seconds help"
    reach = max(high / lr, lr / low)
    if reach <= TRUSTED:
        return ""
    bottom = vertex(curve.mean, curve.best)
    if max(abs(end - bottom) for end in curve.flat_range()) * math.log(2.0) > math.log(reach) / math.sqrt(2.0):
        return f"no single best rate: {between}, the {metric.name} is the same within its noise; more --repeats narrow it"
    reason = f"trials of {facts['trial_steps']:,} steps say too little about {facts['run_steps']:,}"
    return f"no single best rate: {reason}. It likely lies {between}; more --seconds narrow it"
