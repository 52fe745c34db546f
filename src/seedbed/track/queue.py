"""What Slurm says of the jobs that were submitted for runs and sweeps: one short call of squeue, and silence without one."""

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files, lines

FILE = "slurm.json"
# A listing answers at once or does without.
_PATIENCE = 2.0


def record(folder: Path, job: str) -> None:
    """Remember that `job` was submitted for the run or sweep in this folder."""
    values = {"jobs": [*jobs(folder), job], "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    files.write_atomic(folder / FILE, lines.pretty(values))


def jobs(folder: Path) -> list[str]:
    """The numbers of the jobs submitted for this folder, the newest last."""
    if not (folder / FILE).is_file():
        return []
    try:
        found = lines.read_object(folder / FILE).get("jobs")
    except UserError:
        return []
    return [job for job in found if isinstance(job, str) and job.isdigit()] if isinstance(found, list) else []


def ask(numbers: Iterable[str]) -> dict[str, list[tuple[str, str]]] | None:
    """State and reason of every task of these jobs that is in the queue, by job; None where Slurm does not answer."""
    wanted = list(dict.fromkeys(numbers))
    if not wanted:
        return {}
    import subprocess  # most listings have no use for it

    words = ["squeue", "--noheader", "--array", f"--jobs={','.join(wanted)}", "--format=%F|%T|%r"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Slurm forgets a job some minutes after its end, and calls the number invalid when it is asked for alone.
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    found: dict[str, list[tuple[str, str]]] = {}
    for line in done.stdout.splitlines():
        job, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if job in wanted and state:
            found.setdefault(job, []).append((state, reason))
    return found


def told(folder: Path) -> str:
    """What the queue says of the jobs of a folder, in a few words; empty when none of them waits or runs."""
    found = ask(jobs(folder)) or {}
    return "; ".join(f"job {job}: {spelled(tasks)}" for job, tasks in found.items())


def in_queue(folder: Path) -> list[str]:
    """Those of a folder's jobs that wait or run; none where Slurm does not answer."""
    return list(ask(jobs(folder)) or {})


def spelled(tasks: list[tuple[str, str]]) -> str:
    """PENDING (Priority), RUNNING, or counts for an array."""
    counts = Counter(state for state, _ in tasks)
    if len(tasks) > 1:
        return ", ".join(f"{count} {state}" for state, count in counts.items())
    state, reason = tasks[0]
    return f"{state} ({reason})" if state == "PENDING" and reason not in ("", "None") else state


def add(found: list[dict[str, Any]]) -> None:
    """Let summaries of runs tell the queue's word under `queue`, and correct a status that only the queue can know."""
    numbers = [jobs(Path(s["path"]))[-1:] or _jobs_of_sweep(s) for s in found]
    told = ask(job for each in numbers for job in each)
    for s, own in zip(found, numbers, strict=True):
        live = [job for job in own if job in (told or {})]
        s["queue"] = "; ".join(f"{job}: {spelled((told or {})[job])}" for job in live) or None
        if s["sweep"]:
            continue
        if live and s["status"] == "interrupted" and told and told[live[0]][0][0] == "RUNNING":
            s["status"] = "running"  # a node whose locks are not seen from here
        elif own and not live and told is not None and s["status"] == "queued":
            s["status"] = "cancelled"


def _jobs_of_sweep(summary: dict[str, Any]) -> list[str]:
    name = summary["sweep"]
    return jobs(Path(summary["path"]).parent.parent / "sweeps" / name) if isinstance(name, str) else []
