"""Summaries of runs for listings, from their small files and the tails of their long ones; damaged runs say why."""

import contextlib
import datetime
import math
import os
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.report.facts import current_status, evaluations, step_in
from seedbed.track import jsonl
from seedbed.track.rows import tail_lines
from seedbed.track.run import Run
from seedbed.track.run_names import run_names


def summary(run: Run) -> dict[str, Any]:
    """Summary of a run for listings, from its small files and the tails of its long ones; a damaged run says why."""
    keys = ("recipe", "preset", "status", "step", "last_step", "loss", "best", "created", "age", "why")
    out: dict[str, Any] = {"name": run.name, **dict.fromkeys(keys), "parent": None, "sweep": None, "path": str(run.path)}
    try:
        return _summary(run, out)
    except UserError as problem:
        why = str(problem)
    except Exception as error:  # one bad folder must not break the listing
        why = f"{run.path} cannot be read ({type(error).__name__}: {error})"
    made = None
    with contextlib.suppress(OSError):
        made = datetime.datetime.fromtimestamp(os.stat(run.path).st_mtime).astimezone().isoformat(timespec="seconds")
    return {**out, "status": "damaged", "why": why, "created": made, "age": age_seconds(made)}


def _summary(run: Run, out: dict[str, Any]) -> dict[str, Any]:
    config = run.config_json()
    out |= {key: config.get(key) for key in ("recipe", "preset", "created", "why", "parent", "sweep")}
    saved = run.status()
    out |= {key: saved.get(key) for key in ("step", "last_step", "loss", "best")}
    last = next(iter(reversed(jsonl.decode(tail_lines(run.path / "rows.jsonl", 4096)[-2:]))), {})
    if step_in(last) >= step_in(out):
        out |= {"step": last.get("step"), "loss": last.get("loss")}
    if out["best"] is None:
        _, points = evaluations(jsonl.decode(tail_lines(run.path / "events.jsonl")))
        out["best"] = min((value for _, value in points), default=None)
    return {**out, "status": current_status(run, saved), "age": age_seconds(out["created"])}


def summaries(root: Path) -> list[dict[str, Any]]:
    """Summaries of all runs, newest first, damaged ones included."""
    found = [summary(Run(Path(root) / name)) for name in run_names(root)]
    return sorted(found, key=lambda s: (math.inf if s["age"] is None else s["age"], s["name"]))


def age(created: Any, now: datetime.datetime | None = None) -> str:
    """How long ago an ISO time was, in its largest unit; a clock that jumped gives `now`."""
    seconds = age_seconds(created, now)
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return "now"


def age_seconds(created: Any, now: datetime.datetime | None = None) -> float | None:
    """Seconds since an ISO time, never negative; None when it is no time."""
    try:
        moment = datetime.datetime.fromisoformat(created).astimezone()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
    return max(((now or datetime.datetime.now().astimezone()) - moment).total_seconds(), 0.0)
