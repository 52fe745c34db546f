"""Elements of a self-contained HTML page: inline style and images, no scripts, nothing loaded."""

import base64
from collections.abc import Sequence
from pathlib import Path

from seedbed.report import svg_charts
from seedbed.report.svg_charts import Chart, text

_MAX_FILE = 4 << 20

# Nothing may be loaded or run, even if untrusted text were to become markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"

_STYLE = Path(__file__).with_name("page.css")


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
    drawn = svg_charts.draw(found)
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


KINDS = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}
