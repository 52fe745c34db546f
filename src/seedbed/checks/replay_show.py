"""Prints a replay: verdict, calls around the origin, rows and precisions."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seedbed.checks.replay import ReplayReport, investigate
from seedbed.errors import EXIT_FAILED, EXIT_OK
from seedbed.track import jsonl

NUM_CALLS = 14


def replay(root: Path, run_name: str, step: int | None, as_json: bool = False) -> int:
    """Prints what happened at a step; 0 when it was reproduced, 1 when not."""
    out = Console(highlight=False, emoji=False)
    if as_json:
        report = investigate(root, run_name, step)
        print(json.dumps(jsonl.finite(report.to_json())))
    else:
        with out.status("restoring the step", spinner="line") as status:
            report = investigate(root, run_name, step, status.update)
        show(out, report)
    return EXIT_OK if report.reproduced else EXIT_FAILED


def show(out: Console, report: ReplayReport) -> None:
    word = "reproduced, the loss is the recorded one" if report.reproduced else "NOT reproduced"
    out.print(f"[bold]step {report.step} of {escape(report.run)}[/], from {escape(report.start)}: {word}", soft_wrap=True)
    for note in report.notes:
        out.print(f"  [yellow]{escape(note)}[/]", soft_wrap=True)
    if report.examination.calls:
        out.print(_calls(report))
    if report.rows:
        out.print(_rows(report))
    if report.blocks:
        table = Table("block", "gradient norm", "largest update / weight", title="blocks", box=None)
        for entry in report.blocks[:24]:
            table.add_row(entry["block"], _size(entry["grad_norm"]), _size(entry["update"]))
        out.print(table)
    if len(report.precisions) > 1:
        table = Table("arithmetic", "loss", "gradient norm", "", title="the same step, the same noise", box=None)
        for result in report.precisions:
            word = result.problem or ("finite" if result.finite else "not finite")
            numbers = ("", "") if result.problem else (_size(result.loss, "not finite"), _size(result.norm, "not finite"))
            table.add_row(result.name, *numbers, escape(word), style="" if result.finite else "red")
        out.print(table)
    colour = "green" if report.kind == "clean" and report.reproduced else "red"
    out.print(f"[bold {colour}]{report.kind}[/]")
    for part in ("what", "where", "why", "fix"):
        out.print(f" {part:<6} {escape(getattr(report.finding, part))}", soft_wrap=True)
    out.print(f"[bold]{escape(report.sentence())}[/]", soft_wrap=True)


def _calls(report: ReplayReport) -> Table:
    """The calls around the origin, in order of completion."""
    calls = report.examination.calls
    guilty = report.origin.module if report.origin else None
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
        cells = [call.name, call.kind, *map(_size, (call.given, call.weight, call.gave, call.rms)), call.dtype, mark]
        table.add_row(*map(escape, cells), style=style)
    return table


def _rows(report: ReplayReport) -> Table:
    spike = report.kind in ("spike", "clean")
    title = "rows with the largest loss" if spike else "every row fails, for example" if report.all_rows else "rows that fail"
    table = Table("part", "row", "sample", "item", "loss", "what it is", title=title, box=None)
    for row in report.rows:
        item = "" if row.item is None else str(row.item)
        table.add_row(str(row.part), str(row.row), str(row.sample), item, _size(row.loss), escape(row.shown))
    return table


def _size(value: float, absent: str = "") -> str:
    return f"{value:.3g}" if math.isfinite(value) else absent
