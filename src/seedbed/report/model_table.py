"""The model of a run as a table: what `model.txt` holds and `seedbed runs show RUN --model` prints."""

import itertools
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
        parent, _, last = layers[at]["path"].rpartition(".")
        if not last.isdigit():
            yield layers[at], last
            at += 1
            continue
        block, end = _with_children(layers, at), at
        while end < len(layers) and layers[end]["path"].rpartition(".")[0] == parent and _with_children(layers, end) == block:
            end += len(block)
        count = (end - at) // len(block)
        yield layers[at], last if count == 1 else f"{last} to {int(last) + count - 1}: {count} alike"
        yield from _folded(layers[at + 1 : at + len(block)])
        at = end


def _with_children(layers: list[Layer], at: int) -> list[Layer]:
    """The rows of a module and of all inside it, which follow it, with paths from there."""
    path = layers[at]["path"]
    inside = itertools.takewhile(lambda layer: f"{layer['path']}.".startswith(f"{path}."), layers[at:])
    return [{**layer, "path": layer["path"].removeprefix(path)} for layer in inside]
