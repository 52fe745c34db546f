"""find-batch: the largest batch that fits, by doubling and bisection with real steps."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from seedbed.config import Config
from seedbed.data.feed import room
from seedbed.errors import UserError
from seedbed.track.clocks import memory_bytes
from seedbed.train.oom import is_out_of_memory, says_out_of_memory
from seedbed.tune.workload import Rig, Workload, rigged

GIB = 2**30
MOST = 2**16
HEADROOM = 0.9  # evaluation, samples and fragmentation need memory too
SATURATED = 0.95
TIMED_SECONDS = 0.3
SEARCH_SECONDS = 20.0  # after this the search ends, and no second size is compiled
VISIBLE = 0.02  # smaller growth is not attributed to the batch
MAX_GROWTH = 4  # largest factor between the largest size that fits and the next
COMPILED_SAVES = 2  # a compiled step holds at least 1/2 of the memory of an uncompiled one
STEP_PATIENCE = 8.0  # on a CPU, longer steps are extrapolated from smaller sizes


@dataclass(frozen=True)
class Trial:
    """One batch size: whether it fits, its speed and its peak memory; `extrapolated` when it was not run.

    `compiled` says whether the step was compiled.
    """

    batch: int
    fits: bool
    peak: int = 0
    seconds: float = 0.0
    why: str = ""
    extrapolated: bool = False
    compiled: bool = False

    @property
    def items_per_s(self) -> float:
        return self.batch / self.seconds if self.seconds else 0.0


class Crashed(Exception):
    """A step failed for a reason other than memory; the cause is attached."""

    def __init__(self, batch: int, cause: BaseException, trials: list[Trial]) -> None:
        first = (str(cause).strip() or "no message").splitlines()[0]
        super().__init__(f"batch {batch} crashed, and not for lack of memory: {type(cause).__name__}: {first}")
        self.batch, self.cause, self.trials = batch, cause, trials


def search(
    attempt: Callable[[int], Trial], start: int, most: int, room: int = 0, in_time: Callable[[], bool] = lambda: True
) -> list[Trial]:
    """Grows while it fits, halves while it does not, then bisects while there is time; all trials in order of size.

    Where `room` is known in bytes, the line through the two largest peaks gives the first guess.
    """
    trials: dict[int, Trial] = {}

    def fits(batch: int) -> bool:
        if batch not in trials:
            trials[batch] = attempt(batch)
        return trials[batch].fits

    good = min(max(start, 1), most)
    while not fits(good) and good > 1:
        good //= 2
    if trials[good].fits:
        while good < most and fits(larger := min(max(2 * good, min(predicted(trials, room), MAX_GROWTH * good)), most)):
            good = larger
        bad = min((b for b, t in trials.items() if not t.fits), default=good + 1)
        aims: set[int] = set()
        while bad - good > resolution(good) and in_time():
            aims.add(middle := _between(good, bad, predicted(trials, room), aims))
            good, bad = (middle, bad) if fits(middle) else (good, middle)
    return [trials[b] for b in sorted(trials)]


def predicted(trials: dict[int, Trial], room: int) -> int:
    """The largest batch that fits by the line through the two largest measured peaks; 0 where there is no such line."""
    known = sorted((t.batch, t.peak) for t in trials.values() if t.fits and t.peak)[-2:]
    if not room or len(known) < 2:
        return 0
    (small, low), (large, high) = known
    if high - low < VISIBLE * high:
        return 0
    return large + int((room - high) * (large - small) / (high - low))


def _between(good: int, bad: int, guess: int, tried: set[int]) -> int:
    """The next size: the prediction, then right above it, and the middle once it was wrong."""
    step = resolution(good)
    guess -= guess % step
    if guess and guess < bad and not tried:
        return max(guess, good + step)
    return good + step if good in tried and len(tried) == 1 else (good + bad) // 2


def resolution(batch: int) -> int:
    """The resolution of the answer: one item below 32, then a sixteenth of the power of two below."""
    return max(1, 2 ** (batch.bit_length() - 1) // 16)


def compiles(config: Config) -> bool:
    """Whether the first step is compiled: `compile=auto` starts uncompiled, and must fit so."""
    return config.compile in ("blocks", "whole") or config.compile_autograd or config.compile_optimizer


def uncompiled(config: Config) -> Config:
    """The same config without compilation, which takes longer than all trials together."""
    return replace(config, compile="off", compile_autograd=False, compile_optimizer=False)


class Attempts:
    """Tries batch sizes with a fresh system each. `limit` is in bytes, 0 for none."""

    def __init__(self, workload: Workload, limit: int, say: Callable[[Trial], None], compiled: bool = False) -> None:
        self.workload, self.limit, self.say = workload, limit, say
        self.compiled = compiled and compiles(workload.config)
        self.on_host = workload.device.type == "cpu"
        self.done: list[Trial] = []

    def __call__(self, batch: int) -> Trial:
        trial = (self._extrapolate(batch) if self.on_host else None) or self._try(batch)
        self.done.append(trial)
        self.say(trial)
        return trial

    def _try(self, batch: int) -> Trial:
        free(self.workload)
        reset_peak(self.workload.device)
        try:
            seconds = self._run(batch)
        except UserError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise Crashed(batch, error, self.done) from error
            # The error itself is not kept: its traceback would keep the tensors alive.
            return Trial(batch, False, why="out of memory", compiled=self.compiled)
        peak = peak_memory(self.workload.device)
        if self.on_host and peak > self.limit:
            return Trial(batch, False, peak, seconds, f"over the limit of {self.limit / GIB:.1f} GiB", compiled=self.compiled)
        return Trial(batch, True, peak, seconds, compiled=self.compiled)

    def _run(self, batch: int) -> float:
        """Seconds per step. An out-of-memory error caught by capture or compiler counts as one."""
        messages: list[str] = []
        config = self.workload.config if self.compiled else uncompiled(self.workload.config)
        with rigged(self.workload.build(replace(config, batch=batch, accum=1)), self.workload.data, messages.append) as rig:
            rig.take_steps(1)
            if any(map(says_out_of_memory, messages)):
                raise MemoryError(messages[-1])
            return timed(rig)

    def _extrapolate(self, batch: int) -> Trial | None:
        """Extrapolates memory and time linearly: a size that a smaller one rules out is not tried."""
        real = [t for t in self.done if t.seconds and not t.extrapolated]
        if len(real) < 2:
            return None
        small, large = sorted(real, key=lambda t: t.batch)[-2:]
        if batch <= large.batch:
            return None
        peak = int(line(batch, (small.batch, small.peak), (large.batch, large.peak)))
        seconds = line(batch, (small.batch, small.seconds), (large.batch, large.seconds))
        if peak > self.limit:
            return Trial(batch, False, peak, why=f"over the limit of {self.limit / GIB:.1f} GiB", extrapolated=True)
        return Trial(batch, True, peak, extrapolated=True) if seconds > STEP_PATIENCE else None


def timed(rig: Rig) -> float:
    """Seconds per step; slow steps are taken only a few times."""
    start = time.perf_counter()
    rig.take_steps(1)
    once = time.perf_counter() - start
    return once if once > TIMED_SECONDS else rig.seconds_per_step(TIMED_SECONDS, fewest=1)


def line(x: float, a: tuple[float, float], b: tuple[float, float]) -> float:
    """The line through two points, at least the second value."""
    return b[1] + max(b[1] - a[1], 0.0) / (b[0] - a[0]) * (x - b[0])


def free(workload: Workload) -> None:
    """Frees everything the last trial held, compiled code included."""
    if uncompiled(workload.config) != workload.config:
        torch.compiler.reset()
    gc.collect()
    if workload.device.type != "cpu":
        torch.accelerator.empty_cache()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Freezes the heap, so that garbage collection between trials is fast."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        # Linux can reset the peak memory of a process; elsewhere it only grows, which doubling tolerates.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Peak bytes since `reset_peak`: reserved on the GPU, resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with contextlib.suppress(OSError):
        for row in Path("/proc/self/status").read_text().splitlines():
            if row.startswith("VmHWM:"):
                return int(row.split()[1]) * 1024
    return memory_bytes(device)


@contextlib.contextmanager
def limited(device: torch.device, limit: int) -> Iterator[None]:
    is_limited = device.type == "cuda" and limit > 0
    if is_limited:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), device)
    try:
        yield
    finally:
        if is_limited:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


@dataclass(frozen=True)
class BatchResult:
    """The result of find-batch. `confirmed` are compiled trials of the advised size, where trials were uncompiled."""

    device: str
    limit: int
    trials: list[Trial]
    confirmed: list[Trial] = field(default_factory=list)
    largest: int = 0
    extrapolated: bool = False
    compiled: bool = False
    exact: bool = True
    capped: str = ""
    saturation: int | None = None
    batch: int = 0
    accum: int = 0
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        def rows(trials: list[Trial]) -> list[dict[str, Any]]:
            return [asdict(t) | {"items_per_s": t.items_per_s} for t in trials]

        return {**asdict(self), "trials": rows(self.trials), "confirmed": rows(self.confirmed)}


def find(
    workload: Workload,
    *,
    limit: float | None = None,
    most: int | None = None,
    compiled: bool = False,
    say: Callable[[Trial], None] = lambda trial: None,
) -> BatchResult:
    """The largest batch that fits, and how to split the configured one.

    Sizes are tried uncompiled and only the advised one is compiled, unless `compiled` is set.
    """
    if limit is not None and not limit > 0:
        raise UserError(f"limit={limit:g} GiB leaves no memory at all; give a positive number")
    most = MOST if most is None else most
    if most < 1:
        raise UserError(f"max={most} is no batch; give at least 1")
    num_items = workload.data.train.num_items or most
    top = min(most, num_items)
    config, device = workload.config, workload.device
    # In bytes, 0 for none; on a host 60 % of the free memory by default.
    allowed = int(limit * GIB) if limit is not None else int(1.2 * room(device)) if device.type == "cpu" else 0
    attempts = Attempts(workload, allowed, say, compiled)
    end = time.perf_counter() + SEARCH_SECONDS

    def in_time() -> bool:
        return attempts.compiled or time.perf_counter() < end

    with limited(device, allowed), frozen_heap():
        held = allowed
        if not held and device.type == "cuda":  # what this process holds or could have
            held = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        trials = search(attempts, max(1, config.batch // config.accum // 4), top, held, in_time)
        confirmed = confirm(Attempts(workload, allowed, say, True), trials, held, in_time) if not attempts.compiled else []
        free(workload)
    capped = "" if trials[-1].batch < top or not trials[-1].fits else "the data" if top == num_items else "--max"
    finding = conclude(trials, workload, allowed, capped)
    fitting = next((t for t in confirmed if has_headroom(t, held)), None)
    return replace(finding, confirmed=confirmed, **(advise(config.batch, fitting.batch) if fitting else {}))


def confirm(attempts: Attempts, trials: list[Trial], held: int, in_time: Callable[[], bool]) -> list[Trial]:
    """Compiled trials of the parts of the configured batch that may fit, largest first, until one does."""
    largest = max((t.batch for t in trials if t.fits), default=0)
    if not attempts.compiled or not largest:
        return []
    batch, done = attempts.workload.config.batch, []
    parts = {split(batch, COMPILED_SAVES * largest)[0], split(batch, largest)[0]}
    for part in sorted(parts, reverse=True):
        if done and not in_time():
            break
        done.append(attempts(part))
        if has_headroom(done[-1], held):
            break
    return done


def has_headroom(trial: Trial, held: int) -> bool:
    return trial.fits and (not held or trial.peak <= HEADROOM * held)


def conclude(trials: list[Trial], workload: Workload, limit: int, capped: str) -> BatchResult:
    """The result of the trials: what fits, where throughput saturates, and how to split the configured batch."""
    batch, best = workload.config.batch, max((t for t in trials if t.fits), key=lambda t: t.batch, default=None)
    common = {"device": str(workload.device), "limit": limit, "trials": trials, "capped": capped}
    if best is None:
        advice = f"not even one item fits ({trials[0].why}): make the model or its context smaller, or raise --limit"
        return BatchResult(**common, advice=advice)
    bad = min((t.batch for t in trials if not t.fits), default=best.batch + 1)
    return BatchResult(
        **common,
        **advise(batch, split(batch, best.batch)[0]),
        largest=best.batch,
        extrapolated=best.extrapolated,
        compiled=best.compiled,
        exact=bad - best.batch <= resolution(best.batch),
        saturation=saturation_batch(trials),
    )


def advise(batch: int, part: int) -> dict[str, Any]:
    """The settings that run `batch` in parts of `part` items, and a sentence."""
    accum = batch // part
    words = f" runs in {accum} parts of {part}" if accum > 1 else " fits in one part"
    return {"batch": batch, "accum": accum, "advice": f"batch={batch} accum={accum}{words}"}


def split(batch: int, largest: int) -> tuple[int, int]:
    """The largest equal part of `batch` that fits with some headroom, and the number of parts."""
    room_for = max(1, int(HEADROOM * largest)) if batch > largest * HEADROOM else batch
    part = max(d for d in range(1, min(batch, room_for) + 1) if batch % d == 0)
    return part, batch // part


def saturation_batch(trials: list[Trial]) -> int | None:
    """The smallest measured batch within a few percent of the best throughput; None while it still grows."""
    measured = [t for t in trials if t.fits and t.seconds]
    if len(measured) < 2:
        return None
    top = max(t.items_per_s for t in measured)
    first = next(t.batch for t in measured if t.items_per_s >= SATURATED * top)
    return first if first < measured[-1].batch else None
