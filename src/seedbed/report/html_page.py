"""Elements of a self-contained HTML page, line charts as SVG among them: inline style and images, no scripts, nothing loaded."""

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seedbed.track.text import number, safe, scaled

_MAX_FILE = 4 << 20

# Nothing may be loaded or run, even if untrusted text were to become markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"

_STYLE = Path(__file__).with_name("page.css")

# In pixels of a full-width chart; narrower charts keep the font size.
WIDTH, HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 26
# A curve is downsampled to this many buckets, each with its minimum and maximum: no spike is lost.
_MAX_BUCKETS = 600

KINDS = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A curve: `faint` ones are drawn behind the others and do not affect the scale, `dots` marks each point."""

    points: Sequence[Point]
    colour: int = 0
    label: str = ""
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over the steps, and marks of events."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]] = field(default=())
    width: int = WIDTH
    height: int = HEIGHT


def svg(chart: Chart) -> str:
    """The chart as an <svg> element; empty when there is nothing to draw."""
    lines = [line for line in chart.lines if line.points]
    scaled = [y for line in lines if not line.faint for _, y in line.points] or [y for line in lines for _, y in line.points]
    if not scaled:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    frame = _Frame(min(xs), max(xs), *_span(scaled), chart.width, chart.height, _is_log(scaled))
    name = text(chart.title)
    parts = [f'<svg viewBox="0 0 {chart.width} {chart.height}" role="img" aria-label="{name}"><title>{name}</title>']
    parts += _axes(frame)
    parts += [_mark(frame, step, what) for step, what in chart.marks]
    parts += [_line(frame, line) for line in sorted(lines, key=lambda line: not line.faint)]
    return "".join([*parts, "</svg>"])


def text(value: Any) -> str:
    """Escape a value for text and quoted attributes; control characters are removed."""
    return html.escape(safe(str(value)), quote=True)


@dataclass(frozen=True)
class _Frame:
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
        # Values outside the scale, such as spikes, are clipped to the border.
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
    marks = ticks(frame.low, frame.high, frame.height // 50)
    if frame.log:
        powers = range(math.floor(math.log10(frame.low)), math.ceil(math.log10(frame.high)) + 1)
        marks = [10.0**n for n in powers[:: -(-len(powers) // 8)] if frame.low <= 10.0**n <= frame.high]
    for value in marks:
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
    """Minimum and maximum of each of many equal buckets, in order, where there are too many points."""
    if len(points) <= 2 * _MAX_BUCKETS:
        return list(points)
    out: list[Point] = []
    for index in range(_MAX_BUCKETS):
        part = points[index * len(points) // _MAX_BUCKETS : (index + 1) * len(points) // _MAX_BUCKETS]
        ends = {part.index(pick(part, key=lambda point: point[1])) for pick in (min, max)}
        out += [part[i] for i in sorted(ends)]
    return out


def bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """A stacked horizontal bar: label, size and tooltip of each part."""
    total = math.fsum(size for _, size, _ in parts) or 1.0
    out, at = [f'<svg class="bar" viewBox="0 0 {WIDTH} 22" role="img" preserveAspectRatio="none">'], 0.0
    for index, (label, size, tooltip) in enumerate(parts):
        share = WIDTH * size / total
        name = text(f"{label} {tooltip}")
        out.append(f'<rect class="fill c{index % 8}" x="{at:.1f}" width="{share:.1f}" height="22"><title>{name}</title></rect>')
        at += share
    return "".join([*out, "</svg>"])


def page(title: str, parts: Sequence[str], footer: str) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="referrer" content="no-referrer">'
        f"<title>{text(title)}</title><style>\n{_STYLE.read_text()}</style></head>\n"
        f"<body><main>\n{body}\n<footer>{text(footer)}</footer></main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and its content; empty without content."""
    body = "".join(parts)
    return f"<section><h2>{text(title)}</h2>{body}</section>" if body else ""


def card(*parts: str) -> str:
    body = "".join(parts)
    return f'<div class="card">{body}</div>' if body else ""


def pairs(cards: Sequence[str]) -> str:
    return f'<div class="two">{"".join(cards)}</div>' if any(cards) else ""


def tiles(found: dict[str, str]) -> str:
    shown = [f'<div class="tile"><span>{text(k)}</span><b>{text(v)}</b></div>' for k, v in found.items() if v]
    return f'<div class="tiles">{"".join(shown)}</div>' if shown else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), keys: Sequence[int] = (0,)) -> str:
    """A table; columns in `numbers` are flush right, those in `keys` are words of a config."""
    if not rows:
        return ""
    kinds = {**dict.fromkeys(keys, ' class="k"'), **dict.fromkeys(numbers, ' class="n"')}
    head = "".join(f"<th{kinds.get(i, '') if i in numbers else ''}>{text(name)}</th>" for i, name in enumerate(header))
    body = "".join(
        "<tr>" + "".join(f"<td{kinds.get(i, '')}>{text(cell)}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def chart(found: Chart) -> str:
    """A card with a title, the curves and a key to them."""
    drawn = svg(found)
    if not drawn:
        return ""
    labels = [(line.colour, line.label) for line in found.lines if line.label and line.points]
    return card(f"<h3>{text(found.title)}</h3>", drawn, key(labels))


def key(labels: Sequence[tuple[int, str]]) -> str:
    shown = "".join(f'<li><i class="c{colour % 8}"></i>{text(label)}</li>' for colour, label in labels)
    return f'<ul class="key">{shown}</ul>' if shown else ""


def folded(title: str, body: str) -> str:
    return f"<details><summary>{text(title)}</summary>{body}</details>" if body else ""


def embedded(folder: Path, name: str, caption: str) -> str:
    """An image or video of a run, embedded; one outside its folder, too large or of unknown type is only named."""
    path = (folder / name).resolve()
    kind = KINDS.get(path.suffix.lower())
    if not path.is_relative_to(folder.resolve()) or not path.is_file() or not kind:
        return f"<p class=lead>{text(name)}</p>"
    if path.stat().st_size > _MAX_FILE:
        return f"<p class=lead>{text(name)} is too large to be part of this page</p>"
    data = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    shown = f'<video controls loop muted src="{data}"></video>'
    if not kind.startswith("video"):
        shown = f'<img src="{data}" alt="{text(caption)}"{_small(path)}>'
    return f"<figure><figcaption>{text(caption)}</figcaption>{shown}</figure>"


def _small(path: Path) -> str:
    """Small images are enlarged without smoothing."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return ' class="small"' if image.width <= 320 else ""
    except (OSError, ValueError, Image.DecompressionBombError):
        return ""  # the size is left to the browser
