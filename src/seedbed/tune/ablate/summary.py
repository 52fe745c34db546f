"""Summary of the repeats: medians with spread, ratios against the baseline, noise, and rows to explain."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seedbed.tune.ablate.axes import BASELINE, COMBINED
from seedbed.tune.ablate.measure import WARM_UP, Repeat
from seedbed.tune.ablate.study import Entry, Study

# A row that is off by more than this factor from its prediction must be explained.
EXPLAIN = 1.5
# Differences below this are noise on any machine; and below this with a single repeat.
LEAST_NOISE, BLIND_NOISE = 0.01, 0.05
SMOOTHED = 10  # the loss at a step is the mean over the tenth of the steps before it


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
    found: dict[str, Any] = {"tflops": rate / 1e12}
    nominal, measured = (study.facts.get(key) for key in ("nominal_peak", "measured_peak"))
    if no_mfu or not (nominal or measured):
        return found
    found["mfu"] = rate / nominal if nominal else None
    found["mfu_measured"] = rate / measured if measured else None
    if overhead > 1.0 and nominal:
        found["hfu"] = rate * overhead / nominal
    return found


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
    """The step that a row reaches after this many seconds."""
    return min(int(moment / statistics.median(repeat.seconds) + 1e-9), len(repeat.losses))


def equal_time(study: Study) -> float:
    """The longest time for which every row has a loss: the total time of the fastest row."""
    succeeded = [repeat for entry in study.entries if entry.outcome == "ok" for repeat in entry.succeeded.values()]
    return min((len(repeat.losses) * statistics.median(repeat.seconds) for repeat in succeeded), default=0.0)


def loss_step(study: Study) -> int:
    """The step at which losses are compared."""
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
