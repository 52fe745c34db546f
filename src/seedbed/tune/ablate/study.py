"""An ablation in progress, kept in one file so that nothing is measured twice; and its summary: medians, ratios, noise."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files, folders, jsonl
from seedbed.tune.ablate.axes import BASELINE, COMBINED, Row
from seedbed.tune.ablate.measure import WARM_UP, Repeat
from seedbed.tune.ablate.predictions import Prediction
from seedbed.tune.sweep.folder import name_for, require_same
from seedbed.tune.workload import writing

ROUND = 10_000
# Keys of earlier reports, and what they are called now.
RENAMED = {"visits": "repeats", "why_not": "skip_reason", "how": "execution"}

# A row that is off by more than this factor from its prediction must be explained.
EXPLAIN = 1.5
# Differences below this are noise on any machine; and below this with a single repeat.
LEAST_NOISE, BLIND_NOISE = 0.01, 0.05
SMOOTHED = 10  # the loss at a step is the mean over the tenth of the steps before it


@dataclass
class Entry:
    """One row with its prediction and its repeats, by place: round times ROUND, plus the position in the round."""

    row: Row
    prediction: Prediction | None = None
    repeats: dict[int, Repeat] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """ok, oom, crash, not run, skipped, or waiting."""
        if self.row.skip_reason:
            return "not run"
        bad = [repeat.outcome for repeat in self.repeats.values() if repeat.outcome != "ok"]
        return bad[0] if bad else "ok" if self.repeats else "waiting"

    @property
    def why(self) -> str:
        return self.row.skip_reason or next((v.why for v in self.repeats.values() if v.outcome != "ok"), "")

    @property
    def succeeded(self) -> dict[int, Repeat]:
        return {k: v for k, v in self.repeats.items() if v.outcome == "ok"}

    def to_json(self) -> dict[str, Any]:
        prediction = asdict(self.prediction) if self.prediction else None
        repeats = {str(k): asdict(v) for k, v in self.repeats.items()}
        found = {"outcome": self.outcome, "prediction": prediction, "repeats": repeats}
        return {"label": self.row.label, **asdict(self.row), **found}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Entry":
        values = _renamed(values)
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in values["settings"].items()}
        found = cls(Row(values["axis"], settings, values["skip_reason"], values["value"]))
        for place, repeat in values["repeats"].items():
            known = _renamed(repeat)
            known["losses"] = [math.nan if loss is None else loss for loss in repeat["losses"]]  # JSON has no NaN
            found.repeats[int(place)] = Repeat(**known)
        found.prediction = Prediction(**values["prediction"]) if values["prediction"] else None
        return found


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(key, key): value for key, value in values.items()}


@dataclass
class Study:
    """All data of a report. `identity` is what two commands must share to continue the same one."""

    path: Path
    identity: dict[str, Any]
    facts: dict[str, Any]
    steps: int
    num_repeats: int
    spacing: int
    entries: list[Entry]

    @property
    def baseline(self) -> Entry:
        return self.entries[0]

    @property
    def singles(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.row.axis not in (BASELINE, COMBINED)]

    @property
    def combined(self) -> Entry | None:
        return next((entry for entry in self.entries if entry.row.axis == COMBINED), None)

    @property
    def title(self) -> str:
        return str(self.identity["recipe"])

    def to_json(self) -> dict[str, Any]:
        kept = {"identity": self.identity, "facts": self.facts, "steps": self.steps, "repeats": self.num_repeats}
        rows = [entry.to_json() for entry in self.entries]
        return {"name": self.path.name, **kept, "spacing": self.spacing, "rows": rows}

    def save(self, summary: Sequence[dict[str, Any]] = ()) -> None:
        with writing(self.path):
            files.write_atomic(self.path / "report.json", jsonl.pretty(self.to_json() | {"summary": list(summary)}))

    def waiting(self) -> Iterator[tuple[int, Entry]]:
        """What is still to be measured, and its place: A B A C A, and the next round in reverse."""
        for turn in range(self.num_repeats):
            yield from self._round(turn, self.singles[:: -1 if turn % 2 else 1])
        if self.combined:
            for turn in range(self.num_repeats, 2 * self.num_repeats):
                yield from self._round(turn, [self.combined])

    def _round(self, turn: int, rows: list[Entry]) -> Iterator[tuple[int, Entry]]:
        """Rows in order, the baseline around every `spacing` of them; a failed row is not tried again."""
        for first in range(0, len(rows), self.spacing):
            group = rows[first : first + self.spacing]
            places = {turn * ROUND + 2 * (first + i) + 1: entry for i, entry in enumerate(group)}
            if not any(entry.outcome in ("ok", "waiting") for entry in group):
                continue
            ends = min(places) - 1, max(places) + 1
            for place, entry in [(ends[0], self.baseline), *places.items(), (ends[1], self.baseline)]:
                if place not in entry.repeats and entry.outcome in ("ok", "waiting"):
                    yield place, entry

    def pairs(self, entry: Entry) -> Iterator[tuple[Repeat, list[Repeat]]]:
        """Every repeat of a row with the repeats of the baseline right before and after it."""
        base = self.baseline.succeeded
        for place, repeat in entry.succeeded.items():
            same = [p for p in base if p // ROUND == place // ROUND]
            ends = max((p for p in same if p < place), default=None), min((p for p in same if p > place), default=None)
            around = [base[p] for p in ends if p is not None]
            if around:
                yield repeat, around

    def seconds_left(self) -> float:
        """Estimated from earlier repeats of the same row, or of the baseline."""
        known = [v.total_seconds for entry in self.entries for v in entry.repeats.values()]
        usual = sum(known) / len(known) if known else math.nan
        return sum(min((v.total_seconds for v in e.repeats.values()), default=usual) for _, e in self.waiting())


def open_study(
    root: Path, name: str | None, identity: dict[str, Any], facts: dict[str, Any], rows: list[Row], repeats: int, spacing: int
) -> Study:
    """A new report, or the existing one of this name."""
    top = Path(root).parent / "ablations"
    path = top / folders.check_name(name or default_name(identity))
    if not (path / "report.json").is_file():
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            (top / ".gitignore").write_text("*\n")
        entries = [Entry(Row(BASELINE), Prediction(1.0, "the baseline itself")), *map(Entry, rows)]
        return Study(path, identity, facts, 0, repeats, spacing, entries)
    kept = jsonl.read_object(path / "report.json")
    try:
        entries = [Entry.from_json(values) for values in kept["rows"]]
        study = Study(path, kept["identity"], kept["facts"] | facts, kept["steps"], kept["repeats"], kept["spacing"], entries)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path / 'report.json'} is damaged ({error!r}); remove it or choose another --name") from None
    require_same(f"ablation {path.name}", study.identity, jsonl.finite(identity), "choose another --name")
    return study


def default_name(identity: dict[str, Any]) -> str:
    recipe = str(identity["recipe"])
    short = recipe.rpartition("/")[2].replace(".py", "") if ".py" in recipe else recipe
    return name_for(short, identity)


@dataclass(frozen=True)
class Line:
    """One row of the report in numbers; None where there is none."""

    label: str
    axis: str
    outcome: str
    why: str = ""
    items_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    ms: float | None = None
    ratio: float | None = None
    noise: float | None = None
    verdict: str = ""
    predicted: float | None = None
    basis: str = ""
    explain: bool = False
    tflops: float | None = None
    mfu: float | None = None
    mfu_measured: float | None = None
    hfu: float | None = None
    allocated: int | None = None
    reserved: int | None = None
    retries: int | None = None
    wait: float | None = None
    compile_seconds: float | None = None
    loss: float | None = None
    loss_sd: float | None = None
    loss_at_time: float | None = None
    num_params: int | None = None
    flops: float | None = None
    attention: str = ""
    execution: str = ""


def summarise(study: Study, batches: dict[str, int], overheads: dict[str, float], no_mfu: dict[str, str]) -> list[Line]:
    """A line per row. By label: items of a step, how much recomputation multiplies its FLOP, and why a row has no MFU."""
    moment = equal_time(study)
    return [_extrapolate(study, entry, batches, overheads, no_mfu, moment) for entry in study.entries]


def _extrapolate(
    study: Study, entry: Entry, batches: dict[str, int], overheads: dict[str, float], no_mfu: dict[str, str], moment: float
) -> Line:
    label, prediction = entry.row.label, entry.prediction
    predicted_facts = {"predicted": prediction.ratio, "basis": prediction.basis} if prediction else {}
    head = {"label": label, "axis": entry.row.axis, "outcome": entry.outcome, "why": entry.why, **predicted_facts}
    repeats = list(entry.succeeded.values())
    if entry.outcome != "ok":
        return Line(**head)
    batch, seconds = batches[label], [s for v in repeats for s in v.seconds]
    ordered = sorted(seconds)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    rate = batch / statistics.median(seconds)
    speed = {"items_per_s": rate, "low": batch / high, "high": batch / low, "ms": 1e3 * statistics.median(seconds)}
    return Line(
        **head,
        **speed,
        **_compared(study, entry, batches, prediction.ratio if prediction else 1.0),
        **_utilisation(study, repeats[0].flops * rate, overheads.get(label, 1.0), no_mfu.get(label, "")),
        **_costs(repeats),
        **_losses(repeats, moment),
    )


def paired(study: Study, entry: Entry, batches: dict[str, int]) -> tuple[list[float], float]:
    """Items per second relative to the baseline's right before and after, per repeat; and the drift of the baseline."""
    ratios, drifts, scale = [], [], batches[entry.row.label] / batches[BASELINE]
    for repeat, around in study.pairs(entry):
        base = [statistics.median(v.seconds) for v in around]
        ratios.append(scale * statistics.fmean(base) / statistics.median(repeat.seconds))
        drifts.append((max(base) - min(base)) / 2 / statistics.fmean(base))
    return ratios, statistics.median(drifts) if drifts else 0.0


