"""From a source of items to batches that already lie on the device, in an order that is exact from any counter.

Shape suffixes: B items of a step, b items of a micro-batch.
"""

import contextlib
import copy
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from seedbed.config import Limit
from seedbed.data.gather import DeviceRows, HostRows, Slot, torch_dtype, widen
from seedbed.data.order import Order
from seedbed.data.prefetch import Prefetch
from seedbed.errors import UserError

# Vectors under way to the device: enough that the host never waits for a buffer before it waits for a measurement.
NUM_VECTORS = 32
# Batches in host memory: one in use, one that the caller may still hold, and two being read.
NUM_SLOTS = 4
# How many batches ahead the system is told which pages will be read.
LOOK_AHEAD = 8

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Source:
    """Items that can be gathered by number: `spans[name]` rows of each array, from the row that `locate` names.

    `num_items` counts an epoch; 0 stands for an endless generator without arrays, whose `batch` makes items from counters.
    A span of 0 is one row without a window axis. `wide` names the type in which an array reaches `batch`, where that is not
    the narrow one it is stored in.
    """

    num_items: int = 0
    arrays: Mapping[str, np.ndarray] = _NOTHING
    spans: Mapping[str, int] = _NOTHING
    wide: Mapping[str, np.dtype] = _NOTHING

    def locate(self, epoch_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        """The first row of each item, on the host."""
        return index_B

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """On the device: widen, normalise, name. `raw` holds one entry per array, and `index`, the global sample counters."""
        return raw

    def first(self, num: int) -> "Source":
        """The first `num` items as a source of its own, without the rows that only later items need.

        A generator repeats its first `num` samples. Override it where evaluation reads more than `arrays` and `num_items`.
        """
        part: Any = copy.copy(self)
        if not self.arrays:
            part.batch = lambda raw: self.batch({**raw, "index": raw["index"] % num})
            return part
        part.num_items = min(num, self.num_items)
        index_N = np.arange(part.num_items)
        rows = [self.locate(np.full_like(index_N, epoch), index_N) for epoch in range(2)]
        if np.array_equal(rows[0], rows[1]):  # else later epochs need other rows
            end = int(rows[0].max())
            part.arrays = {name: array[: end + max(1, self.spans[name])] for name, array in self.arrays.items()}
        return part


@dataclass
class Data:
    """What a recipe trains on and what it is judged on; `facts` are plain JSON values that travel with the run.

    Where there is a `test` part, it is evaluated once, when a run is done: nothing is chosen by it.
    """

    train: Source
    valid: Source
    facts: dict[str, Any]
    test: Source | None = field(default=None, kw_only=True)


def limited(data: Data, limit: Limit) -> Data:
    """The data cut down to what a config asks for."""
    if not limit.train and not limit.valid and not limit.test:
        return data
    if limit.test and data.test is None:
        raise UserError(f"limit.test={limit.test}: this recipe's data has no test part; evaluations use limit.valid")
    part = copy.copy(data)
    part.train = data.train.first(limit.train) if limit.train else data.train
    part.valid = data.valid.first(limit.valid) if limit.valid else data.valid
    part.test = data.test.first(limit.test) if data.test and limit.test else data.test
    part.facts = {**data.facts, "limit": {"train": limit.train, "valid": limit.valid, "test": limit.test}}
    return part


class WindowSource(Source):
    """Every window of consecutive rows that lies within one episode. `episodes` holds the first row of each, ascending."""

    def __init__(self, arrays: Mapping[str, np.ndarray], spans: Mapping[str, int], episodes: np.ndarray | None = None):
        self.arrays, self.spans = arrays, spans
        (num_rows,) = {len(a) for a in arrays.values()}
        first_E = np.array([0]) if episodes is None else np.asarray(episodes, dtype=np.int64)
        window = max(1, *spans.values())
        lengths_E = np.diff(np.append(first_E, num_rows))
        assert first_E[0] == 0 and (lengths_E > 0).all(), "episodes start at row 0 and are not empty"
        counts_E = np.maximum(lengths_E - window + 1, 0)
        self.num_items = int(counts_E.sum())
        if not self.num_items:
            raise UserError(f"no episode holds {window} rows in a row; the longest has {int(lengths_E.max())}")
        self._ends_E = np.cumsum(counts_E)
        # Row minus item number is constant within an episode.
        self._shift_E = first_E - (self._ends_E - counts_E)

    def locate(self, epoch_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        return index_B + self._shift_E[np.searchsorted(self._ends_E, index_B, side="right")]


class _Locator:
    """Counter to rows; a failure names the sample, and bounds are checked before anything is copied."""

    def __init__(self, source: Source, batch: int, seed: int, shuffle: bool, share: tuple[int, int]):
        rank, world = share
        # The items of a step that are this rank's, and those of all ranks: from one step to the next.
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
            raise self._blame(counter, error) from error
        # As unsigned numbers the negative ones are huge: one test for both ends.
        if np.maximum.reduce(start_B.view(np.uint64)) > self.last_row:
            wrong = int(np.argmax(start_B.view(np.uint64) > np.uint64(self.last_row)))
            raise IndexError(f"sample {counter + self.steps_B[wrong]} lies at row {start_B[wrong]}, outside 0 to {self.last_row}")
        return start_B

    def _blame(self, counter: int, error: Exception) -> Exception:
        """The same error with the number of the first sample that causes it alone."""
        assert self.order is not None
        kind = UserError if isinstance(error, UserError) else RuntimeError
        for sample in (counter + self.steps_B).tolist():
            try:
                self.source.locate(*self.order.at(sample, 1))
            except Exception as alone:
                return kind(f"the source failed at sample {sample}: {type(alone).__name__}: {alone}")
        return kind(f"the source failed at samples {counter} to {counter + self.stride - 1}: {type(error).__name__}: {error}")


class _Tier(Protocol):
    """Where the items come from; `wait` counts the seconds for which data held `load` up."""

    name: str

    @property
    def wait(self) -> float: ...
    def load(self, counter: int) -> None: ...
    def raw(self, k: int) -> dict[str, Tensor]: ...
    def divide(self, parts: int) -> None: ...
    def close(self) -> None: ...


class _Resident:
    """Arrays on the device: a step costs the host one small copy of row numbers, through a ring of guarded buffers."""

    def __init__(self, source: Source, locator: _Locator, parts: int, device: torch.device):
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


class _Direct:
    """Arrays in host memory and a model there too: one gather, into memory that the caller may keep for two steps."""

    def __init__(self, source: Source, locator: _Locator, parts: int):
        self.name = "device" if source.arrays else "generated"
        self.wait, self.turn = 0.0, 0
        self.locator = locator
        self.divide(parts)
        rows = {name: HostRows(array, source.spans[name], shared=False) for name, array in source.arrays.items()}
        self.short = {name: r for name, r in rows.items() if not r.long}
        self.long = {name: r for name, r in rows.items() if r.long}
        # Fresh memory for a large batch would cost more in page faults than the copy itself.
        large = {name: source.arrays[name] for name in self.long}
        self.slots = [Slot(large, source.spans, locator.batch, torch.device("cpu"), pin=False) for _ in range(2)]
        self.targets = [[(r, r.target(slot.bytes[name])) for name, r in self.long.items()] for slot in self.slots]
        self.values: dict[str, Tensor] = {}
        self.wide = source.wide

    def load(self, counter: int) -> None:
        start = time.perf_counter()
        self.turn = 1 - self.turn
        slot = self.slots[self.turn]
        np.add(self.locator.steps_B, counter, out=slot.host_index)
        # Dropping the last step first lets its memory, still in the cache, serve this one.
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


class _Reader:
    """Fills slots in host memory with the items of a step, beside a working main thread."""

    def __init__(self, source: Source, locator: _Locator, num_slots: int, pin: bool):
        self.locator = locator
        self.rows = {name: HostRows(array, source.spans[name], shared=True) for name, array in source.arrays.items()}
        cpu = torch.device("cpu")
        self.slots = [Slot(source.arrays, source.spans, locator.batch, cpu, pin) for _ in range(num_slots)]
        self.targets = [[(rows, rows.target(slot.bytes[name])) for name, rows in self.rows.items()] for slot in self.slots]

    def fill(self, counter: int, slot: int) -> None:
        np.add(self.locator.steps_B, counter, out=self.slots[slot].host_index)
        start_B = self.locator.rows(counter)
        for rows, target in self.targets[slot]:
            rows.fill(start_B, target)


class _Mapped:
    """Arrays too large for the device: a thread reads ahead from the memory map, and a carrier hands its slots over."""

    name = "memory-map"

    def __init__(self, source: Source, locator: _Locator, parts: int, device: torch.device):
        self.reader = _Reader(source, locator, NUM_SLOTS, pin=device.type == "cuda")
        self.advised = 0
        self.mapped = [rows for rows in self.reader.rows.values() if rows.expect_random()]
        self.ahead = Prefetch(self._read, NUM_SLOTS, locator.stride)
        if device.type == "cpu":
            self.carrier = _Lend(self.reader.slots, parts)
        else:
            static = Slot(source.arrays, source.spans, locator.batch, device, pin=False)
            self.carrier = (_Ship if device.type == "cuda" else _Copy)(self.reader.slots, static, parts, locator.stride)

    @property
    def wait(self) -> float:
        return self.ahead.waited

    def load(self, counter: int) -> None:
        self.carrier.take(self.ahead, counter)

    def raw(self, k: int) -> dict[str, Tensor]:
        return self.carrier.raw(k)

    def divide(self, parts: int) -> None:
        self.carrier.divide(parts)

    def close(self) -> None:
        self.ahead.close()

    def _read(self, counter: int, slot: int) -> None:
        """In the thread: announce the pages of batches to come, then copy this one."""
        step = self.reader.locator.stride
        limit = counter + LOOK_AHEAD * step
        first = self.advised if counter < self.advised <= limit else counter
        # A sample that cannot be located is reported when its turn comes.
        with contextlib.suppress(Exception):
            for later in range(first, limit, step) if self.mapped else ():
                start_B = self.reader.locator.rows(later)
                for rows in self.mapped:
                    rows.advise(start_B)
        self.advised = limit
        self.reader.fill(counter, slot)


class _Lend:
    """To a model on the host: the slot itself, taken back two steps later."""

    def __init__(self, slots: list[Slot], parts: int):
        self.slots = slots
        self.divide(parts)
        self.held: list[int] = []

    def divide(self, parts: int) -> None:
        self.parts = [slot.parts(parts) for slot in self.slots]

    def take(self, ahead: Prefetch, counter: int) -> None:
        if len(self.held) == 2:
            ahead.release(self.held.pop(0))
        self.held.append(ahead.get(counter))

    def raw(self, k: int) -> dict[str, Tensor]:
        return dict(self.parts[self.held[-1]][k])


class _Copy:
    """To a device without streams of its own: a plain copy."""

    def __init__(self, slots: list[Slot], static: Slot, parts: int, stride: int):
        self.slots, self.static, self.parts = slots, static, static.parts(parts)

    def divide(self, parts: int) -> None:
        self.parts = self.static.parts(parts)

    def take(self, ahead: Prefetch, counter: int) -> None:
        slot = ahead.get(counter)
        self.static.memory.copy_(self.slots[slot].memory)
        ahead.release(slot)

    def raw(self, k: int) -> dict[str, Tensor]:
        return dict(self.parts[k])


class _Ship:
    """To CUDA: the next step crosses on a stream of its own while this one computes; events guard every buffer.

    Only the calling thread talks to CUDA, so that the reading thread can never disturb a capture.
    """

    def __init__(self, slots: list[Slot], static: Slot, parts: int, stride: int):
        self.slots, self.static, self.parts, self.stride = slots, static, static.parts(parts), stride
        self.stream = torch.cuda.Stream(static.memory.device)
        self.docks = [torch.empty_like(static.memory) for _ in range(2)]
        # The allocator may have handed out memory that earlier work on the present stream still uses.
        self.stream.wait_stream(torch.cuda.current_stream(static.memory.device))
        self.arrived = [torch.cuda.Event() for _ in self.docks]
        self.emptied = [torch.cuda.Event() for _ in self.docks]
        # Which counter lies in, or is on its way to, which dock; and the pinned slots whose crossing may not be over.
        self.turn, self.waiting = 0, None
        self.crossing: list[tuple[int, int]] = []

    def divide(self, parts: int) -> None:
        self.parts = self.static.parts(parts)

    def take(self, ahead: Prefetch, counter: int) -> None:
        if self.waiting != counter:
            self._send(ahead, ahead.get(counter), counter)
        stream, dock = torch.cuda.current_stream(self.static.memory.device), self.turn
        stream.wait_event(self.arrived[dock])
        self.static.memory.copy_(self.docks[dock], non_blocking=True)
        self.emptied[dock].record(stream)
        following = counter + self.stride
        slot = ahead.poll(following)
        if slot is None:
            self.waiting = None
        else:
            self._send(ahead, slot, following)

    def _send(self, ahead: Prefetch, slot: int, counter: int) -> None:
        while len(self.crossing) > 1 or (self.crossing and self.arrived[self.crossing[0][1]].query()):
            done, dock = self.crossing.pop(0)
            self.arrived[dock].synchronize()
            ahead.release(done)
        self.turn = 1 - self.turn
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.emptied[self.turn])
            self.docks[self.turn].copy_(self.slots[slot].memory, non_blocking=True)
            self.arrived[self.turn].record(self.stream)
        self.crossing.append((slot, self.turn))
        self.waiting = counter

    def raw(self, k: int) -> dict[str, Tensor]:
        return dict(self.parts[k])


class Feed:
    """Batches on the device. `load` makes a step's items ready, `part` gives micro-batch k of them.

    `share` is (rank, number of ranks): all ranks follow one order, and of W ranks each takes every W-th item of a batch, so that
    the first half of a batch is the first half of every rank's.

    On the host a part may be kept until the next load but one. On a device parts read the same storage at every step, and
    `part` does no host work, so that a CUDA graph can hold it.
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
        assert source.num_items or not source.arrays, "a source with arrays must say how many items it has"
        self.source, self.device = source, torch.device(device)
        self.num_bytes = sum(array.nbytes for array in source.arrays.values())
        locator = _Locator(source, batch, seed, shuffle, share)
        fits = self.num_bytes <= (room(self.device) if limit_bytes is None else limit_bytes)
        self._tier: _Tier
        if not fits:
            self._tier = _Mapped(source, locator, parts, self.device)
        elif self.device.type == "cpu":
            self._tier = _Direct(source, locator, parts)
        else:
            self._tier = _Resident(source, locator, parts, self.device)
        self.tier = self._tier.name
        self._wide = [(name, torch_dtype(np.dtype(dtype))) for name, dtype in source.wide.items()]

    def load(self, counter: int) -> None:
        """Make the samples counter .. counter + batch - 1 ready: those of them that are this rank's."""
        self._tier.load(counter)

    def part(self, k: int) -> dict[str, Tensor]:
        """Micro-batch k of the loaded step."""
        raw = self._tier.raw(k)
        for name, dtype in self._wide:
            if raw[name].dtype != dtype:
                raw[name] = widen(raw[name], dtype)
        return self.source.batch(raw)

    def divide(self, parts: int) -> None:
        """Give the same steps in another number of micro-batches from now on."""
        self._tier.divide(parts)

    @property
    def wait(self) -> float:
        """Seconds for which data held `load` up so far."""
        return self._tier.wait

    def describe(self) -> str:
        """In words, for the run's header: where the data lies."""
        size = f"{self.num_bytes / 1e6:,.1f} MB"
        return {
            "generated": f"generated on {self.device}",
            "device": f"{size} in memory on {self.device}",
            "memory-map": f"{size} memory-mapped, read ahead by one thread",
        }[self.tier]

    def close(self) -> None:
        """End the reading thread, if there is one."""
        self._tier.close()


def room(device: torch.device) -> int:
    """How many bytes of data may live on a device: half of what is free there."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    info = Path("/proc/meminfo")
    if info.exists():
        (line,) = (line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024 // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
