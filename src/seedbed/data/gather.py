"""Long rows (images), gathered one by one, and memory for batches of them: all arrays of a batch in one block."""

import warnings
from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from seedbed.data.feed import row_bytes, torch_dtype

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
