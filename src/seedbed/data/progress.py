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
        rate = (done - self._first) / (now - self._start)
        left = _time((total - done) / rate) if rate > 0 else "unknown"
        line = f"{self.what}: {self._size(done)} of {self._size(total)}, {self._size(rate)}/s, {left} left"
        sys.stderr.write(f"\r\x1b[2K{line}" if terminal else f"{line}\n")
        sys.stderr.flush()
        self._spoke, self._open = now, terminal

    def close(self) -> None:
        """End the line on a terminal."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False

    def _size(self, count: float) -> str:
        if self.unit != "bytes":
            return f"{count:,.0f} {self.unit}"
        return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
