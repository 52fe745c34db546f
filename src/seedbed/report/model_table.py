"""The model of a run as a table: what `model.txt` holds and `seedbed runs show RUN --model` prints."""

from collections.abc import Iterator
from typing import Any

from seedbed.track.text import scaled, table

Layer = dict[str, Any]
_WIDTH = 160


def model_text(facts: dict[str, Any]) -> str:
    """Totals, then the modules as a tree, equal ones of a list shown once; shapes and forward FLOP are those of one item."""
    total = sum(layer["flops"] or 0.0 for layer in facts["layers"] if "." not in layer["path"])
    lines = [f"{facts['parameters']:,} parameters, {facts['trained']:,} of them trained"]
    if facts.get("flops_per_item"):
        lines.append(f"{scaled(facts['flops_per_item'])}FLOP to train on one item, by the recipe's formula")
    if total:
        lines.append(f"{scaled(total)}FLOP forward for one item in products, convolutions and attention")
    if facts.get("unreached"):
        lines.append(f"the loss does not reach: {', '.join(facts['unreached'])}")
    if facts.get("unseen"):
        lines.append(f"no shapes: one item could not be passed through ({facts['unseen']})")
    rows = [_cells(layer, name, facts["parameters"], total) for layer, name in _folded(facts["layers"])]
    header = ("module", "kind", "output", "parameters", "share", "FLOP", "share")
    return "\n".join([*lines, "", table(header, rows, right=(3, 4, 5, 6), max_width=_WIDTH)])


def _cells(layer: Layer, name: str, parameters: int, total: float) -> tuple[str, ...]:
    depth, flops = layer["path"].count("."), layer["flops"]
    return (
        "  " * depth + name,
        layer["kind"],
        "x".join(map(str, layer["shape"])) if layer["shape"] else "-",
        f"{layer['parameters']:,}",
        f"{layer['parameters'] / parameters:.1%}" if parameters else "-",
        scaled(flops) if flops else "-",
        f"{flops / total:.1%}" if flops and total else "-",
    )


def _folded(layers: list[Layer]) -> Iterator[tuple[Layer, str]]:
    """Every module with its label; of equal numbered siblings only the first."""
    at = 0
    while at < len(layers):
        last = layers[at]["path"].rpartition(".")[2]
        if not last.isdigit():
            yield layers[at], last
            at += 1
            continue
        size = _size(layers, at)
        end = at + size
        while _same(layers, at, end, size):
            end += size
        count = (end - at) // size
        yield layers[at], last if count == 1 else f"{last} to {int(last) + count - 1}: {count} alike"
        yield from _folded(layers[at + 1 : at + size])
        at = end


def _size(layers: list[Layer], at: int) -> int:
    """The number of rows of a module with its children."""
    inside = f"{layers[at]['path']}."
    return 1 + next((n for n, layer in enumerate(layers[at + 1 :]) if not layer["path"].startswith(inside)), len(layers) - at - 1)


def _same(layers: list[Layer], first: int, other: int, size: int) -> bool:
    """Whether the module at `other` is a sibling of the one at `first` and equal in all rows."""
    if other >= len(layers) or _size(layers, other) != size:
        return False
    paths = layers[first]["path"], layers[other]["path"]
    rows = [
        [{**layer, "path": layer["path"].removeprefix(path)} for layer in layers[at : at + size]]
        for path, at in zip(paths, (first, other), strict=True)
    ]
    return paths[0].rpartition(".")[0] == paths[1].rpartition(".")[0] and rows[0] == rows[1]
