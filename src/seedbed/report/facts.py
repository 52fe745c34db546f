"""Summary numbers of runs, for listings and reports; damaged files are tolerated."""

import math
from collections.abc import Iterable
from typing import Any

from seedbed.track.run import Run

# Most log points used for the noise band; never more than the last half of the run.
NUM_LAST = 20


def current_status(run: Run, saved: dict[str, Any]) -> str:
    """The current status: running while a process holds the lock; interrupted when none does and none was recorded."""
    if run.is_running():
        return "running"
    status = saved.get("status")
    return status if isinstance(status, str) and status != "running" else "interrupted"


def final_status(run: Run, saved: dict[str, Any]) -> str:
    """The recorded final status, even while the process still holds the lock to write the report."""
    status = saved.get("status")
    return status if isinstance(status, str) and status != "running" else current_status(run, saved)


def evaluations(events: Iterable[dict[str, Any]]) -> tuple[str | None, list[tuple[int, float]]]:
    """The number that decides `best`, by name, and its value at each step that measured it."""
    metric, points = None, []
    for event in events:
        if event.get("kind") != "eval":
            continue
        numbers = {k: v for k, v in event.items() if k != "step" and is_number(v)}
        name = next(iter(numbers), None)
        if name is not None and name != "time" and metric in (None, name):
            metric = name
            points.append((int(step_in(event)), float(numbers[name])))
    return metric, points


def last_losses(rows: list[dict[str, Any]]) -> list[float]:
    """The losses at the end of the run, for its final level and noise."""
    return last_of([float(row["loss"]) for row in rows if is_number(row.get("loss"))])


def last_of(losses: list[float]) -> list[float]:
    """The losses that count as the end of the run."""
    return losses[-min(NUM_LAST, max(len(losses) // 2, 1)) :]


def mean_and_sd(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation; the latter is NaN for fewer than three values."""
    if not values:
        return math.nan, math.nan
    try:
        mean = math.fsum(values) / len(values)
        if len(values) < 3:
            return mean, math.nan
        return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    except OverflowError:  # values around 1e300, whose squares or sums no double holds
        scale = 2.0 ** -math.frexp(max(map(abs, values)))[1]
        mean, sd = mean_and_sd([v * scale for v in values])
        return mean / scale, sd / scale


def series(rows: list[dict[str, Any]], name: str) -> list[tuple[Any, Any]]:
    """The points (step, value) of one curve."""
    return [(row["step"], row[name]) for row in rows if is_number(row.get(name)) and is_number(row.get("step"))]


def median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = sorted(row[key] for row in rows if is_number(row.get(key)))
    return values[len(values) // 2] if values else None


def is_number(value: Any) -> bool:
    """Whether this is a finite number that fits into a double."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def step_in(values: dict[str, Any]) -> float:
    return values["step"] if is_number(values.get("step")) else -1
