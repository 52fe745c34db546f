"""Asynchronous checkpoints, for devices and several ranks: a thread writes them while training goes on."""

import copy
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seedbed.train import checkpoint

Tensors = dict[str, dict[str, Tensor]]
# A snapshot stays on the device where it takes at most this share of the memory that is free there.
SHARE_OF_FREE = 0.25


class Saver:
    """Asynchronous checkpoints: a snapshot, then a thread writes it; threads of several ranks communicate.

    There is at most one at a time: the next save, and the end of the run, wait for it. `result` returns or raises its outcome.
    """

    def __init__(self) -> None:
        self._pending: Future[Path] | None = None
        self.is_best = False

    @property
    def is_over(self) -> bool:
        """Whether a checkpoint has been written or has failed, and `result` was not called yet."""
        return self._pending is not None and self._pending.done()

    @property
    def is_busy(self) -> bool:
        return self._pending is not None

    def start(self, folder: Path, step: int, tensors: Tensors, state: dict[str, Any], part: checkpoint.Part, best: bool) -> None:
        """Copy everything, and start a thread that writes it."""
        assert self._pending is None, "a checkpoint is under way"
        state = copy.deepcopy(state)
        kept, copied = snapshot(tensors)
        self._pending, self.is_best = Future(), best
        written = self._pending

        def write() -> None:
            try:
                written.set_result(checkpoint.save(folder, step, to_host(kept, copied), state, part))
            except BaseException as error:  # raised again by `result`
                written.set_exception(error)

        threading.Thread(target=write, name="seedbed-saver", daemon=True).start()

    def result(self) -> Path:
        """Wait for the checkpoint; returns its path or raises the error."""
        assert self._pending is not None
        written, self._pending = self._pending, None
        return written.result()


def snapshot(tensors: Tensors) -> tuple[Tensors, torch.cuda.Event | None]:
    """Copies on the device, ready after the event, or on the host where the device has little memory left.

    A copy to the host keeps the device waiting until it is done; one beside the originals is queued as any kernel is.
    """
    found = {file: {name: tensor.detach() for name, tensor in group.items()} for file, group in tensors.items()}
    every = [tensor for group in found.values() for tensor in group.values()]
    devices = {tensor.device for tensor in every if tensor.is_cuda}
    if len(devices) != 1 or sum(t.nbytes for t in every) > SHARE_OF_FREE * torch.cuda.mem_get_info(*devices)[0]:
        return {file: {n: t.to("cpu", copy=True) for n, t in group.items()} for file, group in found.items()}, None
    kept = {file: {name: tensor.clone() for name, tensor in group.items()} for file, group in found.items()}
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(*devices))
    return kept, copied


def to_host(kept: Tensors, copied: torch.cuda.Event | None) -> Tensors:
    """The snapshot in host memory, by a stream of its own: beside the steps that the device takes meanwhile."""
    if copied is None:
        return kept
    device = next(tensor.device for group in kept.values() for tensor in group.values() if tensor.is_cuda)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda.current_stream(device).wait_event(copied)
        return {file: {name: tensor.to("cpu") for name, tensor in group.items()} for file, group in kept.items()}
