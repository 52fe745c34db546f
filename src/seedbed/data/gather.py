"""Windows of rows copied out of large arrays: into prepared host memory, or on the device from an array that lives there."""

import warnings
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Rows at least this long are gathered one by one; shorter ones (tokens, actions) as whole windows, which is one copy per item.
LONG_ROW = 1024
_ALIGN = 64


def row_bytes(array: np.ndarray) -> int:
    return array.itemsize * prod(array.shape[1:])


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def words(array: np.ndarray) -> Tensor:
    """The rows as (num_rows, n) of the widest integer that fits: few wide loads, and a type that every kernel supports."""
    size = next(s for s in (8, 4, 2, 1) if row_bytes(array) % s == 0 and array.ctypes.data % s == 0)
    wide = array.reshape(len(array), -1).view(f"i{size}")
    with warnings.catch_warnings():
        # Memory-mapped arrays are read-only, and nothing here writes to them.
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(wide)


def widen(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in a wider type."""
    if value.device.type == "cpu":
        # Microseconds of work for one thread: waking torch's others for it can cost a thousand times as much.
        return torch.from_numpy(value.numpy().astype(torch.empty(0, dtype=dtype).numpy().dtype))
    return value.to(dtype)


class HostRows:
    """An array on the host, perhaps memory-mapped; `fill` copies windows into memory prepared by `target`."""

    def __init__(self, array: np.ndarray, span: int, shared: bool):
        assert array.flags.c_contiguous, "rows must be contiguous"
        self.row, self.span = row_bytes(array), max(1, span)
        self.dtype, self.shape = array.dtype, ((span,) if span else ()) + array.shape[1:]
        self.long = self.row >= LONG_ROW or self.span == 1
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

    def take(self, start_B: np.ndarray, wide: np.dtype | None) -> Tensor:
        """Windows of short rows in new memory, converted to `wide`: for a few of them faster than filling a target."""
        assert not self.long
        windows = self.items[start_B].view(self.dtype).reshape(len(start_B), *self.shape)
        return torch.from_numpy(windows if wide is None else windows.astype(wide))


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
