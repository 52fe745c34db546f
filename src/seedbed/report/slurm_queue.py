"""State of the Slurm jobs of runs and sweeps, from one call of squeue; nothing where there is no Slurm."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files, jsonl

FILE = "slurm.json"
# Seconds that a listing waits for squeue.
_PATIENCE = 2.0


def record(folder: Path, job: str) -> None:
    """Record that `job` was submitted for the run or sweep in this folder."""
    values = {"jobs": [*jobs(folder), job], "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    files.write_atomic(folder / FILE, jsonl.pretty(values))


def jobs(folder: Path) -> list[str]:
    found = None
    with contextlib.suppress(UserError):
        found = jsonl.read_object(folder / FILE).get("jobs")
    return [job for job in found if isinstance(job, str) and job.isdigit()] if isinstance(found, list) else []


def query(numbers: Iterable[str]) -> dict[str, list[tuple[str, str]]] | None:
    """State and reason of every task of these jobs that is in the queue, by job; None where Slurm does not answer."""
    wanted = list(dict.fromkeys(numbers))
    if not wanted:
        return {}
    import subprocess  # only needed with jobs

    words = ["squeue", "--noheader", "--array", f"--jobs={','.join(wanted)}", "--format=%F|%T|%r"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Slurm drops a job some minutes after its end, and then reports its id as invalid.
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    found: dict[str, list[tuple[str, str]]] = {}
    for line in done.stdout.splitlines():
        job, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if job in wanted and state:
            found.setdefault(job, []).append((state, reason))
    return found


def describe(folder: Path) -> str:
    """State of the jobs of a folder in a few words; empty when none is pending or running."""
    found = query(jobs(folder)) or {}
    return "; ".join(f"job {job}: {format_states(tasks)}" for job, tasks in found.items())


def format_states(tasks: list[tuple[str, str]]) -> str:
    """PENDING (Priority), RUNNING, or counts for an array."""
    counts = Counter(state for state, _ in tasks)
    if len(tasks) > 1:
        return ", ".join(f"{count} {state}" for state, count in counts.items())
    state, reason = tasks[0]
    return f"{state} ({reason})" if state == "PENDING" and reason not in ("", "None") else state


def add(found: list[dict[str, Any]]) -> None:
    """Add the queue's state to summaries of runs, and correct the status where only the queue knows it."""
    sweeps = [Path(s["path"]).parent.parent / "sweeps" / s["sweep"] if isinstance(s["sweep"], str) else None for s in found]
    numbers = [jobs(Path(s["path"]))[-1:] or (jobs(sweep) if sweep else []) for s, sweep in zip(found, sweeps, strict=True)]
    states = query(job for each in numbers for job in each)
    for s, own in zip(found, numbers, strict=True):
        live = [job for job in own if job in (states or {})]
        s["queue"] = "; ".join(f"{job}: {format_states((states or {})[job])}" for job in live) or None
        if s["sweep"]:
            continue
        if live and s["status"] == "interrupted" and states and states[live[0]][0][0] == "RUNNING":
            s["status"] = "running"  # locks of that node are not visible here
        elif own and not live and states is not None and s["status"] == "queued":
            s["status"] = "cancelled"
