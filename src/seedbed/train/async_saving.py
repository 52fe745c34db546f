"""Asynchronous checkpoints, for devices and several ranks: a thread writes them while training goes on."""

import copy
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from seedbed.train import checkpoint


class Saver:
    """Asynchronous checkpoints: a snapshot in host memory, then `thread` writes it; threads of several ranks communicate.

    There is at most one at a time: the next save, and the end of the run, wait for it. `result` returns or raises its outcome.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.is_best = False

    @property
    def is_over(self) -> bool:
        """Whether a checkpoint has been written or has failed, and `result` was not called yet."""
        return self.thread is not None and not self.thread.is_alive()

    @property
    def is_busy(self) -> bool:
        return self.thread is not None

    def start(
        self,
        folder: Path,
        step: int,
        tensors: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        part: checkpoint.Part,
        best: bool,
    ) -> None:
        """Copy everything to the host, and start a thread that writes it."""
        assert self.thread is None, "a checkpoint is under way"
        state = copy.deepcopy(state)
        kept = {file: {n: t.detach().to("cpu", copy=True) for n, t in group.items()} for file, group in tensors.items()}
        self._path, self._error, self.is_best = None, None, best

        def write() -> None:
            try:
                self._path = checkpoint.save(folder, step, kept, state, part)
            except BaseException as error:  # raised again by `result`
                self._error = error

        self.thread = threading.Thread(target=write, name="seedbed-saver", daemon=True)
        self.thread.start()

    def result(self) -> Path:
        """Wait for the checkpoint; returns its path or raises the error."""
        assert self.thread is not None
        self.thread.join()
        self.thread = None
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path
