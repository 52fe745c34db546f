"""A curve out of characters: eight dots to a character where the terminal has them, one where it has not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from seedbed.track.colour import paint
from seedbed.track.text import scaled

_LABEL = 10
# The eight dots of a braille character, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))

Point = tuple[float, float]


@dataclass(frozen=True)
class Paper:
    """How large a drawing is, in characters, and what its screen can show."""

    columns: int
    lines: int
    log: bool = False
    fine: bool = True
    colours: bool = False


def draw(line: Sequence[Point], dots: Sequence[Point], paper: Paper) -> list[str]:
    """A line and single dots over the same axes, with labels; what is not finite, or has no logarithm, is left out."""
    line, dots = (sorted(p for p in points if _fits(p, paper.log)) for points in (line, dots))
    both = [*line, *dots]
    width, height = max(paper.columns - _LABEL, 8), max(paper.lines - 1, 3)
    if not both:
        return ["nothing to draw yet"]
    place = _Place(both, width, height, paper.log)
    cells = [[" "] * width for _ in range(height)]
    _draw_line(cells, line or dots, place, paper)
    for point in dots:
        column, row = (int(v) for v in place.at(point, 1, 1))
        cells[row][column] = paint("●" if paper.fine else "o", "yellow", paper.colours)
    axis = f"{scaled(place.left)}".ljust(width - 8) + f"{scaled(place.right)}".rjust(8)
    return [*_labelled(cells, place), " " * _LABEL + axis]


def _fits(point: Point, log: bool) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1]) and (not log or point[1] > 0)


class _Place:
    """Where a point lies on the paper, counted from the upper left."""

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
        """The value at the middle of a line, at the rims the very ends."""
        share = 1 - row / max(self.height - 1, 1)
        value = self.low + share * (self.high - self.low)
        return 10**value if self.log else value


def _draw_line(cells: list[list[str]], line: Sequence[Point], place: _Place, paper: Paper) -> None:
    """Every dot between one point and the next, so that a steep curve has no holes."""
    across, down = (2, 4) if paper.fine else (1, 1)
    marks: dict[tuple[int, int], int] = {}
    where = [place.at(point, across, down) for point in line]
    for (x0, y0), (x1, y1) in zip(where, where[1:] or where, strict=False):
        num = int(max(abs(x1 - x0), abs(y1 - y0))) + 1
        for i in range(num + 1):
            x, y = int(x0 + (x1 - x0) * i / num), int(y0 + (y1 - y0) * i / num)
            key = (y // down, x // across)
            marks[key] = marks.get(key, 0) | _DOTS[x % across][y % down]
    for (row, column), bits in marks.items():
        cells[row][column] = paint(chr(0x2800 + bits) if paper.fine else "*", "cyan", paper.colours)


def _labelled(cells: list[list[str]], place: _Place) -> list[str]:
    every = max(len(cells) // 5, 1)
    out = []
    for row, line in enumerate(cells):
        told = f"{place.label(row):.4g}" if row % every == 0 or row == len(cells) - 1 else ""
        out.append(f"{told:>{_LABEL - 1}} "[-_LABEL:] + "".join(line).rstrip())
    return out
