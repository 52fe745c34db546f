"""Drills of mirror services and of other ranks."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.drills import faults
from seedbed.drills.sandbox import DrillResult, Failed, NotRun, Sandbox, line_with, require_close, training
from seedbed.report.mirrors import base, choose
from seedbed.report.mirrors.base import Sink


class Absorbing(Sink):
    """A service that accepts everything; the others add a fault to it."""

    def open(self, config: dict[str, Any]) -> None: ...

    def numbers(self, step: int, values: dict[str, float], when: float) -> None: ...

    def text(self, step: int, title: str, text: str) -> None: ...

    def media(self, step: int, paths: Sequence[Path]) -> None: ...

    def close(self, status: dict[str, Any]) -> None: ...


class Unreachable(Absorbing):
    def open(self, config: dict[str, Any]) -> None:
        raise ConnectionError("no route to host")


class Raising(Absorbing):
    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        raise RuntimeError("HTTP 500")


class Lost(Absorbing):
    """The network fails in the middle of the run."""

    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        if step > 20:
            raise ConnectionError("connection reset by peer")


class Hanging(Absorbing):
    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        time.sleep(3600)


class HangingAtStart(Absorbing):
    def open(self, config: dict[str, Any]) -> None:
        time.sleep(3600)


class Slow(Absorbing):
    def numbers(self, step: int, values: dict[str, float], when: float) -> None:
        time.sleep(0.5)


class HangingAtEnd(Absorbing):
    def close(self, status: dict[str, Any]) -> None:
        time.sleep(3600)


KINDS = (Unreachable, Raising, Lost, Hanging, HangingAtStart, Slow, HangingAtEnd)


def _mirror_by(kind: type[Sink]) -> None:
    """In the run: makes this service the mirror, and limits the final wait to a second."""
    choose._require = lambda choice: None
    choose._kind = lambda name: kind
    base.SECONDS = 1.0


def mirrors(sandbox: Sandbox, result: DrillResult) -> None:
    """A mirror (W&B, TensorBoard, ...) is unreachable, raises, loses the network, hangs, is slow or is not installed."""
    sandbox.train("straight")
    for kind in KINDS if not sandbox.short else KINDS[2:5]:
        name, start = kind.__name__.lower(), time.monotonic()
        output = sandbox.run(*training(name), "--mirror", "tensorboard", fault=lambda kind=kind: _mirror_by(kind))
        result.add(line_with(output, "mirror " + kind.__name__.lower()).removeprefix("warning: "))
        sandbox.require_same_end("straight", name)
        if time.monotonic() - start > 30:
            raise Failed(f"{name}: the run waited for its mirror")
    output = sandbox.run(*training("absent"), "--mirror", "trackio", fault=_uninstall, code=2)
    result.add(line_with(output, "not installed").removeprefix("seedbed: "))
    result.exact = "yes"


def _uninstall() -> None:
    import importlib.util

    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "trackio" else real(name, package)


# Long enough for a fault, and nothing that depends on how a batch is split.
TOGETHER = ("model.dropout=0.0", "steps=96", "every.save=8")


def ranks(sandbox: Sandbox, result: DrillResult) -> None:
    """One of two ranks under torchrun is killed: all stop and the run resumes; then 1, 2 and 1 ranks in turn."""
    if not Path("/proc/self/environ").exists():
        raise NotRun("it finds a rank by its environment under /proc, which this system lacks")
    sandbox.train("straight", *TOGETHER)
    # Started on one rank: torchrun would take --run as its own option.
    sandbox.train("killed", *TOGETHER, fault=faults.at_step(4, faults.send(signal.SIGTERM)), code=143)
    child = sandbox.start_fresh("resume", "killed", "dist.replicate=2", num_ranks=2)
    sandbox.wait_for_rows(child, "killed", 20)
    os.kill(_rank(child.pid, 1), signal.SIGKILL)
    if not sandbox.wait(child):
        raise Failed("torchrun ended well although a rank was killed")
    result.add("torchrun stops the other rank and ends with an error; the run resumes at its newest checkpoint")
    _go_on(sandbox, "killed", 2)
    require_close(sandbox, "straight", "killed", 1e-5)
    sandbox.train("turns", *TOGETHER, fault=faults.at_step(20, faults.send(signal.SIGTERM)), code=143)
    child = sandbox.start_fresh("resume", "turns", "dist.replicate=2", num_ranks=2)
    sandbox.wait_for_rows(child, "turns", 44)
    os.kill(_rank(child.pid, 1), signal.SIGTERM)
    sandbox.wait(child)
    if sandbox.status("turns") != "interrupted" or sandbox.newest("turns").step >= 96:
        raise Failed(f"two ranks that were asked to stop left {sandbox.status('turns')}")
    sandbox.resume("turns", "dist.replicate=1")
    require_close(sandbox, "straight", "turns", 1e-5)
    result.add("a signal to one rank stops all at the same step")
    result.exact = "same batch, other sums: losses within 1e-5"


def _go_on(sandbox: Sandbox, name: str, num_ranks: int) -> None:
    child = sandbox.start_fresh("resume", name, num_ranks=num_ranks)
    if sandbox.wait(child):
        raise Failed(f"{name} could not be resumed by {num_ranks} ranks: {child.output()[-300:]}")


def _rank(torchrun: int, rank: int) -> int:
    """The process of this rank among the children of torchrun."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            facts = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and b"RANK=%d" % rank in facts:
                return int(path.parent.name)
    raise Failed(f"torchrun has no rank {rank}")
