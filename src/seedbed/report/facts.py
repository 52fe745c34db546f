"""Summary numbers of runs, for listings and reports; damaged files are tolerated."""

import math
import statistics
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from seedbed.track.events import is_score
from seedbed.track.run import Run

# Most log points used for the noise band; never more than the last half of the run.
NUM_LAST = 20


def current_status(run: Run, saved: dict[str, Any]) -> str:
    """The current status: running while a process holds the lock; interrupted when none does and none was recorded."""
    status = saved.get("status")
    ended = status if isinstance(status, str) and status != "running" else "interrupted"
    return "running" if run.is_running() else ended


def final_status(run: Run, saved: dict[str, Any]) -> str:
    """The recorded final status, even while the process still holds the lock to write the report."""
    status = saved.get("status")
    return status if isinstance(status, str) and status != "running" else current_status(run, saved)


def evaluations(events: Iterable[dict[str, Any]], metric: str | None = None) -> tuple[str | None, list[tuple[int, float]]]:
    """The number that decides `best`, or another one, by name, and its value at each step that measured it."""
    points, wanted = [], metric
    for event in (event for event in events if event.get("kind") == "eval"):
        numbers = {k: v for k, v in event.items() if k != "step" and is_number(v)}
        name = next(iter(numbers), None) if wanted is None else wanted if wanted in numbers else None
        if name is not None and name != "time" and metric in (None, name):
            metric = name
            points.append((int(step_in(event)), float(numbers[name])))
    return metric if points else None, points


def best(events: Sequence[dict[str, Any]], metric: str | None = None) -> tuple[int, float] | None:
    """Step and value of the best evaluation, by the number that decides `best` or another one."""
    metric, points = evaluations(events, metric)
    return (max if is_higher_better(events, metric) else min)(points, key=itemgetter(1), default=None)


def is_higher_better(events: Sequence[dict[str, Any]], metric: str | None) -> bool:
    """Whether more of a metric is better: as its recipe says, or by its name."""
    known = next((e for e in reversed(events) if e.get("kind") == "eval" and metric in e), {}).get("higher_is_better")
    return metric is not None and (metric in (known if isinstance(known, list) else ()) or is_score(metric))


def last_losses(rows: list[dict[str, Any]]) -> list[float]:
    return last_of([float(row["loss"]) for row in rows if is_number(row.get("loss"))])


def last_of(losses: list[float]) -> list[float]:
    """The losses that count as the end of the run."""
    return losses[-min(NUM_LAST, max(len(losses) // 2, 1)) :]


def mean_and_sd(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation; the latter is NaN for fewer than three values."""
    # In exact fractions: values around 1e300 have squares and sums that no double holds.
    return statistics.mean(values) if values else math.nan, statistics.stdev(values) if len(values) > 2 else math.nan


def series(rows: list[dict[str, Any]], name: str) -> list[tuple[Any, Any]]:
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
