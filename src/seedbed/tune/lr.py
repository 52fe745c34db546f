"""find-lr: the best learning rate of a run, from short trials at several rates, extrapolated to the run's length."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from seedbed.config import Config, Schedule
from seedbed.data.feed import Source
from seedbed.errors import UserError
from seedbed.track import jsonl
from seedbed.train.optim import multiplier
from seedbed.train.system import maximized
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
DIVERGED = 2.0  # a loss that rose by this many times its first value has diverged
FIRST_LOSSES = 5
MAX_WARMUP = 0.2  # of a trial: the run's own number of warm-up steps where they fit
MIN_SCORED, MAX_SCORED = 4, 16
INK, BAND, CONFIGURED, FOUND = "#1f3b57", "#7fa8cf", "#9a9a9a", "#588157"

GRID = 1  # the distance between rates, in powers of two
T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78)  # Student's, one-sided, by degrees of freedom


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


@dataclass(frozen=True)
class LrCurve:
    """Scores by power of two of the configured rate, one per repeat."""

    scores: dict[int, list[float]]
    bracketed: bool  # False when the lowest is at the edge of what may be tried
    limits: tuple[int, int] = (-6, 6)  # the powers that may be tried

    @property
    def mean(self) -> dict[int, float]:
        return {k: statistics.fmean(losses) for k, losses in self.scores.items()}

    @property
    def best(self) -> int:
        return min(self.mean, key=lambda k: self.mean[k])

    def deviation(self) -> tuple[float, int]:
        """The standard deviation of one trial, and its degrees of freedom; 0 with one repeat.

        The mean of each repeat is subtracted, and the residuals are pooled over the rates.
        """
        rows = [losses for losses in self.scores.values() if all(map(math.isfinite, losses))]
        num = len(next(iter(self.scores.values())))
        if num < 2 or not rows:
            return 0.0, 0
        shared = [statistics.fmean(row[r] for row in rows) if len(rows) > 1 else 0.0 for r in range(num)]
        left = [[x - s for x, s in zip(row, shared, strict=True)] for row in rows]
        degrees = max(len(rows) - 1, 1) * (num - 1)
        variance = sum((x - statistics.fmean(row)) ** 2 for row in left for x in row) / degrees
        return math.sqrt(variance), degrees

    def noise(self) -> float:
        """How far apart the means of two rates can be by chance, one time in twenty."""
        deviation, degrees = self.deviation()
        num = len(next(iter(self.scores.values())))
        return T_95[min(degrees, len(T_95)) - 1] * deviation * math.sqrt(2.0 / num) if degrees else 0.0

    def flat_range(self) -> tuple[float, float]:
        """The powers between which scores equal the minimum within noise; infinite where no end was seen."""
        bottom, noise = vertex(self.mean, self.best), self.noise()
        return (self._edge(bottom, noise, -1), self._edge(bottom, noise, 1))

    def open_ends(self) -> list[int]:
        """The next powers to try: where the flat range reaches the last one tried."""
        ends = zip(self.flat_range(), (min(self.scores) - GRID, max(self.scores) + GRID), strict=True)
        return [k for end, k in ends if math.isinf(end) and self.limits[0] <= k <= self.limits[1]]

    def _edge(self, bottom: float, noise: float, side: int) -> float:
        """Where the curve leaves the flat range on one side; the best rate always lies inside.

        Near the best it is a parabola, or a line where that is wider: next to a diverging rate a parabola is too steep.
        """
        mean, best = self.mean, self.best
        top, near = mean[best] + noise, best + side * GRID
        if mean.get(near, -math.inf) > top:
            if not noise:
                return bottom
            straight = side * (best - bottom) + noise / (mean[near] - mean[best])
            low, middle, high = _neighbours(mean, best)
            curvature = (low - 2.0 * middle + high) / 2.0 if {best - GRID, best + GRID} <= mean.keys() else 0.0
            curved = math.sqrt(noise / curvature) if 0 < curvature < math.inf else math.inf
            return bottom + side * min(max(straight, curved), abs(near - bottom))
        while near in mean:
            further = near + side * GRID
            if mean.get(further, -math.inf) > top:
                share = (top - mean[near]) / (mean[further] - mean[near]) if math.isfinite(mean[further]) else 1.0
                return near + side * GRID * share
            near = further
        return side * math.inf


def _neighbours(losses: dict[int, float], best: int) -> tuple[float, float, float]:
    """The best score and its neighbours; a diverged one is replaced by a finite bound."""
    low, middle, high = losses.get(best - GRID, math.inf), losses[best], losses.get(best + GRID, math.inf)
    known = [x for x in (low, high) if math.isfinite(x)]
    if not math.isfinite(middle) or not known:
        return low, middle, high
    limit = middle + 4.0 * max(max(known) - middle, abs(middle) * 1e-9)
    return min(low, limit), middle, min(high, limit)


def vertex(losses: dict[int, float], best: int) -> float:
    """The minimum of that parabola, as a power of two; at most half-way to either neighbour."""
    low, middle, high = _neighbours(losses, best)
    curvature = low - 2.0 * middle + high
    if not math.isfinite(curvature):
        return float(best)
    if curvature <= 0:
        return best + 0.5 * GRID * ((low > high) - (low < high))
    return best + GRID * min(max(0.5 * (low - high) / curvature, -0.5), 0.5)


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
        return self.lr / self.configured if self.lr is not None else None

    @property
    def compared(self) -> list[Trial]:
        """The trials that have the metric, with it as their loss."""
        if self.metric == TRAINING_LOSS.name:
            return self.trials
        return [replace(t, loss=t.score) for t in self.trials if t.score is not None]

    def to_json(self) -> dict[str, Any]:
        found = jsonl.finite(asdict(self))  # losses of diverged trials are infinite
        found["try"] = found.pop("assignments")
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
        found = LrCurve({k: [score(k, r) for r in range(repeats)] for k in sorted(ks)}, False, limits)
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
    if name in maximized(engine.system, {name: value}):
        return Metric(caveat=f"the run is judged by {name}, of which more is better; trials are compared by the training loss")
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
    return max(FEWEST_STEPS, int(seconds / per_step / NUM_TRIALS / (1.0 + 1.0 / 8.0)))


def _limits(configured: float, low: float | None, high: float | None) -> tuple[int, int]:
    if configured <= 0:
        raise UserError("optim.lr=0 has no multiples; give a starting value such as optim.lr=1e-3")
    low = configured / REACH if low is None else low
    high = configured * REACH if high is None else high
    if not (low > 0 and math.isfinite(high) and low * 8 <= high and low <= configured <= high):
        range_ = f"low={low:g} and high={high:g}"
        raise UserError(f"{range_} are no range: it must hold the configured {configured:g} and span a factor of 8")
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


def draw(finding: LrResult, title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    trials, metric = finding.compared, finding.metric
    lengths = sorted({t.num_steps for t in trials})
    for num_steps in lengths:
        is_last = num_steps == lengths[-1]
        for number, points in enumerate(curves(trials, num_steps)):
            label = f"{metric} after {num_steps:,} steps" if not number else None
            rates, losses = [finding.configured * factor for factor, _ in points], [loss for _, loss in points]
            axes.plot(rates, losses, "o-", color=INK if is_last else BAND, linewidth=1.6 if is_last else 1.0, label=label)
    label = f"configured {finding.configured:.2g}"
    axes.axvline(finding.configured, color=CONFIGURED, linestyle="--", linewidth=1.4, label=label)
    label = f"likely {finding.low:.2g} to {finding.high:.2g} for {finding.run_steps:,} steps"
    axes.axvspan(finding.low, finding.high, color=FOUND, alpha=0.12, linewidth=0, label=label)
    if finding.lr is not None:
        axes.axvline(finding.lr, color=FOUND, linewidth=1.8, label=f"best, about {finding.lr:.2g}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.2g}")
    axes.set_ylim(*limits(trials))
    axes.set_xlabel("learning rate (optim.lr; every group moves by the same factor)")
    axes.set_ylabel("training loss on the items that would come next" if trials == finding.trials else f"evaluation: {metric}")
    axes.set_title(title if finding.clear else f"{title}: no single best rate", loc="left")
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False, fontsize=9)
    figure.savefig(path)


def curves(trials: list[Trial], num_steps: int) -> list[list[tuple[float, float]]]:
    """Factors and losses of trials of one length that did not diverge, by repeat."""
    repeats = sorted({t.repeat for t in trials if t.num_steps == num_steps})
    found = [t for t in trials if t.num_steps == num_steps and t.factor and math.isfinite(t.loss)]
    return [sorted((t.factor, t.loss) for t in found if t.repeat == repeat) for repeat in repeats]


def limits(trials: list[Trial]) -> tuple[float, float]:
    """From below the lowest loss to above the untrained one; larger losses are cut off."""
    known = [t.loss for t in trials if math.isfinite(t.loss)]
    low = min(known, default=0.0)
    start = max((t.loss for t in trials if not t.factor and math.isfinite(t.loss)), default=max(known, default=1.0))
    room = max(start - low, 1e-3 * abs(start), 1e-9)
    return low - 0.1 * room, start + 0.3 * room
