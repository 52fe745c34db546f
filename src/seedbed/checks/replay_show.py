"""replay as a person reads it: verdict first, then the way through the model, the rows and the ladder of precisions."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seedbed.checks.replay import EXIT_NOT_REPRODUCED, EXIT_OK, Finding, investigate
from seedbed.track import lines

NUM_CALLS = 14


def replay(root: Path, run_name: str, step: int | None, as_json: bool = False) -> int:
    """Print what happened at a step; 0 when it was reproduced, 1 when not."""
    out = Console(highlight=False, emoji=False)
    if as_json:
        finding = investigate(root, run_name, step)
        print(json.dumps(lines.finite(finding.to_json())))
    else:
        with out.status("setting the scene", spinner="line") as status:
            finding = investigate(root, run_name, step, status.update)
        show(out, finding)
    return EXIT_OK if finding.reproduced else EXIT_NOT_REPRODUCED


def show(out: Console, finding: Finding) -> None:
    word = "reproduced, the loss is the recorded one" if finding.reproduced else "NOT reproduced"
    out.print(f"[bold]step {finding.step} of {escape(finding.run)}[/], from {escape(finding.start)}: {word}", soft_wrap=True)
    for note in finding.notes:
        out.print(f"  [yellow]{escape(note)}[/]", soft_wrap=True)
    if finding.examination.calls:
        out.print(_way(finding))
    if finding.rows:
        out.print(_rows(finding))
    if finding.blocks:
        out.print(_blocks(finding))
    if len(finding.rungs) > 1:
        out.print(_ladder(finding))
    colour = "green" if finding.kind == "clean" and finding.reproduced else "red"
    out.print(f"[bold {colour}]{finding.kind}[/]")
    for part in ("what", "where", "why", "fix"):
        out.print(f" {part:<6} {escape(getattr(finding, part))}", soft_wrap=True)
    out.print(f"[bold]{escape(finding.sentence())}[/]", soft_wrap=True)


def _way(finding: Finding) -> Table:
    """The calls around the place, in the order in which they finished."""
    calls = finding.examination.calls
    guilty = finding.place.module if finding.place else None
    at = next((i for i, c in enumerate(calls) if not c.finite or (guilty and c.name == guilty)), 0)
    first = max(0, min(at - NUM_CALLS // 2, len(calls) - NUM_CALLS))
    shown = calls[first : first + NUM_CALLS]
    table = Table(title=f"forward, calls {first + 1} to {first + len(shown)} of {len(calls)}: largest sizes", box=None)
    table.add_column("module", no_wrap=True, min_width=min(max(len(c.name) for c in shown), 40))
    table.add_column("kind", no_wrap=True)
    for title in ("in", "weight", "out", "rms", "dtype"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for call in shown:
        mark = "<- here" if guilty == call.name else "" if call.finite else "nan"
        style = "red" if mark else ""
        numbers = [_size(call.given), _size(call.weight), _size(call.gave)]
        cells = [call.name, call.kind, numbers[0], numbers[1], numbers[2], _size(call.rms), call.dtype, mark]
        table.add_row(*map(escape, cells), style=style)
    return table


def _rows(finding: Finding) -> Table:
    spike = finding.kind in ("spike", "clean")
    title = "rows with the largest loss" if spike else "every row fails, for example" if finding.all_rows else "rows that fail"
    table = Table("part", "row", "sample", "item", "loss", "what it is", title=title, box=None)
    for row in finding.rows:
        item = "" if row.item is None else str(row.item)
        table.add_row(str(row.part), str(row.row), str(row.sample), item, _size(row.loss), escape(row.shown))
    return table


def _blocks(finding: Finding) -> Table:
    table = Table("block", "gradient norm", "largest update / weight", title="blocks", box=None)
    for entry in finding.blocks[:24]:
        table.add_row(entry["block"], _size(entry["grad_norm"]), _size(entry["update"]))
    return table


def _ladder(finding: Finding) -> Table:
    table = Table("arithmetic", "loss", "gradient norm", "", title="the same step, the same noise", box=None)
    for rung in finding.rungs:
        word = rung.problem or ("finite" if rung.finite else "not finite")
        numbers = ("", "") if rung.problem else (_size(rung.loss, "not finite"), _size(rung.norm, "not finite"))
        table.add_row(rung.name, *numbers, escape(word), style="" if rung.finite else "red")
    return table


def _size(value: float, absent: str = "") -> str:
    return f"{value:.3g}" if math.isfinite(value) else absent
