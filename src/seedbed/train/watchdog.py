"""Stall watchdog: when a step or a wait for data does not end, it prints the stack of every thread and ends the run.

It only reads, so steps cost nothing more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from seedbed.errors import EXIT_STALLED
from seedbed.track import files

if TYPE_CHECKING:
    from types import FrameType

    from seedbed.train.job import Job

# What schedulers read as "try again later": the run can be resumed.
# A disk that hangs would block the report too; then the process ends without it.
LAST_WORDS = 10.0
_PACKAGE = str(Path(__file__).parents[1])


@contextlib.contextmanager
def watching(job: Job) -> Iterator[None]:
    """End the process when training in the block makes no progress for longer than `guard.stall` seconds."""
    limit, over = job.config.guard.stall, threading.Event()
    if limit is None:
        yield
        return
    thread = threading.Thread(target=_watch, args=(job, limit, over), name="seedbed-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch(job: Job, limit: float, over: threading.Event) -> None:
    period = min(limit / 4, 5.0)
    seen, since = (-1, 0.0), time.monotonic()
    while not over.wait(period):
        # This timer still fires when a call in C keeps Python from running.
        _arm(limit + 60.0)
        now = (job.step, job.items)
        if now != seen or job.clock.running != "train":  # evaluation, sampling, compiling and saving have no limit
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > limit:
            _give_up(job, time.monotonic() - since)


def _arm(seconds: float) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error to write to
        faulthandler.dump_traceback_later(seconds, exit=True)


def _give_up(job: Job, seconds: float) -> None:
    _arm(LAST_WORDS)
    stacks = _stacks()
    where = _where(stacks.get(threading.main_thread().ident or 0, []))
    samples = f"samples {job.counter} to {job.counter + job.config.batch - 1}"
    what = f"step {job.step + 1} ({samples}) has not ended after {seconds:.0f} s"
    report = "\n".join(_format_stack(ident, stack) for ident, stack in stacks.items())
    print(f"\n{report}\nseedbed: {what}; it is at {where}", file=sys.stderr)
    print(f"seedbed: stopped; go on from the last checkpoint with: seedbed resume {job.run.name}", file=sys.stderr, flush=True)
    rank = "" if job.ranks.is_primary else f"-rank{job.ranks.rank}"
    with contextlib.suppress(OSError):
        files.write_atomic(job.run.path / f"stacks{rank}.txt", f"{what}\n\n{report}\n")
    job.run.event(job.step + 1, "stall", what=what, where=where, seconds=round(seconds, 1))
    job.run.set_status("stalled", step=job.step, error=f"{what}; it is at {where}")
    os._exit(EXIT_STALLED)


def _stacks() -> dict[int, list[traceback.FrameSummary]]:
    """The stack of every thread but this one, innermost frame last."""
    frames: dict[int, FrameType] = sys._current_frames()
    frames.pop(threading.get_ident())
    return {ident: list(traceback.extract_stack(frame)) for ident, frame in frames.items()}


def _where(stack: list[traceback.FrameSummary]) -> str:
    """The innermost line of the user's code or of seedbed, not a library's."""
    own = [f for f in stack if f.filename.startswith(_PACKAGE) or not re.search(r"site-packages|/lib/python", f.filename)]
    found = (own or stack)[-1:]
    return f"{found[0].filename}:{found[0].lineno} in {found[0].name}" if found else "an unknown line"


def _format_stack(ident: int, stack: list[traceback.FrameSummary]) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return f"thread {names.get(ident, ident)}\n{''.join(traceback.format_list(stack))}"
