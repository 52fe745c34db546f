"""Ranks of one run: joining the others, what they cannot do together, and the ranks that stand beside the first one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from seedbed.config import Config
from seedbed.dist.ranks import Ranks, join
from seedbed.errors import UserError
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train.system import System


@contextlib.contextmanager
def joined(config: Config) -> Iterator[Ranks]:
    """This process among those that train the run; alone unless the config asks for more."""
    if config.dist.world > 1 and config.device == "mps":
        raise UserError("device=mps is one device without others to talk to; use dist.replicate=1 dist.shard=1")
    ranks = join(config.dist, config.device)
    yield ranks
    ranks.leave()  # not after an error: the others may never answer


class Beside(Run):
    """The run's folder as ranks other than the first see it: they read, and write nothing but checkpoints."""

    def row(self, values: dict[str, Any]) -> None: ...

    def event(self, step: int, kind: str, **facts: Any) -> None: ...

    def set_status(self, status: str, **facts: Any) -> None: ...

    def change_config(self, config: Any, base: Any = None) -> None: ...

    def rewind(self, step: int, *, events: bool = True) -> None: ...


def silence() -> Console:
    """A console that nobody reads: one rank speaks for all."""
    return Console(stream=open(os.devnull, "w"))


# Settings that weights cut into pieces cannot have, and why.
_NOT_CUT = {
    "compile": ("whole", "a step is compiled block by block between the gatherings; use compile=blocks"),
    "compile_autograd": (True, "pieces travel in the middle of the backward pass"),
    "compile_optimizer": (True, "its code would be compiled for whole tensors"),
    "float8": (True, "torchao's layers gather their weights in a way of their own"),
}


def require_possible(system: System, config: Config, ranks: Ranks) -> None:
    """Refuse in one line what cannot be spread over ranks, naming it and the reason."""
    if config.dist.world != ranks.world:
        raise UserError(f"dist.replicate x dist.shard = {config.dist.world}, but this work is done by one process; set both to 1")
    if ranks.is_alone:
        return
    if why := system.why_one_rank():
        raise UserError(f"this run cannot be spread over {ranks.world} ranks: {why}")
    if ranks.degrees.shard == 1:
        return
    for key, (value, why) in _NOT_CUT.items():
        if getattr(config, key) == value:
            raise UserError(f"{key}={str(value).lower()} does not go with dist.shard={ranks.degrees.shard}: {why}")
    if len(system.players()) > 1:
        names = ", ".join(system.players())
        raise UserError(
            f"dist.shard={ranks.degrees.shard}: this system's players ({names}) descend one after another in a step, and FSDP2 "
            f"lets go of the weights after the first; use dist.replicate={ranks.world}"
        )
