"""The terminal: line plots of braille characters or ASCII, a screen that is drawn again, and colours where there are any."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from seedbed.track.text import scaled

_LABEL = 10
# The eight dots of a braille character, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_CODES = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36", "dim": "2", "bold": "1"}
_STATUS = {
    "running": "blue",
    "done": "green",
    **dict.fromkeys(("failed", "nan", "diverged", "damaged", "stalled"), "red"),
    **dict.fromkeys(("interrupted", "queued", "cancelled"), "yellow"),
}

Point = tuple[float, float]
# Text of a frame, and whether it is the last one.
Frame = tuple[list[str], bool]


@dataclass(frozen=True)
class Canvas:
    columns: int
    lines: int
    log: bool = False
    fine: bool = True
    colours: bool = False


def draw(line: Sequence[Point], dots: Sequence[Point], canvas: Canvas) -> list[str]:
    """A line and single dots over the same axes, with labels; values without a position on the axes are left out."""
    least = 0.0 if canvas.log else -math.inf
    line, dots = (sorted((x, y) for x, y in points if math.isfinite(x) and least < y < math.inf) for points in (line, dots))
    both = [*line, *dots]
    width, height = max(canvas.columns - _LABEL, 8), max(canvas.lines - 1, 3)
    if not both:
        return ["nothing to draw yet"]
    scale = _Scale(both, width, height, canvas.log)
    cells = [[" "] * width for _ in range(height)]
    _draw_line(cells, line or dots, scale, canvas)
    for point in dots:
        column, row = (int(v) for v in scale.at(point, 1, 1))
        cells[row][column] = paint("●" if canvas.fine else "o", "yellow", canvas.colours)
    every, out = max(height // 5, 1), []
    for row, found in enumerate(cells):
        text = f"{scale.label(row):.4g}" if row % every == 0 or row == height - 1 else ""
        out.append(f"{text:>{_LABEL - 1}} "[-_LABEL:] + "".join(found).rstrip())
    return [*out, " " * _LABEL + scaled(scale.left).ljust(width - 8) + scaled(scale.right).rjust(8)]


class _Scale:
    """Position of a point, from the upper left."""

    def __init__(self, points: Sequence[Point], width: int, height: int, log: bool) -> None:
        self.width, self.height, self.log = width, height, log
        self.left, self.right = min(x for x, _ in points), max(x for x, _ in points)
        values = [self._value(y) for _, y in points]
        self.low, self.high = min(values), max(values)

    def _value(self, y: float) -> float:
        return math.log10(y) if self.log else y

    def at(self, point: Point, per_column: int, per_row: int) -> tuple[float, float]:
        columns, rows = self.width * per_column, self.height * per_row
        across = (point[0] - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        up = (self._value(point[1]) - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return min(across * columns, columns - 1), min((1 - up) * rows, rows - 1)

    def label(self, row: int) -> float:
        """The value at the middle of a text line; the limits at the first and last one."""
        share = 1 - row / max(self.height - 1, 1)
        value = self.low + share * (self.high - self.low)
        return 10**value if self.log else value


def _draw_line(cells: list[list[str]], line: Sequence[Point], scale: _Scale, canvas: Canvas) -> None:
    """All dots between two points, so that steep curves have no gaps."""
    across, down = (2, 4) if canvas.fine else (1, 1)
    marks: dict[tuple[int, int], int] = {}
    where = [scale.at(point, across, down) for point in line]
    for (x0, y0), (x1, y1) in zip(where, where[1:] or where, strict=False):
        num = int(max(abs(x1 - x0), abs(y1 - y0))) + 1
        for i in range(num + 1):
            x, y = int(x0 + (x1 - x0) * i / num), int(y0 + (y1 - y0) * i / num)
            key = (y // down, x // across)
            marks[key] = marks.get(key, 0) | _DOTS[x % across][y % down]
    for (row, column), bits in marks.items():
        cells[row][column] = paint(chr(0x2800 + bits) if canvas.fine else "*", "cyan", canvas.colours)


def show(frame: Callable[[int, int], Frame], seconds: float, once: bool) -> int:
    """Draw `frame(columns, lines)` every few seconds; without a terminal, or with `once`, print it once."""
    if once or not is_screen():
        print("\n".join(frame(*_size(wide=not is_screen()))[0]))
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
    columns = os.environ.get("COLUMNS", "")
    with contextlib.suppress(OSError, ValueError):
        found = os.get_terminal_size(sys.stdout.fileno())
        return int(columns) if columns.isdigit() and wide else found.columns, found.lines
    return (int(columns) if columns.isdigit() and int(columns) else 120), 30


def is_screen() -> bool:
    """Whether the output is a terminal that can move its cursor."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def allowed() -> bool:
    return is_screen() and not os.environ.get("NO_COLOR")


def paint(text: str, colour: str, on: bool) -> str:
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if on and text.strip() else text


def paint_status(text: str, on: bool) -> str:
    """A run's status in its colour, with its padding."""
    word = text.split(",")[0].split()[-1:] or [""]
    return paint(text, _STATUS[word[0]], on) if word[0] in _STATUS else text