def _compared(study: Study, entry: Entry, batches: dict[str, int], predicted: float) -> dict[str, Any]:
    if entry.row.axis == BASELINE:
        return {"ratio": 1.0, "verdict": "baseline"}
    ratios, drift = paired(study, entry, batches)
    ratio = statistics.median(ratios)
    # The largest difference that counts as noise: by the spread over repeats and the drift of the baseline.
    spread = max(LEAST_NOISE, (max(ratios) - min(ratios)) / 2 / ratio) if len(ratios) > 1 else BLIND_NOISE
    noise = max(spread, drift)
    verdict = "within noise" if abs(ratio - 1.0) <= noise else "faster" if ratio > 1.0 else "slower"
    return {"ratio": ratio, "noise": noise, "verdict": verdict, "explain": max(ratio / predicted, predicted / ratio) > EXPLAIN}


def _utilisation(study: Study, rate: float, overhead: float, no_mfu: str) -> dict[str, Any]:
    """FLOP/s, and shares of the peaks where these apply."""
    if not rate:
        return {}
    nominal, measured = (None if no_mfu else study.facts.get(key) for key in ("nominal_peak", "measured_peak"))
    return {
        "tflops": rate / 1e12,
        "mfu": rate / nominal if nominal else None,
        "mfu_measured": rate / measured if measured else None,
        "hfu": rate * overhead / nominal if nominal and overhead > 1.0 else None,
    }


