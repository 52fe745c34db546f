"""find-batch: the largest batch that fits, by doubling and bisection with real steps; running out of memory is not a crash."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from seedbed.data.feed import room
from seedbed.errors import UserError
from seedbed.tune.bench import Bench, rigged

GIB = 2**30
MOST = 2**16
HEADROOM = 0.9  # evaluation, samples and fragmentation want some memory too
SATURATED = 0.95
TIMED_SECONDS = 0.3
STEP_PATIENCE = 8.0  # on a CPU, a step that would take longer is reckoned from the smaller ones

_OUT_OF_MEMORY = (
    "out of memory",
    "cudaerrormemoryallocation",
    "can't allocate memory",
    "not enough memory",
    "alloc_failed",
)


@dataclass(frozen=True)
class Trial:
    """One batch size: whether it fits, how fast it is, and its peak memory; `reckoned` when it was not really run."""

    batch: int
    fits: bool
    peak: int = 0
    seconds: float = 0.0
    why: str = ""
    reckoned: bool = False

    @property
    def items_per_s(self) -> float:
        return self.batch / self.seconds if self.seconds else 0.0


class Crashed(Exception):
    """A step failed for a reason that is not memory; the cause is attached."""

    def __init__(self, batch: int, cause: BaseException, trials: list[Trial]) -> None:
        first = (str(cause).strip() or "no message").splitlines()[0]
        super().__init__(f"batch {batch} crashed, and not for lack of memory: {type(cause).__name__}: {first}")
        self.batch, self.cause, self.trials = batch, cause, trials


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, in any of the ways in which torch, CUDA and Python say so."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def search(attempt: Callable[[int], Trial], start: int, most: int) -> list[Trial]:
    """Double while it fits, halve while it does not, then bisect between; every trial made, in order of size."""
    trials: dict[int, Trial] = {}

    def fits(batch: int) -> bool:
        if batch not in trials:
            trials[batch] = attempt(batch)
        return trials[batch].fits

    good = min(max(start, 1), most)
    while not fits(good) and good > 1:
        good //= 2
    if trials[good].fits:
        while good < most and fits(min(2 * good, most)):
            good = min(2 * good, most)
        bad = min((b for b, t in trials.items() if not t.fits), default=good + 1)
        while bad - good > grain(good):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
    return [trials[b] for b in sorted(trials)]


def grain(batch: int) -> int:
    """How exactly it is worth knowing: to the item below 32, then to a sixteenth of the power of two below."""
    return max(1, 2 ** (batch.bit_length() - 1) // 16)


class Attempts:
    """Tries batch sizes with a fresh system each: build, a few real steps, measure, free. `limit` is in bytes, 0 for none."""

    def __init__(self, bench: Bench, limit: int, say: Callable[[str], None]) -> None:
        self.bench, self.limit, self.say = bench, limit, say
        self.on_host = bench.device.type == "cpu"
        self.done: list[Trial] = []

    def __call__(self, batch: int) -> Trial:
        trial = self._reckon(batch) if self.on_host else None
        trial = trial or self._try(batch)
        self.done.append(trial)
        self.say(f"batch {batch:,}: {'fits' if trial.fits else trial.why}")
        return trial

    def _try(self, batch: int) -> Trial:
        free(self.bench)
        reset_peak(self.bench.device)
        try:
            seconds = self._run(batch)
        except UserError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise Crashed(batch, error, self.done) from error
            # The error itself is not kept: its traceback would hold on to the very tensors that must go.
            return Trial(batch, False, why="out of memory")
        peak = peak_memory(self.bench.device)
        if self.on_host and peak > self.limit:
            return Trial(batch, False, peak, seconds, why=f"over the limit of {self.limit / GIB:.1f} GiB")
        return Trial(batch, True, peak, seconds)

    def _run(self, batch: int) -> float:
        """Seconds per step. What the capture or the compiler swallowed for lack of memory counts as a lack of memory."""
        said: list[str] = []
        config = replace(self.bench.config, batch=batch, accum=1)
        with rigged(self.bench.build(config), self.bench.data, said.append) as rig:
            rig.take_steps(2)
            if any(words in line.lower() for line in said for words in _OUT_OF_MEMORY):
                raise MemoryError(said[-1])
            return rig.seconds_per_step(TIMED_SECONDS, fewest=1)

    def _reckon(self, batch: int) -> Trial | None:
        """Memory and time grow in a straight line: a size that a smaller one rules out is not tried on the machine itself."""
        real = [t for t in self.done if t.seconds and not t.reckoned]
        if len(real) < 2:
            return None
        small, large = sorted(real, key=lambda t: t.batch)[-2:]
        if batch <= large.batch:
            return None
        peak = int(line(batch, (small.batch, small.peak), (large.batch, large.peak)))
        seconds = line(batch, (small.batch, small.seconds), (large.batch, large.seconds))
        if peak > self.limit:
            return Trial(batch, False, peak, why=f"over the limit of {self.limit / GIB:.1f} GiB", reckoned=True)
        return Trial(batch, True, peak, reckoned=True) if seconds > STEP_PATIENCE else None


def line(x: float, a: tuple[float, float], b: tuple[float, float]) -> float:
    """The line through two points; never less than the second, since nothing gets smaller with the batch."""
    return b[1] + max(b[1] - a[1], 0.0) / (b[0] - a[0]) * (x - b[0])


def free(bench: Bench) -> None:
    """Give back everything the last trial held, compiled code too: each size compiles anew."""
    if bench.config.compile != "off":
        torch.compiler.reset()
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    elif bench.device.type == "mps":
        torch.mps.empty_cache()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Collecting garbage between tries looks only at what the tries made, which is quick."""
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
        # Linux can forget the highest memory use of a process; elsewhere it only grows, which doubling can live with.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """The most bytes held since `reset_peak`: reserved on the GPU, resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with contextlib.suppress(OSError):
        for row in Path("/proc/self/status").read_text().splitlines():
            if row.startswith("VmHWM:"):
                return int(row.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextlib.contextmanager
def limited(device: torch.device, limit: int) -> Iterator[None]:
    """Let the GPU's allocator refuse what goes over the limit."""
    if device.type != "cuda" or not limit:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@dataclass(frozen=True)
class BatchFinding:
    """Everything find-batch has to tell."""

    device: str
    limit: int
    trials: list[Trial]
    largest: int
    reckoned: bool
    capped: str
    saturation: int | None
    batch: int
    accum: int
    advice: str

    def to_json(self) -> dict[str, Any]:
        trials = [asdict(t) | {"items_per_s": t.items_per_s} for t in self.trials]
        return {**asdict(self), "trials": trials}


def find(
    bench: Bench, *, limit: float | None = None, most: int = MOST, say: Callable[[str], None] = lambda text: None
) -> BatchFinding:
    """The largest batch that fits, and the split of the configured one into parts that do."""
    if limit is not None and not limit > 0:
        raise UserError(f"limit={limit:g} GiB leaves no memory at all; give a positive number")
    if most < 1:
        raise UserError(f"max={most} is no batch; give at least 1")
    num_items = bench.data.train.num_items or most
    top = min(most, num_items)
    # On a host `room` is half of the free memory, and 60 % is a fair share of a machine that others use too.
    bytes_allowed = int(limit * GIB) if limit is not None else int(1.2 * room(bench.device)) if bench.device.type == "cpu" else 0
    config = bench.config
    attempts = Attempts(bench, bytes_allowed, say)
    with limited(bench.device, bytes_allowed), frozen_heap():
        trials = search(attempts, start=max(1, config.batch // config.accum // 4), most=top)
        free(bench)
    capped = "" if trials[-1].batch < top or not trials[-1].fits else "the data" if top == num_items else "--max"
    return conclude(trials, bench, bytes_allowed, capped)


def conclude(trials: list[Trial], bench: Bench, limit: int, capped: str) -> BatchFinding:
    """Read the table: what fits, where more stops helping, and how to split the configured batch."""
    config, best = bench.config, max((t for t in trials if t.fits), key=lambda t: t.batch, default=None)
    common = {"device": str(bench.device), "limit": limit, "trials": trials, "capped": capped}
    if best is None:
        advice = f"not even one item fits ({trials[0].why}): make the model or its context smaller, or raise --limit"
        return BatchFinding(**common, largest=0, reckoned=False, saturation=None, batch=0, accum=0, advice=advice)
    part, accum = split(config.batch, best.batch)
    saturation = saturates(trials)
    advice = f"batch={config.batch} accum={accum}" + (f" runs in {accum} parts of {part}" if accum > 1 else " fits in one part")
    return BatchFinding(
        **common,
        largest=best.batch,
        reckoned=best.reckoned,
        saturation=saturation,
        batch=config.batch,
        accum=accum,
        advice=advice,
    )


def split(batch: int, largest: int) -> tuple[int, int]:
    """The largest equal part of `batch` that fits with some headroom, and the number of parts."""
    room_for = max(1, int(HEADROOM * largest)) if batch > largest * HEADROOM else batch
    part = max(d for d in range(1, min(batch, room_for) + 1) if batch % d == 0)
    return part, batch // part


def saturates(trials: list[Trial]) -> int | None:
    """The smallest measured batch within a few percent of the best rate; None where the largest is still that much faster."""
    measured = [t for t in trials if t.fits and t.seconds]
    if len(measured) < 2:
        return None
    top = max(t.items_per_s for t in measured)
    first = next(t.batch for t in measured if t.items_per_s >= SATURATED * top)
    return first if first < measured[-1].batch else None
