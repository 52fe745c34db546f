"""A run's evaluations, config and model as plain text: what its console, `model.txt` and `seedbed runs show` print."""

import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any

from seedbed.report import facts
from seedbed.track.text import format_value, number, scaled, table, wrapped

Layer = dict[str, Any]
_WIDTH = 160
_COMMON = ("step", "seconds", "best", "time")


def evaluation_table(events: Sequence[dict[str, Any]], columns: int) -> str:
    """The table; empty where nothing was evaluated."""
    found = [event for event in events if event.get("kind") == "eval"]
    if not found:
        return ""
    best = [event for event in found if event.get("best")][-1:]
    shown = {event["step"]: event for event in (found[0], *best, found[-1])}
    names = [name for name, value in found[-1].items() if facts.is_number(value) and name not in _COMMON]
    header = ["evaluation", *(f"step {step}" + (" (best)" if [event] == best else "") for step, event in shown.items())]
    rows = [[name, *(number(event.get(name)) for event in shown.values())] for name in names]
    return table(header, rows, range(1, len(header)), columns) + "\nseedbed explain NAME says what a name means"


def config_lines(config: dict[str, Any], marks: dict[str, Container[str]], max_width: int) -> list[str]:
    """A flat config as a compact table, one group per line; marks follow the keys they apply to."""
    groups: dict[str, list[str]] = {"run": []}
    for key, value in config.items():
        group, _, name = key.rpartition(".")
        own = "".join(mark for mark, keys in marks.items() if key in keys)
        groups.setdefault(group or "run", []).append(f"{name}={format_value(value)}{own}")
    indent = 2 + max(map(len, groups)) + 2
    out = []
    for group, words in groups.items():
        for index, text in enumerate(wrapped(words, max_width - indent)):
            out.append(("" if index else f"  {group}").ljust(indent) + text)
    return out


def model_text(about: dict[str, Any]) -> str:
    """Totals, then the modules as a tree, equal ones of a list shown once; shapes and forward FLOP are those of one item."""
    total = sum(layer["flops"] or 0.0 for layer in about["layers"] if "." not in layer["path"])
    lines = [f"{about['parameters']:,} parameters, {about['trained']:,} of them trained"]
    if about.get("flops_per_item"):
        lines.append(f"{scaled(about['flops_per_item'])}FLOP to train on one item, by the recipe's formula")
    if total:
        lines.append(f"{scaled(total)}FLOP forward for one item in products, convolutions and attention")
    if about.get("unreached"):
        lines.append(f"the loss does not reach: {', '.join(about['unreached'])}")
    if about.get("unseen"):
        lines.append(f"no shapes: one item could not be passed through ({about['unseen']})")
    rows = [_cells(layer, name, about["parameters"], total) for layer, name in _folded(about["layers"])]
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
