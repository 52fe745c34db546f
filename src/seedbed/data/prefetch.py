"""Data too large for the device: a background thread prefetches batches in the known order, into a ring of slots."""

import contextlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seedbed.data.feed import Locator, Source, is_long, row_bytes
from seedbed.data.gather import Slot
from seedbed.errors import UserError

# A read that takes longer than this is an error.
TIMEOUT = 120.0
# Batches in host memory: one in use, one that the caller may still use, and two being read.
NUM_SLOTS = 4
# How many batches ahead pages are announced to the operating system.
LOOK_AHEAD = 8


class Prefetch:
    """Slots are filled in the order of the counter; a jump of the counter starts again from there."""

    def __init__(self, fill: Callable[[int, int], None], num_slots: int, step: int):
        self._fill, self._step = fill, step
        self.waited = 0.0
        self._changed = threading.Condition()
        self._free = list(range(num_slots))
        self._ready: deque[tuple[int, BaseException | None]] = deque()
        # The next counters to read and to return; every jump starts a new generation of reads.
        self._read: int | None = None
        self._hand: int | None = None
        self._generation = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="seedbed-feed", daemon=True)
        self._thread.start()

    def get(self, counter: int) -> int:
        """The slot with the samples from `counter` on; waits for it. Return it with `release`."""
        start = time.perf_counter()
        with self._changed:
            if counter != self._hand:
                self._generation += 1
                self._free += [slot for slot, _ in self._ready]
                self._ready.clear()
                self._read = self._hand = counter
                self._changed.notify_all()
            arrived = self._changed.wait_for(lambda: self._ready or not self._thread.is_alive(), TIMEOUT)
            self.waited += time.perf_counter() - start
            if not arrived:
                raise UserError(
                    f"the feed's thread has not delivered samples {counter} to {counter + self._step - 1} for {TIMEOUT:g} s; "
                    "check the disk or network mount that holds the data"
                )
            return self._take(counter)

    def poll(self, counter: int) -> int | None:
        """Like `get`, but None when that would wait, jump or raise."""
        with self._changed:
            if counter != self._hand or not self._ready or self._ready[0][1] is not None:
                return None
            return self._take(counter)

    def _take(self, counter: int) -> int:
        if not self._ready:
            raise RuntimeError(f"the feed's thread died before sample {counter} was read")
        slot, error = self._ready.popleft()
        if error is not None:
            self._free.append(slot)
            self._hand = None
            raise error
        self._hand = counter + self._step
        return slot

    def release(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # A thread that hangs in a read cannot be stopped; it is a daemon and holds no lock.
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._free and self._read is not None))
                if self._closed:
                    return
                assert self._read is not None
                slot, counter, generation = self._free.pop(0), self._read, self._generation
                self._read += self._step
            error = None
            try:
                self._fill(counter, slot)
            except BaseException as caught:
                error = self._explain(caught, f"samples {counter} to {counter + self._step - 1}")
            self._deliver(slot, generation, error)

    def _explain(self, error: BaseException, samples: str) -> BaseException:
        """The error that the main thread raises; never one such as SystemExit, which would end the run silently."""
        if isinstance(error, OSError):
            return UserError(f"{samples} cannot be read ({error}); repair the disk or mount that holds the data, then resume")
        if not isinstance(error, Exception):
            return RuntimeError(f"the feed's thread was ended by {type(error).__name__} while it read {samples}")
        error.add_note(f"while the feed read {samples}")
        return error

    def _deliver(self, slot: int, generation: int, error: BaseException | None) -> None:
        with self._changed:
            if generation != self._generation:
                self._free.append(slot)
                return
            self._ready.append((slot, error))
            if error is not None:
                self._read = None
            self._changed.notify_all()


class MappedRows:
    """Rows gathered in a thread, by numpy: torch would use all its threads, which would starve the main one.

    `fill` copies windows into memory prepared by `target`. The pages of a memory map are announced before they are read.
    """

    def __init__(self, array: np.ndarray, span: int):
        assert array.flags.c_contiguous, "rows must be contiguous"
        self.row, self.span, self.long = row_bytes(array), max(1, span), is_long(array, span)
        self.steps = np.arange(self.span)
        width, count = (1, len(array)) if self.long else (self.span, max(0, len(array) - self.span + 1))
        self.items = np.ndarray(count, f"V{self.row * width}", array, strides=(self.row,))
        self.advice = _Advice.on(array)
        if self.advice:
            self.advice.mapping.madvise(mmap.MADV_RANDOM)  # no read-ahead, since `advise` announces pages

    def target(self, memory: Tensor) -> np.ndarray:
        """A batch's bytes in the form that `fill` writes."""
        return memory.numpy().view(self.items.dtype)

    def fill(self, start_B: np.ndarray, target: np.ndarray) -> None:
        if self.long:
            # The default mode uses a second buffer; bounds were checked before.
            np.take(self.items, (start_B[:, None] + self.steps).ravel(), out=target, mode="clip")
        else:
            target[:] = self.items[start_B]

    def advise(self, start_B: np.ndarray) -> None:
        """Announce the pages that will be read soon, so that the operating system fetches them in parallel."""
        assert self.advice is not None
        for start in start_B.tolist():
            self.advice.will_need(start * self.row, self.span * self.row)


@dataclass(frozen=True)
class _Advice:
    mapping: mmap.mmap
    offset: int

    @classmethod
    def on(cls, array: np.ndarray) -> "_Advice | None":
        base = array
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        base = base.obj if isinstance(base, memoryview) else base
        if not isinstance(base, mmap.mmap) or not hasattr(base, "madvise"):
            return None
        return cls(base, array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data)

    def will_need(self, offset: int, length: int) -> None:
        first = self.offset + offset
        page = first // mmap.PAGESIZE * mmap.PAGESIZE
        self.mapping.madvise(mmap.MADV_WILLNEED, page, first + length - page)


