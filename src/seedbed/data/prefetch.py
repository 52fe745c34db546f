"""One background thread that reads batches ahead along the known order, into a ring of slots."""

import threading
import time
from collections import deque
from collections.abc import Callable

from seedbed.errors import UserError

# A read that takes longer than this is reported, not waited for.
TIMEOUT = 120.0


class Prefetch:
    """Slots are filled in the order of the counter; a jump of the counter starts again from there."""

    def __init__(self, fill: Callable[[int, int], None], num_slots: int, step: int):
        self._fill, self._step = fill, step
        self.waited = 0.0
        self._changed = threading.Condition()
        self._free = list(range(num_slots))
        self._ready: deque[tuple[int, BaseException | None]] = deque()
        # The next counter to read and to hand out; a new journey begins with every jump.
        self._read: int | None = None
        self._hand: int | None = None
        self._journey = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="seedbed-feed", daemon=True)
        self._thread.start()

    def get(self, counter: int) -> int:
        """The slot that holds the samples from `counter` on; waits for it. Give it back with `release`."""
        start = time.perf_counter()
        with self._changed:
            if counter != self._hand:
                self._jump(counter)
            arrived = self._changed.wait_for(lambda: self._ready or not self._thread.is_alive(), TIMEOUT)
            self.waited += time.perf_counter() - start
            if not arrived:
                raise UserError(
                    f"the feed's thread has not delivered samples {counter} to {counter + self._step - 1} for {TIMEOUT:g} s; "
                    "is the disk or network mount that holds the data answering?"
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
        # A thread that hangs in a read cannot be ended; it is a daemon and holds nothing that others need.
        self._thread.join(timeout=1.0)

    def _jump(self, counter: int) -> None:
        self._journey += 1
        self._free += [slot for slot, _ in self._ready]
        self._ready.clear()
        self._read = self._hand = counter
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._free and self._read is not None))
                if self._closed:
                    return
                assert self._read is not None
                slot, counter, journey = self._free.pop(0), self._read, self._journey
                self._read += self._step
            error = None
            try:
                self._fill(counter, slot)
            except BaseException as caught:
                error = self._told(caught, f"samples {counter} to {counter + self._step - 1}")
            self._deliver(slot, journey, error)

    def _told(self, error: BaseException, samples: str) -> BaseException:
        """What the main thread is to raise: never something that would end the run without a word."""
        if isinstance(error, OSError):
            told = f"{samples} cannot be read ({error}); mend the disk or the mount that holds the data, then resume the run"
            return UserError(told)
        if not isinstance(error, Exception):
            return RuntimeError(f"the feed's thread was ended by {type(error).__name__} while it read {samples}")
        error.add_note(f"while the feed read {samples}")
        return error

    def _deliver(self, slot: int, journey: int, error: BaseException | None) -> None:
        with self._changed:
            if journey != self._journey:
                self._free.append(slot)
                return
            self._ready.append((slot, error))
            if error is not None:
                self._read = None
            self._changed.notify_all()
