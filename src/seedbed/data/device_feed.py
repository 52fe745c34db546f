"""Arrays that are kept on the device: per step the host only sends row numbers. B items of a step, b items of a micro-batch."""

import numpy as np
import torch
from torch import Tensor

from seedbed.data.feed import Locator, Source, torch_dtype
from seedbed.data.gather import words

# Buffers for vectors in transfer to the device: enough that the host never waits for one before it waits for a measurement.
NUM_VECTORS = 32


class Resident:
    """Arrays on the device: per step the host only copies row numbers, through a ring of buffers guarded by events."""

    def __init__(self, source: Source, locator: Locator, parts: int, device: torch.device):
        self.name = "device" if source.arrays else "generated"
        self.wait = 0.0
        self.rows = {name: DeviceRows(array, source.spans[name], device) for name, array in source.arrays.items()}
        self.locator, self.turn = locator, 0
        self.cuda = device.type == "cuda"
        shape = (2, locator.batch)
        self.static_2B = torch.zeros(shape, dtype=torch.int64, device=device)
        self.divide(parts)
        self.vectors = [torch.zeros(shape, dtype=torch.int64, pin_memory=self.cuda) for _ in range(NUM_VECTORS)]
        self.hosts = [vector.numpy() for vector in self.vectors]
        self.events = [torch.cuda.Event() for _ in self.vectors] if self.cuda else []

    def load(self, counter: int) -> None:
        self.turn = (self.turn + 1) % NUM_VECTORS
        if self.cuda:
            self.events[self.turn].synchronize()
        host_2B = self.hosts[self.turn]
        if self.rows:
            host_2B[0] = self.locator.rows(counter)
        np.add(self.locator.steps_B, counter, out=host_2B[1])
        self.static_2B.copy_(self.vectors[self.turn], non_blocking=self.cuda)
        if self.cuda:
            self.events[self.turn].record()

    def divide(self, parts: int) -> None:
        self.parts = [tuple(part.unbind()) for part in self.static_2B.chunk(parts, dim=1)]

    def raw(self, k: int) -> dict[str, Tensor]:
        start_b, index_b = self.parts[k]
        return {"index": index_b, **{name: rows.gather(start_b) for name, rows in self.rows.items()}}

    def close(self) -> None:
        self.rows = {}


class DeviceRows:
    """An array on the device; `gather` needs no host and can be captured in a CUDA graph."""

    def __init__(self, array: np.ndarray, span: int, device: torch.device):
        self.rows = words(array).to(device)
        self.dtype = torch_dtype(array.dtype)
        self.steps = torch.arange(max(1, span), device=device)
        self.shape = ((span,) if span else ()) + array.shape[1:]

    def gather(self, start_B: Tensor) -> Tensor:
        index = (start_B[:, None] + self.steps).flatten()
        return self.rows.index_select(0, index).view(self.dtype).view(len(start_B), *self.shape)
