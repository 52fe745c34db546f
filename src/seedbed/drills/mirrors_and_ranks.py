"""Drills of mirror services and of other ranks."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from seedbed.drills import faults
from seedbed.drills.sandbox import DrillResult, Failed, NotRun, Sandbox, line_with, require_close, training
from seedbed.report.mirrors import base, choose
from seedbed.report.mirrors.base import Sink


def _service(name: str, method: str, fault: Callable[..., object]) -> type[Sink]:
    """A service that accepts everything, with a fault in one method."""
    methods = dict.fromkeys(("open", "numbers", "text", "media", "close"), lambda self, *given: None)
    return type(name, (Sink,), methods | {method: lambda self, *given: fault(*given)})


SERVICES = (
    _service("Unreachable", "open", lambda config: faults.fail(ConnectionError("no route to host"))),
    _service("Raising", "numbers", lambda *given: faults.fail(RuntimeError("HTTP 500"))),
    # The network fails in the middle of the run.
    _service("Lost", "numbers", lambda step, *_: step > 20 and faults.fail(ConnectionError("connection reset by peer"))),
    _service("Hanging", "numbers", lambda *given: time.sleep(3600)),
    _service("HangingAtStart", "open", lambda config: time.sleep(3600)),
    _service("Slow", "numbers", lambda *given: time.sleep(0.5)),
    _service("HangingAtEnd", "close", lambda status: time.sleep(3600)),
)


def _mirror_by(kind: type[Sink]) -> None:
    """In the run: makes this service the mirror, and limits the final wait to a second."""
    choose._require = lambda choice: None
    choose._kind = lambda name: kind
    base.SECONDS = 1.0


def mirrors(sandbox: Sandbox, result: DrillResult) -> None:
    """A mirror (W&B, TensorBoard, ...) is unreachable, raises, loses the network, hangs, is slow or is not installed."""
    sandbox.train("straight")
    for kind in SERVICES[2:5] if sandbox.short else SERVICES:
        name, start = kind.__name__.lower(), time.monotonic()
        output = sandbox.run(*training(name), "--mirror", "tensorboard", fault=lambda kind=kind: _mirror_by(kind))
        result.add(line_with(output, f"mirror {name}").removeprefix("warning: "))
        sandbox.require_same_end("straight", name)
        if time.monotonic() - start > 30:
            raise Failed(f"{name}: the run waited for its mirror")
    output = sandbox.run(*training("absent"), "--mirror", "trackio", fault=_uninstall, code=2)
    result.add(line_with(output, "not installed").removeprefix("seedbed: "))


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
    os.kill(_second_rank(child.pid), signal.SIGKILL)
    if not sandbox.wait(child):
        raise Failed("torchrun ended well although a rank was killed")
    result.add("torchrun stops the other rank and ends with an error; the run resumes at its newest checkpoint")
    child = sandbox.start_fresh("resume", "killed", num_ranks=2)
    if sandbox.wait(child):
        raise Failed(f"killed could not be resumed by 2 ranks: {child.output()[-300:]}")
    require_close(sandbox, "straight", "killed", 1e-5)
    sandbox.train("turns", *TOGETHER, fault=faults.at_step(20, faults.send(signal.SIGTERM)), code=143)
    child = sandbox.start_fresh("resume", "turns", "dist.replicate=2", num_ranks=2)
    sandbox.wait_for_rows(child, "turns", 44)
    os.kill(_second_rank(child.pid), signal.SIGTERM)
    sandbox.wait(child)
    if sandbox.status("turns") != "interrupted" or sandbox.newest("turns").step >= 96:
        raise Failed(f"two ranks that were asked to stop left {sandbox.status('turns')}")
    sandbox.resume("turns", "dist.replicate=1")
    require_close(sandbox, "straight", "turns", 1e-5)
    result.add("a signal to one rank stops all at the same step")


def _second_rank(torchrun: int) -> int:
    """The process of rank 1 among the children of torchrun."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and b"RANK=1" in path.read_bytes().split(b"\0"):
                return int(path.parent.name)
    raise Failed("torchrun has no rank 1")
