"""A status line on a terminal while checks run: which one, how many, and for how long. Silent elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from seedbed.track.text import clip, safe, width

TICK = 1.0


class Progress:
    """Shows a status line with a running clock until it is cleared or closed."""

    def __init__(self, stream: TextIO | None = None, *, silent: bool = False) -> None:
        self.stream = stream or sys.stderr
        self.live = not silent and self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._start = time.monotonic()
        self._text = ""
        self._lock, self._end = threading.Lock(), threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        if self._ticker is not None:
            self._ticker.join()
        self.clear()

    def say(self, text: str, *, ticking: bool = True) -> None:
        """Shows `text`; without `ticking` only once, because others may write to the terminal meanwhile."""
        if not self.live:
            return
        with self._lock:
            self._text = text if ticking else ""
            self._draw(text)
        if ticking and self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
            self._ticker.start()

    def clear(self) -> None:
        """Removes the line."""
        if not self.live:
            return
        with self._lock:
            self._text = ""
            self._write("\r\x1b[2K")

    def _tick(self) -> None:
        while not self._end.wait(TICK):
            with self._lock:
                if self._text:
                    self._draw(self._text)

    def _draw(self, text: str) -> None:
        seconds = time.monotonic() - self._start
        self._write("\r\x1b[2K" + clip(f"  {safe(text)}, {seconds:.0f} s", width()))

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # a closed terminal stops no check
            self.live = False
