"""Curves as inline SVG: sharp at any size, coloured by the page's style sheet, readable without a script."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from seedbed.track.text import number, safe, scaled

# In the pixels of a chart that fills the page; a narrower one keeps the size of its letters.
WIDTH, HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 26
# A curve is drawn by at most this many buckets, each by its lowest and highest value: no spike is lost.
_MAX_BUCKETS = 600

Point = tuple[float, float]


def text(value: Any) -> str:
    """Anything as text between tags or in a quoted attribute: no markup, no control characters."""
    return html.escape(safe(str(value)), quote=True)


@dataclass(frozen=True)
class Line:
    """A curve: `faint` is drawn behind the others and has no say in the scale, `dots` marks each point."""

    points: Sequence[Point]
    colour: int = 0
    label: str = ""
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over the steps, and marks for what happened at some of them."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]] = field(default=())
    width: int = WIDTH
    height: int = HEIGHT


def draw(chart: Chart) -> str:
    """The chart as an <svg> element; an empty text where there is nothing to draw."""
    lines = [line for line in chart.lines if line.points]
    judged = [y for line in lines if not line.faint for _, y in line.points] or [y for line in lines for _, y in line.points]
    if not judged:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    frame = _Frame(min(xs), max(xs), *_span(judged), chart.width, chart.height, _is_log(judged))
    name = text(chart.title)
    parts = [f'<svg viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{name}"><title>{name}</title>']
    parts += _axes(frame)
    parts += [_mark(frame, step, what) for step, what in chart.marks]
    parts += [_line(frame, line) for line in sorted(lines, key=lambda line: not line.faint)]
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Frame:
    """Where numbers lie on the paper."""

    left: float
    right: float
    low: float
    high: float
    width: int
    height: int
    log: bool

    def x(self, value: float) -> float:
        share = (value - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        return round(_LEFT + share * (self.width - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        low, high, value = (math.log(max(v, 1e-300)) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low)
        # What leaves the scale, as a spike does, is cut off at the rim.
        return round(self.height - _BOTTOM - min(max(share, -0.02), 1.02) * (self.height - _TOP - _BOTTOM), 1)


def _is_log(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > 100


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if _is_log(values):
        return low / 1.1, high * 1.1
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin if low < 0 or low - margin > 0 else 0.0, high + margin


def _axes(frame: _Frame) -> list[str]:
    out = []
    for value in _log_ticks(frame) if frame.log else ticks(frame.low, frame.high, frame.height // 50):
        y = frame.y(value)
        out.append(f'<path class="grid" d="M{_LEFT} {y}H{frame.width - _RIGHT}"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 3.5}" text-anchor="end">{_short(value)}</text>')
    for value in ticks(frame.left, frame.right, frame.width // 110, least=1.0):
        out.append(f'<text x="{frame.x(value)}" y="{frame.height - 8}" text-anchor="middle">{_short(value)}</text>')
    return out


def ticks(low: float, high: float, num: int, least: float = 0.0) -> list[float]:
    """About `num` round numbers between two others, `least` apart."""
    if not high > low:
        return [low]
    rough = (high - low) / num
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough * 0.999)
    step = max(step, least)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(frame: _Frame) -> list[float]:
    powers = range(math.floor(math.log10(frame.low)), math.ceil(math.log10(frame.high)) + 1)
    stride = -(-len(powers) // 8)
    return [10.0**power for power in powers[::stride] if frame.low <= 10.0**power <= frame.high]


def _short(value: float) -> str:
    if value and abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-")
    return scaled(value) if abs(value) >= 1000 else f"{value:.4g}"


def _mark(frame: _Frame, step: float, what: str) -> str:
    if not frame.left <= step <= frame.right:
        return ""
    x = frame.x(step)
    return f'<path class="mark" d="M{x} {_TOP}V{frame.height - _BOTTOM}"><title>{text(what)}</title></path>'


def _line(frame: _Frame, line: Line) -> str:
    at = [(frame.x(x), frame.y(y)) for x, y in bucketed(line.points)]
    path = "M" + "L".join(f"{x} {y}" for x, y in at)
    kind = f"line c{line.colour % 8}" + (" faint" if line.faint else "")
    drawn = f'<path class="{kind}" d="{path}"/>' if len(at) > 1 else ""
    if not line.dots and len(at) > 1:
        return drawn
    dots = [
        f'<circle class="dot c{line.colour % 8}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3">'
        f"<title>{text(f'step {x:g}: {number(float(y))}')}</title></circle>"
        for x, y in bucketed(line.points)
    ]
    return drawn + "".join(dots)


def bucketed(points: Sequence[Point]) -> list[Point]:
    """The lowest and the highest point of each of many equal parts, in order, where there are too many to draw."""
    if len(points) <= 2 * _MAX_BUCKETS:
        return list(points)
    out: list[Point] = []
    for index in range(_MAX_BUCKETS):
        part = points[index * len(points) // _MAX_BUCKETS : (index + 1) * len(points) // _MAX_BUCKETS]
        ends = {part.index(pick(part, key=lambda point: point[1])) for pick in (min, max)}
        out += [part[i] for i in sorted(ends)]
    return out


def bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """Shares of a whole as one horizontal bar: label, size, and what to say of each."""
    whole = math.fsum(size for _, size, _ in parts) or 1.0
    out, at = [f'<svg class="bar" viewBox="0 0 {WIDTH} 22" role="img" preserveAspectRatio="none">'], 0.0
    for index, (label, size, told) in enumerate(parts):
        share = WIDTH * size / whole
        name = text(f"{label} {told}")
        out.append(f'<rect class="fill c{index % 8}" x="{at:.1f}" width="{share:.1f}" height="22"><title>{name}</title></rect>')
        at += share
    return "".join([*out, "</svg>"])
