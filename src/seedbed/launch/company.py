"""Ranks of one run: joining the others, what they cannot do together, and the ranks that stand beside the first one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from seedbed.config import Config
from seedbed.dist.limits import require_settings
from seedbed.dist.ranks import Ranks, join
from seedbed.track.console import Console
from seedbed.track.run import Run


@contextlib.contextmanager
def joined(config: Config) -> Iterator[Ranks]:
    """This process among those that train the run; alone unless the config asks for more."""
    require_settings(config)
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
