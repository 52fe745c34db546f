"""Drills of what stands beside a run: services that mirror it, and other ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.drills import faults
from seedbed.drills.lab import Child, Failed, Lab, NotRun, Tally, line_with, near, training
from seedbed.track.mirrors import base, choose
from seedbed.track.mirrors.base import Sink


class Absorbing(Sink):
    """A service that takes everything and keeps nothing; the others are this one with a fault."""

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
    """The network goes in the middle of the run."""

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
    """In the run: the named mirror is this service, and the end waits for it a second."""
    choose._require = lambda choice: None
    choose._kind = lambda name: kind
    base.SECONDS = 1.0


def mirrors(lab: Lab, tally: Tally) -> None:
    """A mirror (W&B, TensorBoard, ...) that is out of reach, raises, loses the network, hangs or is slow; one not installed."""
    lab.train("straight")
    for kind in KINDS if not lab.short else KINDS[2:5]:
        name, start = kind.__name__.lower(), time.monotonic()
        said = lab.run(*training(name), "--mirror", "tensorboard", fault=lambda kind=kind: _mirror_by(kind))
        tally.saw(line_with(said, "mirror " + kind.__name__.lower()).removeprefix("warning: "))
        lab.same_end("straight", name)
        if time.monotonic() - start > 30:
            raise Failed(f"{name}: the run waited for its mirror")
    said = lab.run(*training("absent"), "--mirror", "trackio", fault=_uninstall, code=2)
    tally.saw(line_with(said, "not installed").removeprefix("seedbed: "))
    tally.exact = "yes"


def _uninstall() -> None:
    import importlib.util

    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "trackio" else real(name, package)


# Long enough that something can happen to it, and nothing that depends on how a batch is cut.
TOGETHER = ("model.dropout=0.0", "steps=96", "every.save=8")


def ranks(lab: Lab, tally: Tally) -> None:
    """One of two ranks under torchrun is killed: all stop, the run resumes; then 1 rank, 2 ranks and 1 rank take turns."""
    if not Path("/proc/self/environ").exists():
        raise NotRun("it finds a rank by its environment under /proc, which this system lacks")
    lab.train("straight", *TOGETHER)
    # Begun alone: torchrun takes the word --run, which names a new run, for an option of its own.
    lab.train("killed", *TOGETHER, fault=faults.at_step(4, faults.send(signal.SIGTERM)), code=143)
    child = lab.start_fresh("resume", "killed", "dist.replicate=2", num_ranks=2)
    _until_step(lab, child, "killed", 20)
    os.kill(_rank(child.pid, 1), signal.SIGKILL)
    if not lab.wait(child):
        raise Failed("torchrun ended well although a rank was killed")
    tally.saw("torchrun stops the other rank and ends with an error; the run resumes at its newest checkpoint")
    _go_on(lab, "killed", 2)
    near(lab, "straight", "killed", 1e-5)
    lab.train("turns", *TOGETHER, fault=faults.at_step(20, faults.send(signal.SIGTERM)), code=143)
    child = lab.start_fresh("resume", "turns", "dist.replicate=2", num_ranks=2)
    _until_step(lab, child, "turns", 44)
    os.kill(_rank(child.pid, 1), signal.SIGTERM)
    lab.wait(child)
    if lab.status("turns") != "interrupted" or lab.newest("turns").step >= 96:
        raise Failed(f"two ranks that were asked to stop left {lab.status('turns')}")
    lab.resume("turns", "dist.replicate=1")
    near(lab, "straight", "turns", 1e-5)
    tally.saw("a signal to one rank is heeded by all at the same step")
    tally.exact = "same batch, other sums: losses within 1e-5"


def _go_on(lab: Lab, name: str, num_ranks: int) -> None:
    child = lab.start_fresh("resume", name, num_ranks=num_ranks)
    if lab.wait(child):
        raise Failed(f"{name} could not be resumed by {num_ranks} ranks: {child.said()[-300:]}")


def _until_step(lab: Lab, child: Child, name: str, step: int) -> None:
    rows = lab.run_folder(name) / "rows.jsonl"
    lab.until(lambda: child.poll() is not None or (rows.exists() and rows.read_bytes().count(b"\n") >= step), child, "to train")
    if child.poll() is not None:
        raise Failed(f"{name} ended too early: {child.said()[-300:]}")


def _rank(torchrun: int, rank: int) -> int:
    """The process that is this rank among the children of a torchrun."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            facts = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and b"RANK=%d" % rank in facts:
                return int(path.parent.name)
    raise Failed(f"torchrun has no rank {rank}")
