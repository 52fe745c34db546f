"""Guards of a run on the host: loss spikes, stop signals, the garbage collector, stalled steps, and out of memory.

None of them costs a step more than a few comparisons: signals and the watchdog set or read counters, and garbage is collected
between steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any

from seedbed.config import Guard
from seedbed.errors import EXIT_STALLED

if TYPE_CHECKING:
    from seedbed.train.job import Job


# Clean runs on batches of 8, three seeds of 800 steps: 8 to 11 alarms without it, none with it; injected spikes are far above.
TAIL = 3.0
# Below this share of the first loss the task is solved: single items that still fail make the loss jump by factors, and it
# recovers by itself. Roll-backs there cost a run that had learned to add half of its steps.
SOLVED = 0.1
# Names in checkpoints of earlier versions.
RENAMED = {"lesson": "stage"}


class SpikeWatch:
    """Mean and deviation of the last finite losses; a loss above mean + sigmas x deviation is a spike.

    Losses of small batches have heavy tails, so a spike must also rise `TAIL` times as far above the mean as anything in the
    window did, and above the `SOLVED` share of the first loss.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.losses: deque[float] = deque(maxlen=guard.window)
        self._sum = self._squares = self._shift = self.far = 0.0  # `far`: a loss out of the band that is no spike
        self.floor: float | None = None
        self._stage = 0.0
        self._near = 0.5 * guard.sigmas**2

    def spikes(self, loss: float, stage: float = 0.0) -> bool:
        """Whether the next loss is a spike. Spikes and non-finite values do not enter the statistics; a new stage resets them."""
        if not isfinite(loss):
            return False
        if stage != self._stage:
            self._stage = stage
            self.restart()
        if self.floor is None:
            self.floor = SOLVED * loss
        losses, shift = self.losses, self._shift
        num = len(losses)
        if num == losses.maxlen:
            # A few products show that nearly every loss is well inside the band. Here the distance is multiplied by `num`, and
            # the variance by `num` squared.
            above = (loss - shift) * num - self._sum
            variance = num * self._squares - self._sum * self._sum
            if above * above > self._near * variance:
                if above > 0.0 and loss > self.limit():
                    return True
                self.far = loss if above * above > 4.0 * self._near * variance else 0.0
            gone = losses[0] - shift
            self._sum -= gone
            self._squares -= gone * gone
        elif not losses:
            self._shift = shift = loss  # sums of differences keep their precision
        losses.append(loss)
        far = loss - shift
        self._sum += far
        self._squares += far * far
        return False

    def limit(self) -> float:
        far = self._sum / len(self.losses)
        mean, variance = far + self._shift, max(self._squares / len(self.losses) - far * far, 0.0)
        band = mean + self.guard.sigmas * max(sqrt(variance), 1e-3 * abs(mean), 1e-9)
        return max(band, mean + TAIL * (max(self.losses) - mean), self.floor or 0.0)

    def restart(self) -> None:
        """Reset the statistics: they do not apply after a roll-back or a change of stage."""
        self.losses.clear()
        self._sum = self._squares = 0.0

    def state(self) -> dict:
        sums = [self._sum, self._squares, self._shift]
        return {"losses": list(self.losses), "sums": sums, "floor": self.floor, "stage": self._stage}

    def load_state(self, state: dict) -> None:
        state = {RENAMED.get(key, key): value for key, value in state.items()}
        self.losses = deque(state["losses"], maxlen=self.guard.window)
        self._sum, self._squares, self._shift = state["sums"]  # not summed again: rounding would differ
        self.floor = state["floor"]
        self._stage = state.get("stage", 0.0)  # older checkpoints have none


class Incidents:
    """Counts incidents; rollback.py decides by them. Checkpoints keep its state."""

    def __init__(self, guard: Guard) -> None:
        self.guard, self.watch = guard, SpikeWatch(guard)
        self.num_skips = self.num_rollbacks = 0
        self.spikes: deque[int] = deque(maxlen=3)

    def state(self) -> dict:
        counts = {"num_skips": self.num_skips, "num_rollbacks": self.num_rollbacks}
        return {**counts, "spikes": list(self.spikes), "watch": self.watch.state()}

    def load_state(self, state: dict) -> None:
        self.num_skips, self.num_rollbacks = state["num_skips"], state["num_rollbacks"]
        self.spikes = deque(state["spikes"], maxlen=3)
        self.watch.load_state(state["watch"])


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def catch_signals(job: Any) -> dict[int, Any]:
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


_num_collections = 0
SMALL_OBJECT = 64  # bytes


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


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def allocated() -> float | None:
    """Bytes in use by the allocator's own count, Python's small objects estimated; None with C libraries that do not tell."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    ask.restype = _MallocInfo
    _, _, _, _, mapped, _, _, used, *_ = ask().sizes
    return float(mapped + used + SMALL_OBJECT * sys.getallocatedblocks())


# Seconds after which a step of several ranks is taken for hung, unless steps have taken a quarter of it or more: one that died
# or hangs ends all within a minute. In evaluations, samples and saves ranks may wait for one another for longer.
RANKS_LIMIT, MARGIN = 45.0, 4.0
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
    known = job.step + 3 if job.ranks.world > 1 else inf  # from this step on it is known how long steps take
    seen, since, longest = (-1, 0.0), time.monotonic(), 0.0
    while not over.wait(period):
        # This timer still fires when a call in C keeps Python from running.
        _arm(limit + 60.0)
        now = (job.step, job.items)
        if now != seen or job.clock.running != "train":  # evaluation, sampling, compiling and saving have no limit
            longest = max(longest, time.monotonic() - since) if job.clock.running == "train" else longest
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > (min(limit, max(RANKS_LIMIT, MARGIN * longest)) if job.step >= known else limit):
            _arm(LAST_WORDS)
            from seedbed.train import stall

            stall.report(job, time.monotonic() - since)
            os._exit(EXIT_STALLED)


def _arm(seconds: float) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no standard error to write to
        faulthandler.dump_traceback_later(seconds, exit=True)


def retry_on_oom(job: Job, act: Callable[[Job], None]) -> None:
    """Run `act(job)`; whenever memory runs out in it, again with smaller micro-batches."""
    while True:
        try:
            return act(job)
        except (RuntimeError, MemoryError) as error:
            from seedbed.train import oom

            problem = oom.problem_of(error)
        # Outside the handler: the error keeps every tensor of the failed step alive.
        oom.shrink(job, problem)


@contextlib.contextmanager
def explain_oom(job: Job) -> Iterator[None]:
    """Out of memory outside steps, where smaller micro-batches do not help, ends the run with advice on what does."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        from seedbed.train import oom

        raise oom.outside_steps(job, error) from None
