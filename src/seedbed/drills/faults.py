"""Faults: functions that, called in a run's process, patch what will fail there."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import torch

from seedbed.data import feed, prefetch
from seedbed.drills.sandbox import Fault
from seedbed.recipes import Recipe
from seedbed.track import files
from seedbed.train import loop
from seedbed.train.engine import Engine
from seedbed.train.system import System

P = ParamSpec("P")


def fault(inject: Callable[P, object]) -> Callable[P, Fault]:
    """Decorates a function that injects a fault: called with its arguments, it returns the fault, to be called in the run."""
    return lambda *given, **named: lambda: inject(*given, **named)


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replaces a function of a module or class by the decorated one, which is called with the original first."""

    def install(wrapper: Callable[..., Any]) -> None:
        real = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: wrapper(real, *given, **named))

    return install


@fault
def at_step(step: int, act: Callable[[loop.Job], object]) -> None:
    """Calls `act(job)` just before step number `step`; not again after a rollback."""
    done = False

    @wrap(loop, "take_step")
    def take(real: Any, job: loop.Job) -> None:
        nonlocal done
        if job.step + 1 == step and not done:
            done = True
            act(job)
        real(job)


def send(number: int) -> Callable[[loop.Job], None]:
    return lambda job: os.kill(os.getpid(), number)


def fail(error: BaseException) -> NoReturn:
    """Raises, as an expression."""
    raise error


def hang(job: loop.Job) -> None:
    while True:
        time.sleep(1.0)


class OpenFiles:
    """The paths of file descriptors of the write layer, and the files that it created."""

    def __init__(self) -> None:
        self.paths: dict[int, Path] = {}
        self.new: set[str] = set()
        for name in ("open_write", "open_append"):
            wrap(files, name)(self._open)

    def _open(self, real: Callable[[Path], int], path: Path) -> int:
        if not path.exists():
            self.new.add(str(path))
        fd = real(path)
        self.paths[fd] = path
        return fd


@fault
def disk_full(*names: str, from_step: int = 1, to_step: int = 10**9) -> None:
    """ENOSPC for paths that contain one of these names, between two steps."""
    open_files, step = OpenFiles(), _follow_steps()

    @wrap(files, "write")
    def write(real: Any, fd: int, data: bytes) -> None:
        path = str(open_files.paths.get(fd, ""))
        if from_step <= step[0] <= to_step and any(name in path for name in names):
            real(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        real(fd, data)


def _follow_steps() -> list[int]:
    """The number of the current step, kept up to date."""
    step = [0]

    @wrap(loop, "take_step")
    def take(real: Any, job: loop.Job) -> None:
        step[0] = job.step + 1
        real(job)

    return step


class WriteCounter:
    """Counts bytes written and calls that rename or sync; kills the process at such a byte, or before a call."""

    def __init__(self, at_byte: int = 1 << 62, at_call: int = 1 << 62) -> None:
        self.num_bytes = self.num_calls = 0
        self.at_byte, self.at_call = at_byte, at_call
        wrap(files, "write")(self._write)
        for name in ("fsync", "replace", "sync_folder"):
            wrap(files, name)(self._call)

    def _write(self, real: Callable[[int, bytes], None], fd: int, data: bytes) -> None:
        room = self.at_byte - self.num_bytes
        if len(data) > room:
            real(fd, data[:room])
            die()
        real(fd, data)
        self.num_bytes += len(data)

    def _call(self, real: Callable[..., None], *given: Any) -> None:
        self.num_calls += 1
        if self.num_calls > self.at_call:
            die()
        real(*given)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal may take an instant to arrive


@fault
def out_of_memory(limit: int, from_step: int) -> None:
    """From a step on, memory suffices for `limit` items at a time."""
    step = _follow_steps()

    @wrap(Engine, "_update")
    def update(real: Any, engine: Engine, batch: Any, part: int) -> Any:
        if step[0] >= from_step and len(next(iter(batch.values()))) > limit:
            real(engine, batch, -1)  # forward and backward run before memory runs out
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB (injected)")
        return real(engine, batch, part)


@torch.no_grad()
def corrupt_weight(job: loop.Job) -> None:
    next(iter(job.engine.tensors()["model"].values())).view(-1)[0] = float("nan")


@torch.no_grad()
def corrupt_moment(job: loop.Job) -> None:
    optim = job.engine.tensors()["optim"]
    name = next(n for n, t in optim.items() if t.ndim > 1)
    optim[name].view(-1)[0] = float("nan")


@fault
def corrupt_input(step: int, num_steps: int) -> None:
    """At one step, in training and in replay, the embedded batch is not finite."""
    factor = _factor_at_step(step, num_steps)
    wrap(torch.nn.Embedding, "forward")(lambda real, *given: real(*given) * factor[0])


@fault
def corrupt_gradient(step: int, num_steps: int) -> None:
    """At one step, in training and in replay, a parameter's gradient is not finite."""
    factor = _factor_at_step(step, num_steps)

    @wrap(Recipe, "build")
    def build(real: Any, *given: Any) -> System:
        system = real(*given)
        param = next(p for name, p in system.named_parameters() if "mlp" in name)
        param.register_hook(lambda grad: grad * factor[0])
        return system


def _factor_at_step(step: int, num_steps: int) -> list[float]:
    """NaN at one step, identified by the run's progress; 1 at all others."""
    factor = [1.0]

    @wrap(Engine, "begin")
    def begin(real: Any, engine: Engine, taken: int, progress: float, *lr_factor: float) -> None:
        factor[0] = float("nan") if abs(progress * num_steps - step) < 0.1 else 1.0
        real(engine, taken, progress, *lr_factor)

    return factor


@fault
def thread_reads(fill: Callable[[int], None]) -> None:
    """Makes the data too large for memory, so that a thread reads it; `fill` is called there with every counter."""
    feed.room = lambda device: 0
    prefetch.TIMEOUT = 2.0

    @wrap(prefetch.Mapped, "_read")
    def read(real: Any, self: Any, counter: int, slot: int) -> None:
        fill(counter)
        real(self, counter, slot)


@fault
def thread_dies(counter: int) -> None:
    """The reading thread dies silently before it delivers the samples from `counter` on."""
    delivered = 0

    @wrap(prefetch.Prefetch, "_deliver")
    def deliver(real: Any, self: Any, *given: Any) -> None:
        nonlocal delivered
        if delivered >= counter:
            raise SystemExit
        delivered += self._step
        real(self, *given)
