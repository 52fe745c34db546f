"""Checkpoints of several ranks, written behind the steps: a snapshot in host memory, then a thread that talks to the others'.

Never two at once: whoever saves next waits for the one before, and the end of a run for the last.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from seedbed.train import checkpoint

Tensors = dict[str, dict[str, Tensor]]


class Saver:
    """At most one checkpoint under way; `result` tells how it ended, in the calling thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.is_best = False

    @property
    def is_over(self) -> bool:
        """Whether a checkpoint has been written, or has failed, and nobody has asked for it yet."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def is_busy(self) -> bool:
        return self._thread is not None

    def start(
        self,
        folder: Path,
        step: int,
        tensors: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        part: checkpoint.Part,
        best: bool,
    ) -> None:
        """Copy everything to the host, and let a thread write it."""
        assert self._thread is None, "a checkpoint is under way"
        kept = {file: {n: t.detach().to("cpu", copy=True) for n, t in group.items()} for file, group in tensors.items()}
        self._path, self._error, self.is_best = None, None, best

        def write() -> None:
            try:
                self._path = checkpoint.save(folder, step, kept, state, part)
            except BaseException as error:  # raised again by `result`
                self._error = error

        self._thread = threading.Thread(target=write, name="seedbed-saver", daemon=True)
        self._thread.start()

    def result(self) -> Path:
        """Wait for the end of the checkpoint; its path, or the error that kept it from being written."""
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path
