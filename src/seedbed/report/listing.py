"""`seedbed runs list`: all runs as a table or as JSON."""

from collections import Counter
from pathlib import Path
from typing import Any

from seedbed.report import facts, slurm_queue, terminal
from seedbed.report import summaries as known
from seedbed.report.summaries import age
from seedbed.track import jsonl
from seedbed.track.run import full_name
from seedbed.track.text import clip, number, one_line, table


def list_runs(root: Path, as_json: bool) -> int:
    found = summaries(root)
    if as_json:
        return jsonl.print_json(found)
    print(runs_table(folded(found)) if found else f"no runs in {root} yet; start one with: seedbed train RECIPE/PRESET")
    return 0


def summaries(root: Path) -> list[dict[str, Any]]:
    """All runs, newest first, with their state in the Slurm queue."""
    found = known.summaries(root)
    slurm_queue.add(found)
    return found


def folded(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of a sweep folded into one line, at the position of its newest run."""
    out: dict[str, dict[str, Any]] = {}
    for s in found:
        name = s["sweep"]
        if not name:
            out[f"run {s['name']}"] = s
            continue
        new = {**s, "name": f"{name}-*", "num": Counter(), "step": None, "loss": None, "best": None}
        line = out.setdefault(f"sweep {name}", new)
        line["num"][s["status"]] += 1
        line["best"] = min((v for v in (line["best"], s["best"]) if facts.is_number(v)), default=None)
        line["status"] = ", ".join(f"{count} {status}" for status, count in line["num"].items())
        line["why"] = f"seedbed sweep --show {name}"
    return list(out.values())


def runs_table(found: list[dict[str, Any]]) -> str:
    """Summaries as a table, clipped to the width of the terminal."""
    header = ["name", "recipe", "status", "step", "loss", "best", "age", "why"]
    rows = [_cells(s) for s in found]
    if any(s.get("queue") for s in found):
        header.insert(3, "queue")
        for s, cells in zip(found, rows, strict=True):
            cells.insert(3, s.get("queue") or "")
    on = terminal.allowed()
    paint = {2: lambda part: terminal.paint_status(part, on)}
    return table(header, rows, right=range(len(header) - 5, len(header) - 1), paint=paint)


def _cells(s: dict[str, Any]) -> list[str]:
    recipe = full_name(s["recipe"], s["preset"]) if s["recipe"] else "-"
    why = one_line(str(s["why"] or ""))
    numbers = [number(s["step"]), number(s["loss"]), number(s["best"]), age(s["created"])]
    return [s["name"], clip(recipe, 28), s["status"], *numbers, why]
