"""Faults: functions that, called in a run's process, patch what will fail there."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from seedbed.data import feed, prefetch
from seedbed.drills.sandbox import Fault
from seedbed.recipes import Recipe
from seedbed.track import files
from seedbed.train import loop
from seedbed.train.engine import Engine
from seedbed.train.system import System


def at_step(step: int, act: Callable[[loop.Job], object], times: int = 1) -> Fault:
    """Calls `act(job)` just before step number `step`, the first `times` times."""

    def inject() -> None:
        real, left = loop.take_step, [times]

        def take(job: loop.Job) -> None:
            if job.step + 1 == step and left[0]:
                left[0] -= 1
                act(job)
            real(job)

        loop.take_step = take

    return inject


def send(number: int) -> Callable[[loop.Job], None]:
    """Sends a signal to the run itself."""
    return lambda job: os.kill(os.getpid(), number)


def fail(error: BaseException) -> NoReturn:
    """Raises, as an expression."""
    raise error


def hang(job: loop.Job) -> None:
    """A step that never ends."""
    while True:
        time.sleep(1.0)


# ---- the disk --------------------------------------------------------------------------------------------------------


class OpenFiles:
    """The paths of file descriptors of the write layer, and the files that it created."""

    def __init__(self) -> None:
        self.paths: dict[int, Path] = {}
        self.new: set[str] = set()
        for name in ("open_write", "open_append"):
            setattr(files, name, self._noting(getattr(files, name)))

    def _noting(self, real: Callable[[Path], int]) -> Callable[[Path], int]:
        def open_and_note(path: Path) -> int:
            if not path.exists():
                self.new.add(str(path))
            fd = real(path)
            self.paths[fd] = path
            return fd

        return open_and_note


def disk_full(*names: str, from_step: int = 1, to_step: int = 10**9) -> Fault:
    """ENOSPC for paths that contain one of these names, between two steps."""

    def inject() -> None:
        open_files, real, job_step = OpenFiles(), files.write, [0]

        def write(fd: int, data: bytes) -> None:
            path = str(open_files.paths.get(fd, ""))
            if from_step <= job_step[0] <= to_step and any(name in path for name in names):
                real(fd, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            real(fd, data)

        files.write = write
        _follow_steps(job_step)

    return inject


def _follow_steps(step: list[int]) -> None:
    real = loop.take_step

    def take(job: loop.Job) -> None:
        step[0] = job.step + 1
        real(job)

    loop.take_step = take


class WriteCounter:
    """Counts bytes written and calls that rename or sync."""

    def __init__(self) -> None:
        self.num_bytes = self.num_calls = 0
        self._write = files.write
        files.write = self.write
        for name in ("fsync", "replace", "sync_folder"):
            setattr(files, name, self._counted(getattr(files, name)))

    def write(self, fd: int, data: bytes) -> None:
        self._write(fd, data)
        self.num_bytes += len(data)

    def before_call(self) -> None:
        """Called before a sync or a rename."""
        self.num_calls += 1

    def _counted(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any) -> None:
            self.before_call()
            real(*given)

        return call


class KillTrap(WriteCounter):
    """Kills the process at a byte written, or before a call of the write layer."""

    def __init__(self, at_byte: int = 1 << 62, at_call: int = 1 << 62) -> None:
        super().__init__()
        self.at_byte, self.at_call = at_byte, at_call

    def write(self, fd: int, data: bytes) -> None:
        room = self.at_byte - self.num_bytes
        if len(data) > room:
            self._write(fd, data[:room])
            die()
        super().write(fd, data)

    def before_call(self) -> None:
        super().before_call()
        if self.num_calls > self.at_call:
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal may take an instant to arrive


# ---- memory and numbers ----------------------------------------------------------------------------------------------


def out_of_memory(limit: int, from_step: int) -> Fault:
    """From a step on, memory suffices for `limit` items at a time."""

    def inject() -> None:
        real, step = Engine._update, [0]
        _follow_steps(step)

        def update(self: Engine, batch: Any, part: int) -> Any:
            if step[0] >= from_step and len(next(iter(batch.values()))) > limit:
                real(self, batch, -1)  # forward and backward run before memory runs out
                raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB (injected)")
            return real(self, batch, part)

        Engine._update = update

    return inject


@torch.no_grad()
def corrupt_weight(job: loop.Job) -> None:
    next(iter(job.engine.tensors()["model"].values())).view(-1)[0] = float("nan")


@torch.no_grad()
def corrupt_moment(job: loop.Job) -> None:
    optim = job.engine.tensors()["optim"]
    name = next(n for n, t in optim.items() if t.ndim > 1)
    optim[name].view(-1)[0] = float("nan")


def corrupt_input(step: int, num_steps: int) -> Fault:
    """At one step, in training and in replay, the embedded batch is not finite."""

    def plant(system: System, due: list[bool]) -> None:
        module = next(m for m in system.modules() if isinstance(m, torch.nn.Embedding))
        module.register_forward_hook(lambda _module, _given, out: out * float("nan") if due[0] else out)

    return _inject_at_step(step, num_steps, plant)


def corrupt_gradient(step: int, num_steps: int) -> Fault:
    """At one step, in training and in replay, a parameter's gradient is not finite."""

    def plant(system: System, due: list[bool]) -> None:
        param = next(p for name, p in system.named_parameters() if "mlp" in name)
        param.register_hook(lambda grad: grad * float("nan") if due[0] else grad)

    return _inject_at_step(step, num_steps, plant)


def _inject_at_step(step: int, num_steps: int, plant: Callable[[System, list[bool]], None]) -> Fault:
    """Every system built from now on has a fault at one step, identified by the run's progress."""

    def inject() -> None:
        real = Recipe.build

        def build(self: Recipe, config: Any, data: Any) -> System:
            system, due = real(self, config, data), [False]
            update: Any = system.update

            def watched(batch: Any, engine: Engine) -> Any:
                due[0] = abs(float(engine.progress) * num_steps - step) < 0.1
                return update(batch, engine)

            system.update = watched
            plant(system, due)
            return system

        Recipe.build = build

    return inject


# ---- data ------------------------------------------------------------------------------------------------------------


def thread_reads(fill: Callable[[int], None]) -> Fault:
    """Makes the data too large for memory, so that a thread reads it; `fill` is called there with every counter."""

    def inject() -> None:
        feed.room = lambda device: 0
        prefetch.TIMEOUT = 2.0
        real = prefetch.Reader.fill

        def read(self: Any, counter: int, slot: int) -> None:
            fill(counter)
            real(self, counter, slot)

        prefetch.Reader.fill = read

    return inject


def thread_dies(counter: int) -> Fault:
    """The reading thread dies silently before it delivers the samples from `counter` on."""

    def inject() -> None:
        real = prefetch.Prefetch._deliver
        delivered = [0]

        def deliver(self: Any, slot: int, generation: int, error: BaseException | None) -> None:
            if delivered[0] >= counter:
                raise SystemExit
            delivered[0] += self._step
            real(self, slot, generation, error)

        prefetch.Prefetch._deliver = deliver

    return inject
