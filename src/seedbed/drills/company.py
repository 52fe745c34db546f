"""Drills of what stands beside a run: services that mirror it, and other ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.drills.lab import Failed, Lab, NotRun, Tally, line_with, training
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


def ranks(lab: Lab, tally: Tally) -> None:
    """One of two ranks is killed: all stop, and the run resumes; then 1 rank becomes 2 and 1 again."""
    raise NotRun("ranks have not been joined to the launcher yet")