class Mapped:
    """Arrays too large for memory: a thread reads batches into slots in host memory.

    A model on the host gets the slots themselves, each of them released two steps later.
    """

    name = "memory-map"

    def __init__(self, source: Source, locator: Locator, parts: int, device: torch.device):
        self.locator, self.advised, cpu = locator, 0, torch.device("cpu")
        arrays = {name: MappedRows(array, source.spans[name]) for name, array in source.arrays.items()}
        self.advisable = [rows for rows in arrays.values() if rows.advice]
        pin = device.type == "cuda"
        self.slots = [Slot(source.arrays, source.spans, locator.batch, cpu, pin) for _ in range(NUM_SLOTS)]
        self.targets = [[(rows, rows.target(slot.bytes[name])) for name, rows in arrays.items()] for slot in self.slots]
        self.ahead = Prefetch(self._read, NUM_SLOTS, locator.stride)
        self.held: list[int] = []
        self.divide(parts)

    @property
    def wait(self) -> float:
        return self.ahead.waited

    def load(self, counter: int) -> None:
        if len(self.held) == 2:
            self.ahead.release(self.held.pop(0))
        self.held.append(self.ahead.get(counter))

    def raw(self, k: int) -> dict[str, Tensor]:
        return dict(self.parts[self.held[-1]][k])

    def divide(self, parts: int) -> None:
        self.parts = [_parts(slot, parts) for slot in self.slots]

    def close(self) -> None:
        self.ahead.close()

    def _read(self, counter: int, slot: int) -> None:
        """In the thread: announce the pages of later batches, then copy this one."""
        step = self.locator.stride
        limit = counter + LOOK_AHEAD * step
        first = self.advised if counter < self.advised <= limit else counter
        # A sample that cannot be located is reported when it is read.
        with contextlib.suppress(Exception):
            for later in range(first, limit, step) if self.advisable else ():
                start_B = self.locator.rows(later)
                for rows in self.advisable:
                    rows.advise(start_B)
        self.advised = limit
        np.add(self.locator.steps_B, counter, out=self.slots[slot].host_index)
        start_B = self.locator.rows(counter)
        for rows, target in self.targets[slot]:
            rows.fill(start_B, target)


def _parts(slot: Slot, count: int) -> list[dict[str, Tensor]]:
    """A slot's memory as `count` equal micro-batches."""
    size = len(slot.values["index"]) // count
    return [{name: v[k * size : (k + 1) * size] for name, v in slot.values.items()} for k in range(count)]


class MappedCopy(Mapped):
    """For a device without streams: every slot is copied into the same memory of the device."""

    def __init__(self, source: Source, locator: Locator, parts: int, device: torch.device):
        self.static = Slot(source.arrays, source.spans, locator.batch, device, pin=False)
        super().__init__(source, locator, parts, device)
        self.held = [0]

    def divide(self, parts: int) -> None:
        self.parts = [_parts(self.static, parts)]

    def load(self, counter: int) -> None:
        slot = self.ahead.get(counter)
        self.static.memory.copy_(self.slots[slot].memory)
        self.ahead.release(slot)


class MappedAsync(MappedCopy):
    """For CUDA: the next step is copied on a separate stream while this one computes; events guard every buffer.

    Only the calling thread uses CUDA, so that the reading thread can never disturb a capture.
    """

    def __init__(self, source: Source, locator: Locator, parts: int, device: torch.device):
        super().__init__(source, locator, parts, device)
        self.stream = torch.cuda.Stream(device)
        self.buffers = [torch.empty_like(self.static.memory) for _ in range(2)]
        # The allocator may have returned memory that earlier work on the current stream still uses.
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.arrived = [torch.cuda.Event() for _ in self.buffers]
        self.emptied = [torch.cuda.Event() for _ in self.buffers]
        # The counter that is in, or on its way to, each buffer; and the pinned slots whose copy may not have ended.
        self.turn, self.waiting = 0, None
        self.in_flight: list[tuple[int, int]] = []

    def load(self, counter: int) -> None:
        if self.waiting != counter:
            self._send(self.ahead.get(counter), counter)
        stream, buffer = torch.cuda.current_stream(self.static.memory.device), self.turn
        stream.wait_event(self.arrived[buffer])
        self.static.memory.copy_(self.buffers[buffer], non_blocking=True)
        self.emptied[buffer].record(stream)
        following = counter + self.locator.stride
        slot = self.ahead.poll(following)
        self.waiting = None
        if slot is not None:
            self._send(slot, following)

    def _send(self, slot: int, counter: int) -> None:
        while len(self.in_flight) > 1 or (self.in_flight and self.arrived[self.in_flight[0][1]].query()):
            done, buffer = self.in_flight.pop(0)
            self.arrived[buffer].synchronize()
            self.ahead.release(done)
        self.turn = 1 - self.turn
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.emptied[self.turn])
            self.buffers[self.turn].copy_(self.slots[slot].memory, non_blocking=True)
            self.arrived[self.turn].record(self.stream)
        self.in_flight.append((slot, self.turn))
        self.waiting = counter


def open_mapped(source: Source, locator: Locator, parts: int, device: torch.device) -> Mapped:
    return {"cpu": Mapped, "cuda": MappedAsync}.get(device.type, MappedCopy)(source, locator, parts, device)
