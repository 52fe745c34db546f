"""Long rows (images), gathered one by one, and memory for batches of them: all arrays of a batch in one block."""

import warnings
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seedbed.data.feed import is_long, row_bytes, torch_dtype

_ALIGN = 64


def words(array: np.ndarray) -> Tensor:
    """The rows as (num_rows, n) of the widest integer that fits: few wide loads, and a type that every kernel supports."""
    size = next(s for s in (8, 4, 2, 1) if row_bytes(array) % s == 0 and array.ctypes.data % s == 0)
    wide = array.reshape(len(array), -1).view(f"i{size}")
    with warnings.catch_warnings():
        # Memory-mapped arrays are read-only, and nothing here writes to them.
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(wide)


class HostRows:
    """An array on the host, perhaps memory-mapped; `fill` copies windows into memory prepared by `target`."""

    def __init__(self, array: np.ndarray, span: int, shared: bool):
        assert array.flags.c_contiguous, "rows must be contiguous"
        self.row, self.span, self.long = row_bytes(array), max(1, span), is_long(array, span)
        self.steps = np.arange(self.span)
        # torch gathers long rows with all its threads, which would starve the main thread; numpy uses one.
        self.threaded = self.long and not shared
        if self.threaded:
            self.rows = words(array)
        elif self.long:
            self.items = np.ndarray(len(array), f"V{self.row}", array)
        else:
            count = max(0, len(array) - self.span + 1)
            self.items = np.ndarray(count, f"V{self.row * self.span}", array, strides=(self.row,))

    def target(self, memory: Tensor) -> Any:
        """A batch's bytes in the form that `fill` writes."""
        if self.threaded:
            return memory.view(self.rows.dtype).view(-1, self.rows.shape[1])
        return memory.numpy().view(self.items.dtype)

    def fill(self, start_B: np.ndarray, target: Any) -> None:
        if not self.long:
            target[:] = self.items[start_B]
            return
        index = start_B if self.span == 1 else (start_B[:, None] + self.steps).ravel()
        if self.threaded:
            torch.index_select(self.rows, 0, torch.from_numpy(np.array(index)), out=target)
        else:
            # The default mode uses a second buffer; bounds were checked before.
            np.take(self.items, index, out=target, mode="clip")


class Slot:
    """Memory for one batch: all arrays and the sample counters in one block, so that one copy transfers it."""

    def __init__(self, arrays: Mapping[str, np.ndarray], spans: Mapping[str, int], batch: int, device: torch.device, pin: bool):
        shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {"index": ((batch,), np.dtype(np.int64))}
        for name, array in arrays.items():
            window = (spans[name],) if spans[name] else ()
            shapes[name] = ((batch, *window, *array.shape[1:]), array.dtype)
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        total = sum(-(-size // _ALIGN) * _ALIGN for size in sizes.values())
        self.memory = _memory(total, device, pin)
        self.bytes: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        start = 0
        for name, (shape, dtype) in shapes.items():
            self.bytes[name] = self.memory[start : start + sizes[name]]
            self.values[name] = self.bytes[name].view(torch_dtype(dtype)).view(shape)
            start += -(-sizes[name] // _ALIGN) * _ALIGN
        self.host_index = self.values["index"].numpy() if device.type == "cpu" else np.empty(0)


def _memory(num_bytes: int, device: torch.device, pin: bool) -> Tensor:
    if device.type == "cpu" and not pin:
        # numpy asks for huge pages; writing now moves the page faults out of the first step.
        return torch.from_numpy(np.full(num_bytes, 0, np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)
