"""Elements of a self-contained HTML page: inline style and images, no scripts, nothing loaded."""

import base64
from collections.abc import Sequence
from pathlib import Path

from seedbed.report import svg_charts
from seedbed.report.svg_charts import Chart, text

_MAX_FILE = 4 << 20

# Nothing may be loaded or run, even if untrusted text were to become markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"

_STYLE = """
:root{--paper:#fbfbf9;--card:#fff;--ink:#1c2024;--soft:#687076;--rule:#e4e5e1;--good:#137a45;--bad:#b42318;--warn:#9a6700;
--c0:#2f6fde;--c1:#e0701a;--c2:#1f9d63;--c3:#8e4ec6;--c4:#0e93a6;--c5:#d6336c;--c6:#8a6d1b;--c7:#5b6770;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--paper:#141618;--card:#1b1e21;--ink:#e7e9ea;--soft:#959da5;--rule:#2b2f33;--good:#4cc38a;
--bad:#ff8b7f;--warn:#e5b454;--c0:#6ea8fe;--c1:#ff9d57;--c2:#4cc38a;--c3:#bf8cf0;--c4:#3fc6d8;--c5:#ff7fa8;--c6:#d8b44a;--c7:#a3adb6}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1060px;margin:0 auto;padding:36px 24px 72px}
h1{font-size:27px;line-height:1.2;letter-spacing:-.015em;margin:0;overflow-wrap:anywhere}
h2{font-size:13px;font-weight:600;letter-spacing:.06em;text-transform:uppercase;color:var(--soft);margin:40px 0 12px}
h3{font-size:14px;margin:0 0 8px}
.lead{color:var(--soft);margin:6px 0 0;overflow-wrap:anywhere}
.why{font-size:17px;margin:14px 0 0;max-width:46em;overflow-wrap:anywhere}
.chip{display:inline-block;font-size:12px;font-weight:600;padding:1px 9px;border-radius:99px;border:1px solid currentColor;
vertical-align:3px;margin-left:10px;color:var(--soft)}
.chip.done{color:var(--good)}.chip.failed,.chip.nan,.chip.diverged,.chip.damaged,.chip.stalled{color:var(--bad)}
.chip.running{color:var(--c0)}.chip.interrupted,.chip.queued{color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:1px;background:var(--rule);
border:1px solid var(--rule);border-radius:10px;overflow:hidden;margin-top:26px}
.tile{background:var(--card);padding:14px 16px}
.tile b{display:block;font-size:21px;font-weight:600;letter-spacing:-.01em;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:12.5px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:16px 18px;margin:0 0 14px;min-width:0}
.card>:last-child{margin-bottom:0}
.two,.shots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(430px,100%),1fr));gap:14px;margin-bottom:14px}
.shots{grid-template-columns:repeat(auto-fit,minmax(min(380px,100%),1fr))}
.two .card{margin:0}
.verdict{font-size:17px;font-weight:600;margin:0}.verdict+p{margin:4px 0 0;color:var(--soft)}
.good{color:var(--good)}.bad{color:var(--bad)}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:11px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule);stroke-width:1}
.mark{stroke:var(--bad);stroke-width:1.4;stroke-dasharray:2 3;fill:none}
.line{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}.faint{opacity:.28;stroke-width:1}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}.line.c6{stroke:var(--c6)}.line.c7{stroke:var(--c7)}
.c0{--own:var(--c0)}.c1{--own:var(--c1)}.c2{--own:var(--c2)}.c3{--own:var(--c3)}
.c4{--own:var(--c4)}.c5{--own:var(--c5)}.c6{--own:var(--c6)}.c7{--own:var(--c7)}
.dot,.fill{fill:var(--own)}.bar{height:22px;border-radius:6px}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;color:var(--soft);font-size:12.5px;margin:8px 0 0;padding:0;list-style:none}
.key i{display:inline-block;width:10px;height:10px;border-radius:3px;background:var(--own);margin-right:6px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
.wide{overflow-x:auto}
th{text-align:left;font-weight:600;color:var(--soft);font-size:12.5px}
td,th{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.k{font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:12.5px;white-space:nowrap}
pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
pre.wide{white-space:pre;overflow-x:auto}
details summary{cursor:pointer;color:var(--soft);padding:4px 0}
details[open] summary{margin-bottom:8px}
figure{margin:0 0 14px}figcaption{color:var(--soft);font-size:12.5px;margin-bottom:6px}
img,video{max-width:100%;border-radius:6px;display:block;background:var(--rule)}
img.small{image-rendering:pixelated;width:100%}
footer{color:var(--soft);font-size:12.5px;margin-top:48px;border-top:1px solid var(--rule);padding-top:14px}
@media(max-width:600px){main{padding:22px 14px 48px}.tile b{font-size:18px}}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
"""


def page(title: str, parts: Sequence[str], footer: str) -> str:
    """A whole document."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="referrer" content="no-referrer">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head>\n"
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
    """Tiles with the main numbers."""
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
