"""A run in numbers: read quickly for listings, completely for reports, and without trust in any file being whole."""

import datetime
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files, lines
from seedbed.track.run import Run, run_names
from seedbed.track.text import age_seconds

# How many log points the noise band is taken over, at most; never more than the last half of the run.
NUM_LAST = 20

# What the watchers raise while a run trains: data, memory, layers, rates, evaluations.
ALARMS = ("data_wait", "host_leak", "device_leak", "unused", "dead", "exploding", "schedule", "stuck_eval", "floor", "anomaly")
INCIDENTS = ("spike", "rollback", "nonfinite", "save_failed", "resume", *ALARMS)


def summary(run: Run) -> dict[str, Any]:
    """What a listing shows of a run, from its small files and the tails of its long ones."""
    out: dict[str, Any] = dict.fromkeys(
        ("recipe", "preset", "status", "step", "last_step", "loss", "best", "created", "age", "why")
    )
    out = {"name": run.name, **out, "parent": None, "sweep": None, "path": str(run.path)}
    try:
        config = run.config_json()
    except UserError as problem:
        made = _folder_time(run.path)
        return {**out, "status": "damaged", "why": str(problem), "created": made, "age": age_seconds(made)}
    out |= {key: config.get(key) for key in ("recipe", "preset", "created", "why", "parent", "sweep")}
    saved = run.status()
    out |= {key: saved.get(key) for key in ("step", "last_step", "loss", "best")}
    last = next(iter(reversed(lines.decode(files.tail_lines(run.path / "rows.jsonl", 4096)[-2:]))), {})
    if _at(last) >= _at(out):
        out |= {"step": last.get("step"), "loss": last.get("loss")}
    if out["best"] is None:
        _, points = evaluations(lines.decode(files.tail_lines(run.path / "events.jsonl")))
        out["best"] = min((value for _, value in points), default=None)
    return {**out, "status": standing(run, saved), "age": age_seconds(out["created"])}


def standing(run: Run, saved: dict[str, Any]) -> str:
    """The status that is true now: running while a process holds the lock, interrupted when none does and none said why."""
    if run.is_running():
        return "running"
    status = saved.get("status")
    return status if isinstance(status, str) and status != "running" else "interrupted"


def ending(run: Run, saved: dict[str, Any]) -> str:
    """How the run ended by its own word, even while its process still holds the lock to write the report."""
    status = saved.get("status")
    return status if isinstance(status, str) and status != "running" else standing(run, saved)


def summaries(root: Path) -> list[dict[str, Any]]:
    """Every run, newest first; a damaged folder is one of them and breaks nothing."""
    found = [summary(Run(Path(root) / name)) for name in run_names(root)]
    return sorted(found, key=lambda s: (math.inf if s["age"] is None else s["age"], s["name"]))


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
            points.append((int(_at(event)), float(numbers[name])))
    return metric, points


def last_losses(rows: list[dict[str, Any]]) -> list[float]:
    """The losses at the end of the run, for its final level and its noise."""
    return last_of([float(row["loss"]) for row in rows if is_number(row.get("loss"))])


def last_of(losses: list[float]) -> list[float]:
    """Those that count as the end of the run."""
    return losses[-min(NUM_LAST, max(len(losses) // 2, 1)) :]


def mean_and_sd(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation; the latter is NaN for fewer than three values."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) < 3:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def noise_band(deviations: Iterable[float]) -> float:
    """Two levels are told apart only beyond the larger of their own scatters; NaN when neither is known."""
    return max((sd for sd in deviations if math.isfinite(sd)), default=math.nan)


def median(rows: list[dict[str, Any]], key: str) -> float | None:
    values = sorted(row[key] for row in rows if is_number(row.get(key)))
    return values[len(values) // 2] if values else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _at(values: dict[str, Any]) -> float:
    return values["step"] if is_number(values.get("step")) else -1


def _folder_time(path: Path) -> str | None:
    try:
        return datetime.datetime.fromtimestamp(os.stat(path).st_mtime).astimezone().isoformat(timespec="seconds")
    except OSError:
        return None
