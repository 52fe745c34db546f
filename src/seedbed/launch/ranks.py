"""Ranks of one run: joining the process group, and the run folder and console of non-primary ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from seedbed.config import Config
from seedbed.dist import Ranks
from seedbed.dist.join import join, require_settings
from seedbed.track.console import Console
from seedbed.track.run import Run


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the process group of the run; a single rank unless the config asks for more."""
    require_settings(config)
    ranks = join(config.dist, config.device)
    yield ranks
    ranks.close()  # not after an error: the other ranks may not respond


class NonPrimaryRun(Run):
    """The run folder on non-primary ranks: read-only except for checkpoints."""

    def row(self, values: dict[str, Any]) -> None: ...

    def event(self, step: int, kind: str, **facts: Any) -> None: ...

    def set_status(self, status: str, **facts: Any) -> None: ...

    def change_config(self, config: Any, base: Any = None, history: list[dict[str, Any]] | None = None) -> None: ...

    def rewind(self, step: int, *, events: bool = True) -> None: ...


def null_console() -> Console:
    """A console that discards everything; only the primary rank prints."""
    return Console(stream=open(os.devnull, "w"))
