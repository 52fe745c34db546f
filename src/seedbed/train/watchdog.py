"""Stall watchdog: when a step or a wait for data does not end, it prints the stack of every thread and ends the run.

It only reads, so steps cost nothing more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from seedbed.errors import EXIT_STALLED

if TYPE_CHECKING:
    from seedbed.train.job import Job

# A disk that hangs would block the report too; then the process ends without it.
LAST_WORDS = 10.0


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


def _give_up(job: Job, seconds: float) -> None:
    _arm(LAST_WORDS)
    from seedbed.train import stall

    stall.report(job, seconds)
    os._exit(EXIT_STALLED)


def _arm(seconds: float) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error to write to
        faulthandler.dump_traceback_later(seconds, exit=True)
