"""Clocks of a run: timers by kind of work, continued across processes through checkpoints, and rates between two readings."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


# The parts of a run's wall time in display order: timer name and label.
PARTS = {
    "start": "start",  # the interpreter, imports, the state of the code, the device
    "data": "data",
    "preflight": "preflight",
    "build": "build",  # the model, its table, a checkpoint to go on from
    "compile": "compile",  # with capture and warm-up
    "train": "train",
    "eval": "evaluation",
    "save": "saving",
    "sample": "samples",
    "report": "report",
    "other": "other",
}
_IMPORTED = time.monotonic()
_command_start: float | None = None


class Stopwatch:
    """Counts seconds per timer (see PARTS); at most one timer runs at a time.

    `since` is when the first timer, "start", began; without it nothing is counted until `start`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, since: float | None = None):
        self._earlier: dict[str, float] = {}
        self._seconds: dict[str, float] = {} if since is None else {"start": 0.0}
        self._clock = clock
        self._began = clock() if since is None else since
        self.running: str | None = None if since is None else "start"  # the timer that runs now
        self._paused: str | None = None
        self._since = self._began

    def go_on_from(self, saved: Mapping[str, float]) -> None:
        """Add the seconds that earlier processes of the run have counted."""
        self._earlier = dict(saved)

    def start(self, name: str) -> None:
        self.pause()
        self._seconds.setdefault(name, 0.0)
        self.running, self._paused, self._since = name, None, self._clock()

    def pause(self) -> None:
        if self.running is not None:
            self._seconds[self.running] = self._here(self.running)
            self.running, self._paused = None, self.running

    def resume(self) -> None:
        if self._paused is not None:
            self.start(self._paused)

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Run the timer `name` inside the block, and the previous one afterwards."""
        outer, paused = self.running, self._paused
        self.start(name)
        try:
            yield
        finally:
            self.pause()
            if outer is not None:
                self.start(outer)
            else:
                self._paused = paused

    def __getitem__(self, name: str) -> float:
        """Seconds of a timer so far, over all processes of the run."""
        return self._earlier.get(name, 0.0) + self._here(name)

    def _here(self, name: str) -> float:
        running = self._clock() - self._since if name == self.running else 0.0
        return self._seconds.get(name, 0.0) + running

    def state(self) -> dict[str, float]:
        """Seconds per timer over all processes, ready for JSON; `go_on_from` loads them."""
        return {name: self[name] for name in dict.fromkeys((*self._earlier, *self._seconds))}

    def split(self) -> dict[str, float]:
        """Seconds per timer of this process in the order of PARTS; "other" is the time outside all timers."""
        elapsed = self._clock() - self._began
        found = {name: self._here(name) for name in dict.fromkeys((*PARTS, *self._seconds)) if name in self._seconds}
        return {**found, "other": max(elapsed - sum(found.values()), 0.0)}


def split_line(split: Mapping[str, float]) -> str:
    """A split in one line: the total first; parts that round to zero are left out."""
    words = [f"{PARTS.get(name, name)} {seconds:.1f}" for name, seconds in split.items() if seconds >= 0.05]
    return f"{sum(split.values()):.1f} s" + (f": {', '.join(words)}" if words else "")


def split_in_words(status: Mapping[str, Any]) -> str:
    """The split in a status, with the total training time where earlier processes contributed; empty without one."""
    wall, clock = status.get("wall"), status.get("clock")
    if not isinstance(wall, dict) or not wall or not all(isinstance(v, int | float) for v in wall.values()):
        return ""
    trained = clock.get("train") if isinstance(clock, dict) else None
    more = isinstance(trained, int | float) and trained > wall.get("train", 0.0) + 0.05
    return split_line(wall) + (f"; train {trained:.1f} with earlier starts" if more else "")


def mark_command() -> None:
    """Record that this process serves one command: its first run counts from the process's creation."""
    global _command_start
    _command_start = process_start()


def take_command_start() -> float:
    """When the command of this run began; for a later run in the same process, now."""
    global _command_start
    found, _command_start = _command_start, None
    return time.monotonic() if found is None else found


def process_start() -> float:
    """When this process was created, on the scale of `time.monotonic`; elsewhere than on Linux, when this module was loaded."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return _IMPORTED
    # A sandbox may count ticks from another origin: an impossible age is ignored.
    known = time.monotonic() - _IMPORTED
    return time.monotonic() - age if known - 0.02 <= age <= known + 60.0 else _IMPORTED


def memory_bytes(device: "torch.device") -> int:
    """Peak memory of this process: device memory on CUDA, host memory elsewhere."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Meter:
    """Turns counters into rates between two readings. MFU is left out where the peak is unknown."""

    def __init__(self, flops_per_item: float, device: "torch.device", precision: str) -> None:
        import torch

        self.flops, self.device = flops_per_item, device
        self.nominal = self.measured = None
        if device.type == "cuda" and precision in ("bf16", "fp16") and flops_per_item:
            from seedbed.track.flops import measured_peak, nominal_peak

            self.nominal = nominal_peak(torch.cuda.get_device_name(device))
            self.measured = measured_peak(device)
        self._last = (0, 0.0, 0.0)

    def start(self, items: int, seconds: float, wait: float) -> None:
        """Start counting here: earlier steps belong to another process or to the warm-up."""
        self._last = (items, seconds, wait)

    def read(self, items: int, seconds: float, wait: float) -> dict[str, float]:
        """Rates since the last reading, given totals of items, training seconds and seconds blocked on data."""
        last_items, last_seconds, last_wait = self._last
        self._last = (items, seconds, wait)
        elapsed = seconds - last_seconds
        out = {"seconds": round(seconds, 4), "memory": memory_bytes(self.device)}
        if elapsed <= 0 or items <= last_items:
            return out
        rate = (items - last_items) / elapsed
        out |= {"items_per_s": round(rate, 2), "wait": round(max(wait - last_wait, 0.0) / elapsed, 4)}
        for name, peak in (("mfu", self.nominal), ("mfu_measured", self.measured)):
            if peak:
                out[name] = round(rate * self.flops / peak, 4)
        return out
