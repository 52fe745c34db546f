"""Mirrors: copies of a run in W&B, TensorBoard, trackio or MLflow, sent from background threads that training never waits for.

A run without mirrors loads nothing beyond this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from seedbed.track.run import Run

if TYPE_CHECKING:
    from seedbed.report.mirrors.choose import Choice

MEMORY = "mirrors.json"


def read_choices(text: str) -> tuple[Choice, ...]:
    """The mirrors that `--mirror` names."""
    if not text:
        return ()
    from seedbed.report.mirrors import choose

    return choose.read(text)


def keep(run: Run, choices: Sequence[Choice]) -> None:
    """Record in the run's folder which mirrors it has."""
    if choices or (run.path / MEMORY).exists():
        from seedbed.report.mirrors import choose

        choose.keep(run, choices)


def mirrored(run: Run, say: Callable[[str], None], warn: Callable[[str], None]) -> AbstractContextManager[None]:
    """While the block runs, rows and events of the run go to its mirrors too."""
    if not (run.path / MEMORY).exists():
        return nullcontext()
    from seedbed.report.mirrors import choose

    return choose.mirrored(run, say, warn)
