"""Guards around the steps of a run in its process: stop signals, the garbage collector, a stall watchdog, and out of memory.

None of them costs a step anything: signals and the watchdog only set or read counters, and the collector runs between steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from seedbed.errors import EXIT_STALLED, UserError

if TYPE_CHECKING:
    from seedbed.train.job import Job


# ---- stop signals ------------------------------------------------------------------------------------------------------

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Stoppable(Protocol):
    stop_signal: int


def catch_signals(job: Stoppable) -> dict[int, Any]:
    """The first signal ends the run at the next step; a second Ctrl-C ends it at once. Returns the previous handlers."""

    def on_signal(number: int, _frame: Any) -> None:
        if job.stop_signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        job.stop_signal = number

    try:
        return {number: signal.signal(number, on_signal) for number in STOPPING if not is_ignored(number)}
    except ValueError:  # not in the main thread: the caller owns the signals
        return {}


def is_ignored(number: int) -> bool:
    """Whether the parent process set the signal to be ignored, as nohup does."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def restore_signals(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- the garbage collector ---------------------------------------------------------------------------------------------

_num_collections = 0


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable automatic collection inside; `gc_collect` still collects. Objects that exist already are frozen."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def gc_collect() -> None:
    """Collect reference cycles, after an evaluation, a sample or a save.

    Freed memory is returned to the system: left fragmented, it would look like a leak.
    """
    global _num_collections
    gc.collect()
    _give_back()(0)
    _num_collections += 1


def num_collections() -> int:
    """How often this process has collected: between two collections there are only steps."""
    return _num_collections


@functools.cache
def _give_back() -> Callable[[int], int]:
    """glibc's malloc_trim; other C libraries do not have it."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda keep: 0


# ---- the stall watchdog ------------------------------------------------------------------------------------------------

# A disk that hangs would block the report too; then the process ends without it.
LAST_WORDS = 10.0


@contextlib.contextmanager
def stall_watchdog(job: Job) -> Iterator[None]:
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


# ---- out of memory -----------------------------------------------------------------------------------------------------


def retry_on_oom(job: Job, act: Callable[[Job], None]) -> None:
    """Run `act(job)`; whenever memory runs out in it, again with smaller micro-batches."""
    while True:
        try:
            return act(job)
        except (RuntimeError, MemoryError) as error:
            from seedbed.train import oom

            if not oom.is_out_of_memory(error):
                raise
            problem = str(error).strip().partition("\n")[0]
        # Outside the handler: the error keeps every tensor of the failed step alive.
        oom.shrink(job, problem)


@contextlib.contextmanager
def explain_oom(job: Job) -> Iterator[None]:
    """Out of memory outside steps, where smaller micro-batches do not help, ends the run with advice on what does."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        from seedbed.train import oom

        if not oom.is_out_of_memory(error):
            raise
        problem = str(error).strip().partition("\n")[0]
        raise UserError(
            f"out of memory after step {job.step}, while evaluating, sampling or saving ({problem})\n"
            f"go on with less of that: seedbed resume {job.run.name} every.sample=0, or with a smaller batch"
        ) from None
