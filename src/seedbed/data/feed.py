"""Batches of a source on the device, in an order that is a pure function of (seed, sample counter).

Any batch size and any starting point give the same items. Shape suffixes: B items of a step, N any number of items.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seedbed.data.order import Order
from seedbed.errors import UserError

if TYPE_CHECKING:
    from seedbed.data.device_feed import Resident
    from seedbed.data.prefetch import Mapped

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Source:
    """Items by index: `spans[name]` rows of each array, from the row that `locate` returns.

    `num_items` is the length of an epoch; 0 means an endless generator without arrays, whose `batch` makes items from counters.
    A span of 0 is one row without a window axis. `wide` gives the dtype that `batch` receives for an array, where it differs
    from the narrow one that is stored.
    """

    num_items: int = 0
    arrays: Mapping[str, np.ndarray] = _NOTHING
    spans: Mapping[str, int] = _NOTHING
    wide: Mapping[str, np.dtype] = _NOTHING

    def locate(self, epoch_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        """The first row of each item, on the host."""
        return index_B

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """On the device: convert, normalise, name. `raw` has one entry per array, and `index`, the global sample counters."""
        return raw

    def first(self, num: int) -> Source:
        """The first `num` items as a source, without the rows that only later items need.

        A generator repeats its first `num` samples. Override it where evaluation reads more than `arrays` and `num_items`.
        """
        from seedbed.data.limiting import first_items

        return first_items(self, num)


@dataclass
class Data:
    """The training and evaluation data of a recipe; `facts` are plain JSON values that are stored with the run.

    Where there is a `test` split, it is evaluated once, at the end of a run: nothing is chosen by it.
    """

    train: Source
    valid: Source
    facts: dict[str, Any]
    test: Source | None = field(default=None, kw_only=True)


class Feed:
    """Batches on the device. `load` prepares a step's items, `part` returns micro-batch k of them.

    `share` is (rank, number of ranks): all ranks follow one order, and of W ranks each takes every W-th item of a batch, so that
    the first half of a batch is the first half of every rank's.

    On the host a part is valid until the next load but one. On a device parts use the same storage at every step, and `part`
    does no host work, so that a CUDA graph can contain it.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        parts: int,
        seed: int,
        device: torch.device,
        shuffle: bool = True,
        limit_bytes: int | None = None,
        share: tuple[int, int] = (0, 1),
    ):
        if batch % (parts * share[1]):
            raise UserError(f"a batch of {batch} does not divide into {parts * share[1]} equal parts")
        assert source.num_items or not source.arrays, "a source with arrays must set num_items"
        self.source, self.device = source, torch.device(device)
        self.num_bytes = sum(array.nbytes for array in source.arrays.values())
        locator = Locator(source, batch, seed, shuffle, share)
        fits = self.num_bytes <= (room(self.device) if limit_bytes is None else limit_bytes)
        self._tier: _Direct | Mapped | Resident
        if not fits:
            from seedbed.data.prefetch import open_mapped

            self._tier = open_mapped(source, locator, parts, self.device)
        elif self.device.type == "cpu":
            self._tier = _Direct(source, locator, parts)
        else:
            from seedbed.data.device_feed import Resident

            self._tier = Resident(source, locator, parts, self.device)
        self.tier = self._tier.name
        self._wide = [(name, torch_dtype(np.dtype(dtype))) for name, dtype in source.wide.items()]

    def load(self, counter: int) -> None:
        """Load this rank's share of the samples counter .. counter + batch - 1."""
        self._tier.load(counter)

    def part(self, k: int) -> dict[str, Tensor]:
        raw = self._tier.raw(k)
        for name, dtype in self._wide:
            if raw[name].dtype != dtype:
                raw[name] = widen(raw[name], dtype)
        return self.source.batch(raw)

    def divide(self, parts: int) -> None:
        self._tier.divide(parts)

    @property
    def wait(self) -> float:
        return self._tier.wait

    def describe(self) -> str:
        size = f"{self.num_bytes / 1e6:,.1f} MB"
        return {
            "generated": f"generated on {self.device}",
            "device": f"{size} in memory on {self.device}",
            "memory-map": f"{size} memory-mapped, read ahead by one thread",
        }[self.tier]

    def close(self) -> None:
        self._tier.close()


