"""`seedbed top`: running runs with speed and time left; `seedbed watch`: the live curve of one run."""

import sys
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.report import facts, summaries, terminal
from seedbed.track import jsonl
from seedbed.track.rows import Columns, Objects, tail_lines
from seedbed.track.run import Run, full_name
from seedbed.track.run_names import run_names
from seedbed.track.text import clip, duration, number, scaled, table

_SECONDS = 1.0
_HEADER = ("run", "recipe", "done", "step", "loss", "best", "items/s", "wait", "mfu", "left", "since")


def top(root: Path, once: bool, as_json: bool) -> int:
    """A live table of running runs; printed once with `once` or without a terminal."""
    if as_json:
        return jsonl.print_json(training(root))
    on = terminal.allowed()
    return terminal.show(lambda columns, height: (_top_lines(root, columns, height, on), False), _SECONDS, once)


def training(root: Path) -> list[dict[str, Any]]:
    """The running runs with their current speed, newest first."""
    runs = [run for name in run_names(root) if (run := Run(Path(root) / name)).is_running()]
    found = [{**summaries.summary(run), **pace(run)} for run in runs]
    return sorted(found, key=lambda s: s["age"] if s["age"] is not None else 0.0)


def pace(run: Run) -> dict[str, Any]:
    rows = [row for row in jsonl.decode(tail_lines(run.path / "rows.jsonl")) if facts.is_number(row.get("step"))]
    last: dict[str, Any] = rows[-1] if rows else {}
    out = {key: last.get(key) for key in ("items_per_s", "wait", "mfu")}
    timed = [row for row in rows if facts.is_number(row.get("seconds"))]
    end = run.status().get("last_step")
    out["seconds_left"] = None
    if len(timed) > 1 and facts.is_number(end) and timed[-1]["step"] > timed[0]["step"]:
        each = (timed[-1]["seconds"] - timed[0]["seconds"]) / (timed[-1]["step"] - timed[0]["step"])
        out["seconds_left"] = max(end - timed[-1]["step"], 0) * each
    return out


def _top_lines(root: Path, columns: int, height: int, on: bool) -> list[str]:
    found = training(root)
    if not found:
        last = summaries.folded(summaries.summaries(root))[: max(min(height - 3, 5), 0)]
        return [f"nothing trains in {root}", *(["", "last runs", *summaries.runs_table(last).splitlines()] if last else [])]
    shown = table(_HEADER, [_cells(s) for s in found], right=range(3, len(_HEADER)), max_width=columns).splitlines()
    head, *rest = shown[: max(height - 2, 2)]
    more = [f"and {len(shown) - 1 - len(rest)} more"] if len(shown) - 1 > len(rest) else []
    return [f"{len(found)} training in {root}", terminal.paint(head, "bold", on), *rest, *more]


def _cells(s: dict[str, Any]) -> list[str]:
    step, last = s["step"], s["last_step"]
    share = step / last if facts.is_number(step) and facts.is_number(last) and last else None
    bar = f"{'━' * round(10 * min(share, 1)):─<10} {share:4.0%}" if share is not None else "-"
    numbers = [f"{number(step)}/{number(last)}" if last else number(step), number(s["loss"]), number(s["best"])]
    rate = scaled(s["items_per_s"]) if facts.is_number(s["items_per_s"]) else "-"
    shares = [f"{s[key]:.0%}" if facts.is_number(s[key]) else "-" for key in ("wait", "mfu")]
    left = duration(s["seconds_left"]) if s["seconds_left"] is not None else "-"
    recipe = clip(full_name(s["recipe"], s["preset"]), 24) if s["recipe"] else "-"
    return [clip(s["name"], 40), recipe, bar, *numbers, rate, *shares, left, summaries.age(s["created"])]


def watch(root: Path, name: str, key: str, *, log: bool, once: bool) -> int:
    """Plot one metric in the terminal until the run ends; with `once`, once."""
    run = Run.open(root, name)
    run.config_json()
    rows, events = Columns(run.path / "rows.jsonl"), Objects(run.path / "events.jsonl")
    fine = "utf" in (sys.stdout.encoding or "").lower()
    on = terminal.allowed()

    def frame(columns: int, height: int) -> terminal.Frame:
        if not run.path.is_dir():
            raise UserError(f"run {run.name} is gone: its folder was removed or renamed")
        rows.refresh()
        events.refresh()
        canvas = terminal.Canvas(columns, min(height - 4, 40), log, fine, on)
        return _watch_lines(run, key, rows, events.found, canvas), not run.is_running()

    return terminal.show(frame, _SECONDS, once)


def _watch_lines(run: Run, key: str, rows: Columns, events: list[dict[str, Any]], canvas: terminal.Canvas) -> list[str]:
    line = [(x, y) for x, y in zip(rows.column("step"), rows.column(key), strict=True) if x == x and y == y]
    dots = [(e["step"], e[key]) for e in events if e.get("kind") == "eval" and _has(e, key)]
    metric, points = facts.evaluations(events)
    if key == "loss" and metric and "loss" in metric and not dots:
        dots = [(float(step), value) for step, value in points]
    if not line and not dots and rows.num_rows:
        known = dict.fromkeys([*rows.names(), *(k for e in events if e.get("kind") == "eval" for k in e if _has(e, k))])
        raise UserError(
            f"run {run.name} has no number {key!r}; there are: {', '.join(k for k in known if k not in ('step', 'time'))}"
        )
    best = (max if facts.is_higher_better(events, key) else min)((y for _, y in dots), default=None)
    return [*_title(run, key, line, best, canvas), *terminal.draw(line, dots, canvas)]


def _has(event: dict[str, Any], key: str) -> bool:
    return facts.is_number(event.get(key)) and facts.is_number(event.get("step"))


def _title(run: Run, key: str, line: list[terminal.Point], best: float | None, canvas: terminal.Canvas) -> list[str]:
    short, speed = summaries.summary(run), pace(run)
    of = f"/{number(short['last_step'])}" if short["last_step"] else ""
    words = [f"step {number(short['step'])}{of}"]
    words += [f"{key} {number(float(line[-1][1]))}"] if line else []
    words += [f"best {number(float(best))}"] if best is not None else []
    words += [f"{scaled(speed['items_per_s'])} items/s"] if facts.is_number(speed["items_per_s"]) else []
    words += [f"{duration(speed['seconds_left'])} left"] if speed["seconds_left"] and short["status"] == "running" else []
    head = f"{run.name}  {terminal.paint_status(short['status'], canvas.colours)}"
    marks = "" if best is None else "   ● evaluation" if canvas.fine else "   o evaluation"
    return [head, "  ".join(words) + marks, ""]
