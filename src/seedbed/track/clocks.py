"""Where a run's seconds go: named laps on a clock that never jumps, restorable from a checkpoint."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping


class Stopwatch:
    """Counts seconds per lap (train, eval, sample, save, compile); at most one lap runs at a time."""

    def __init__(self, saved: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic):
        self._seconds = dict(saved or {})
        self._clock = clock
        self._lap: str | None = None
        self._paused: str | None = None
        self._since = 0.0

    def start(self, lap: str) -> None:
        """End the running lap, if any, and count for this one from now on."""
        self.pause()
        self._lap, self._paused, self._since = lap, None, self._clock()

    def pause(self) -> None:
        """Stop counting until `resume` or `start`."""
        if self._lap is not None:
            self._seconds[self._lap] = self[self._lap]
            self._lap, self._paused = None, self._lap

    def resume(self) -> None:
        """Go on with the lap that was paused."""
        if self._paused is not None:
            self.start(self._paused)

    @contextlib.contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Count for `name` inside the block, and for what ran before it afterwards."""
        outer, paused = self._lap, self._paused
        self.start(name)
        try:
            yield
        finally:
            self.pause()
            if outer is not None:
                self.start(outer)
            else:
                self._paused = paused

    def __getitem__(self, lap: str) -> float:
        """Seconds counted for a lap so far, the running stretch included."""
        running = self._clock() - self._since if lap == self._lap else 0.0
        return self._seconds.get(lap, 0.0) + running

    @property
    def running(self) -> str | None:
        """The lap that counts now."""
        return self._lap

    @property
    def total(self) -> float:
        return sum(self.state().values())

    def state(self) -> dict[str, float]:
        """Seconds per lap, ready for JSON; `Stopwatch(saved=...)` goes on from there."""
        laps = [*self._seconds, *([self._lap] if self._lap and self._lap not in self._seconds else [])]
        return {lap: self[lap] for lap in laps}