def room(device: torch.device) -> int:
    """How many bytes of data may be kept on a device: half of its free memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    info = Path("/proc/meminfo")
    if info.exists():
        (line,) = (line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024 // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


class _Direct:
    """Arrays and model in host memory: one gather, into memory that the caller may use for two steps.

    `wait` is the number of seconds that `load` waited for data.
    """

    def __init__(self, source: Source, locator: Locator, parts: int):
        self.name = "device" if source.arrays else "generated"
        self.wait, self.turn = 0.0, 0
        self.locator = locator
        self.divide(parts)
        spans, large = source.spans, {name: a for name, a in source.arrays.items() if is_long(a, source.spans[name])}
        self.short = {name: ShortRows(a, spans[name]) for name, a in source.arrays.items() if name not in large}
        self.slots: list[Any] = [Counters(locator.batch) for _ in range(2)]
        self.targets: list[list[Any]] = [[], []]
        if large:
            from seedbed.data.gather import HostRows, Slot

            # New memory for a large batch would cost more in page faults than the copy itself.
            self.slots = [Slot(large, spans, locator.batch, torch.device("cpu"), pin=False) for _ in range(2)]
            rows = {name: HostRows(array, spans[name]) for name, array in large.items()}
            self.targets = [[(r, r.target(slot.bytes[name])) for name, r in rows.items()] for slot in self.slots]
        self.values: dict[str, Tensor] = {}
        self.wide = source.wide

    def load(self, counter: int) -> None:
        start = time.perf_counter()
        self.turn = 1 - self.turn
        slot = self.slots[self.turn]
        np.add(self.locator.steps_B, counter, out=slot.host_index)
        # Freed before the new step, so that its memory, still in the cache, is used again.
        self.values = dict(slot.values)
        if self.locator.order:
            start_B = self.locator.rows(counter)
            for name, rows in self.short.items():
                self.values[name] = rows.take(start_B, self.wide.get(name))
            for rows, target in self.targets[self.turn]:
                rows.fill(start_B, target)
        self.wait += time.perf_counter() - start

    def divide(self, parts: int) -> None:
        self.size = self.locator.batch // parts

    def raw(self, k: int) -> dict[str, Tensor]:
        if self.size == self.locator.batch:
            return dict(self.values)
        return {name: value[k * self.size : (k + 1) * self.size] for name, value in self.values.items()}

    def close(self) -> None:
        pass


class Locator:
    """Maps counters to rows; errors name the sample, and bounds are checked before anything is copied."""

    def __init__(self, source: Source, batch: int, seed: int, shuffle: bool, share: tuple[int, int]):
        rank, world = share
        # This rank's items of a step, and the items of all ranks: the stride from one step to the next.
        self.source, self.batch, self.stride, self.own = source, batch // world, batch, slice(rank, None, world)
        self.order = Order(source.num_items, seed, shuffle) if source.arrays else None
        self.steps_B = np.arange(batch)[self.own]
        lasts = (len(array) - max(1, source.spans[name]) for name, array in source.arrays.items())
        self.last_row = min(lasts, default=0)
        assert self.last_row >= 0, "an item is longer than its array"

    def rows(self, counter: int) -> np.ndarray:
        assert self.order is not None
        epoch_B, index_B = (column[self.own] for column in self.order.at(counter, self.stride))
        try:
            start_B = np.ascontiguousarray(self.source.locate(epoch_B, index_B), dtype=np.int64)
        except Exception as error:
            raise self._with_sample(counter, error) from error
        # As unsigned numbers, negative ones are huge: one test for both ends.
        if np.maximum.reduce(start_B.view(np.uint64)) > self.last_row:
            wrong = int(np.argmax(start_B.view(np.uint64) > np.uint64(self.last_row)))
            raise IndexError(f"sample {counter + self.steps_B[wrong]} is at row {start_B[wrong]}, outside 0 to {self.last_row}")
        return start_B

    def _with_sample(self, counter: int, error: Exception) -> Exception:
        """The error with the number of the first sample that causes it by itself."""
        assert self.order is not None
        kind = UserError if isinstance(error, UserError) else RuntimeError
        for sample in (counter + self.steps_B).tolist():
            try:
                self.source.locate(*self.order.at(sample, 1))
            except Exception as alone:
                return kind(f"the source failed at sample {sample}: {type(alone).__name__}: {alone}")
        return kind(f"the source failed at samples {counter} to {counter + self.stride - 1}: {type(error).__name__}: {error}")


# Rows at least this long are gathered one by one (gather.py); shorter ones (tokens, actions) as whole windows.
LONG_ROW = 1024


def row_bytes(array: np.ndarray) -> int:
    return array.itemsize * prod(array.shape[1:])


def is_long(array: np.ndarray, span: int) -> bool:
    return row_bytes(array) >= LONG_ROW or span <= 1


class ShortRows:
    """Windows of short rows, gathered whole: one copy per item."""

    def __init__(self, array: np.ndarray, span: int):
        assert array.flags.c_contiguous, "rows must be contiguous"
        self.dtype, self.shape = array.dtype, (span, *array.shape[1:])
        size, count = f"V{row_bytes(array) * span}", max(0, len(array) - span + 1)
        self.items = np.ndarray(count, size, array, strides=(row_bytes(array),))

    def take(self, start_B: np.ndarray, wide: np.dtype | None) -> Tensor:
        """In new memory, converted to `wide`: for a few windows faster than filling prepared memory."""
        windows = self.items[start_B].view(self.dtype).reshape(len(start_B), *self.shape)
        return torch.from_numpy(windows if wide is None else windows.astype(wide))


class Counters:
    """Memory for the sample counters of a batch."""

    def __init__(self, batch: int):
        self.host_index = np.zeros(batch, np.int64)
        self.values = {"index": torch.from_numpy(self.host_index)}


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def widen(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.device.type == "cpu":
        # Microseconds of work for one thread: waking torch's others for it can cost a thousand times as much.
        return torch.from_numpy(value.numpy().astype(torch.empty(0, dtype=dtype).numpy().dtype))
    return value.to(dtype)
