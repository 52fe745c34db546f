"""A terminal screen that is redrawn until it is finished or Ctrl-C is pressed."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from seedbed.report import colour

# Text of a frame, and whether it is the last one.
Frame = tuple[list[str], bool]


def show(frame: Callable[[int, int], Frame], seconds: float, once: bool) -> int:
    """Draw `frame(columns, lines)` every few seconds; without a terminal, or with `once`, print it once."""
    if once or not colour.is_screen():
        print("\n".join(frame(*_size(wide=not colour.is_screen()))[0]))
        return 0
    with contextlib.suppress(KeyboardInterrupt), _other_screen():
        while True:
            columns, height = _size()
            text, last = frame(columns, height - 1)
            if last:
                break
            # Each line clears the rest of the previous frame's line: no flicker.
            sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in text[: height - 1]) + "\x1b[J")
            sys.stdout.flush()
            time.sleep(seconds)
    print("\n".join(frame(*_size())[0]))
    return 0


@contextlib.contextmanager
def _other_screen() -> Iterator[None]:
    """Use the alternate screen; the previous content is restored at the end."""
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def _size(wide: bool = False) -> tuple[int, int]:
    """Size of the terminal."""
    columns = os.environ.get("COLUMNS", "")
    with contextlib.suppress(OSError, ValueError):
        found = os.get_terminal_size(sys.stdout.fileno())
        return int(columns) if columns.isdigit() and wide else found.columns, found.lines
    return (int(columns) if columns.isdigit() and int(columns) else 120), 30
