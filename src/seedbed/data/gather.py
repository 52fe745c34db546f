"""Long rows (images) gathered one by one into memory for whole batches; and arrays that are kept on the device.

There the host only sends row numbers. B items of a step, b items of a micro-batch.
"""

import warnings
from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from seedbed.data.feed import Locator, Source, row_bytes, torch_dtype

_ALIGN = 64
# Buffers for vectors in transfer to the device: enough that the host never waits for one before it waits for a measurement.
NUM_VECTORS = 32


def words(array: np.ndarray) -> Tensor:
    """The rows as (num_rows, n) of the widest integer that fits: few wide loads, and a type that every kernel supports."""
    size = next(s for s in (8, 4, 2, 1) if row_bytes(array) % s == 0 and array.ctypes.data % s == 0)
    wide = array.reshape(len(array), -1).view(f"i{size}")
    with warnings.catch_warnings():
        # Memory-mapped arrays are read-only, and nothing here writes to them.
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(wide)


class HostRows:
    """Long rows in memory, gathered with all of torch's threads; `fill` copies windows into memory prepared by `target`."""

    def __init__(self, array: np.ndarray, span: int):
        assert array.flags.c_contiguous, "rows must be contiguous"
        self.rows, self.steps = words(array), np.arange(max(1, span))

    def target(self, memory: Tensor) -> Tensor:
        """A batch's bytes in the form that `fill` writes."""
        return memory.view(self.rows.dtype).view(-1, self.rows.shape[1])

    def fill(self, start_B: np.ndarray, target: Tensor) -> None:
        index = (start_B[:, None] + self.steps).ravel()
        torch.index_select(self.rows, 0, torch.from_numpy(index), out=target)


class Slot:
    """Memory for one batch: all arrays and the sample counters in one block, so that one copy transfers it."""

    def __init__(self, arrays: Mapping[str, np.ndarray], spans: Mapping[str, int], batch: int, device: torch.device, pin: bool):
        shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {"index": ((batch,), np.dtype(np.int64))}
        for name, array in arrays.items():
            window = (spans[name],) if spans[name] else ()
            shapes[name] = ((batch, *window, *array.shape[1:]), array.dtype)
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        total = sum(-(-size // _ALIGN) * _ALIGN for size in sizes.values())
        if device.type == "cpu" and not pin:
            # numpy asks for huge pages; writing now moves the page faults out of the first step.
            self.memory = torch.from_numpy(np.full(total, 0, np.uint8))
        else:
            self.memory = torch.zeros(total, dtype=torch.uint8, device=device, pin_memory=pin)
        self.bytes: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        start = 0
        for name, (shape, dtype) in shapes.items():
            self.bytes[name] = self.memory[start : start + sizes[name]]
            self.values[name] = self.bytes[name].view(torch_dtype(dtype)).view(shape)
            start += -(-sizes[name] // _ALIGN) * _ALIGN
        self.host_index = self.values["index"].numpy() if device.type == "cpu" else np.empty(0)


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
