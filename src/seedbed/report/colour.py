"""Terminal colours; none with NO_COLOR, on a dumb terminal or without a terminal."""

import os
import sys
from typing import TextIO

_CODES = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36", "dim": "2", "bold": "1"}
_STATUS = {
    "running": "blue",
    "done": "green",
    **dict.fromkeys(("failed", "nan", "diverged", "damaged", "stalled"), "red"),
    **dict.fromkeys(("interrupted", "queued", "cancelled"), "yellow"),
}


def is_screen(stream: TextIO | None = None) -> bool:
    """Whether this stream is a terminal that can move its cursor."""
    found = stream or sys.stdout
    return found is not None and found.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def allowed(stream: TextIO | None = None) -> bool:
    return is_screen(stream) and not os.environ.get("NO_COLOR")


def paint(text: str, colour: str, on: bool) -> str:
    """The text in a colour when `on`."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if on and text.strip() else text


def paint_status(text: str, on: bool) -> str:
    """A run's status in its colour, with its padding."""
    word = text.split(",")[0].split()[-1:] or [""]
    return paint(text, _STATUS[word[0]], on) if word[0] in _STATUS else text
