"""A progress line on standard error for work of more than a second: amount done, rate and time left."""

import sys
import time

QUIET = 1.0


class Progress:
    """Call it with the amount done and the total; it prints nothing in the first second, then at intervals."""

    def __init__(self, what: str, unit: str = "bytes"):
        self.what, self.unit = what, unit
        self._start = self._spoke = time.monotonic()
        self._first: int | None = None
        self._open = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            # Continued work starts in the middle; the rate is that of this process.
            self._first, self._start = done, now
        terminal = sys.stderr.isatty()
        if now - self._start < QUIET or (now - self._spoke < (0.2 if terminal else 10.0) and done < total):
            return
        from seedbed.data.progress_line import show

        show(self.what, self.unit, done, total, (done - self._first) / (now - self._start), terminal)
        self._spoke, self._open = now, terminal

    def close(self) -> None:
        """End the line on a terminal."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False