def _costs(repeats: Sequence[Repeat]) -> dict[str, Any]:
    first = repeats[0]
    return {
        # The least of all repeats: memory left by an earlier row does not count.
        "allocated": min(v.allocated for v in repeats) or None,
        "reserved": min(v.reserved for v in repeats),
        "retries": max(v.retries for v in repeats),
        "wait": statistics.median(v.wait for v in repeats),
        "compile_seconds": first.compile_seconds,  # later repeats find a warm cache
        "num_params": first.num_params,
        "flops": first.flops or None,
        "attention": first.attention,
        "execution": first.execution,
    }


def _losses(repeats: Sequence[Repeat], moment: float) -> dict[str, Any]:
    last = [loss_at(v, len(v.losses)) for v in repeats]
    timed = [loss_at(v, step_at(v, moment)) for v in repeats]
    ends = [x for x in last if x is not None]
    out: dict[str, Any] = {"loss": _mean(last), "loss_at_time": _mean(timed)}
    if len(ends) > 1 and out["loss"] is not None:
        out["loss_sd"] = statistics.stdev(ends)
    return out


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def loss_at(repeat: Repeat, step: int) -> float | None:
    """The training loss around a step; None before the first one, or when it is not finite."""
    width = max(1, len(repeat.losses) // SMOOTHED)
    around = repeat.losses[max(0, step - width) : step]
    return statistics.fmean(around) if around and all(map(math.isfinite, around)) else None


def step_at(repeat: Repeat, moment: float) -> int:
    return min(int(moment / statistics.median(repeat.seconds) + 1e-9), len(repeat.losses))


def equal_time(study: Study) -> float:
    """The longest time for which every row has a loss: the total time of the fastest row."""
    succeeded = [repeat for entry in study.entries if entry.outcome == "ok" for repeat in entry.succeeded.values()]
    return min((len(repeat.losses) * statistics.median(repeat.seconds) for repeat in succeeded), default=0.0)


def loss_step(study: Study) -> int:
    return max((len(v.losses) for e in study.entries for v in e.succeeded.values()), default=study.steps + min(WARM_UP.values()))


def best_choices(study: Study, summary: Sequence[Line]) -> list[Entry]:
    """For every axis that leaves the model unchanged, the fastest value that is faster than noise."""
    best: dict[str, tuple[float, Entry]] = {}
    for entry, line in zip(study.entries, summary, strict=True):
        if line.axis in (BASELINE, COMBINED) or line.verdict != "faster" or line.ratio is None or not entry.row.is_free:
            continue
        if line.ratio > best.get(line.axis, (0.0, entry))[0]:
            best[line.axis] = line.ratio, entry
    return [entry for _, entry in best.values()]
