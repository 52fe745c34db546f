"""`seedbed runs list` and `runs checkpoints`: summaries of runs from small files and the tails of long ones, as table or JSON."""

import contextlib
import datetime
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.report import facts, slurm_queue, terminal
from seedbed.report.facts import current_status, step_in
from seedbed.track import jsonl
from seedbed.track.folders import step_of
from seedbed.track.rows import tail_lines
from seedbed.track.run import Run, full_name
from seedbed.track.run_names import run_names
from seedbed.track.text import clip, number, one_line, size, table


def summary(run: Run) -> dict[str, Any]:
    """Summary of a run for listings, from its small files and the tails of its long ones; a damaged run says why."""
    keys = ("recipe", "preset", "status", "step", "last_step", "loss", "best", "created", "age", "why")
    out: dict[str, Any] = {"name": run.name, **dict.fromkeys(keys), "parent": None, "sweep": None, "path": str(run.path)}
    try:
        config, saved = run.config_json(), run.status()
        out |= {key: config.get(key) for key in ("recipe", "preset", "created", "why", "parent", "sweep")}
        out |= {key: saved.get(key) for key in ("step", "last_step", "loss", "best", "metric")}
        out["higher_is_better"] = saved.get("higher_is_better") is True
        last = next(iter(reversed(jsonl.decode(tail_lines(run.path / "rows.jsonl", 4096)[-2:]))), {})
        if step_in(last) >= step_in(out):
            out |= {"step": last.get("step"), "loss": last.get("loss")}
        if out["best"] is None:
            found = facts.best(jsonl.decode(tail_lines(run.path / "events.jsonl")))
            out["best"] = found[1] if found else None
        return {**out, "status": current_status(run, saved), "age": age_seconds(out["created"])}
    except UserError as problem:
        why = str(problem)
    except Exception as error:  # one bad folder must not break the listing
        why = f"{run.path} cannot be read ({type(error).__name__}: {error})"
    made = None
    with contextlib.suppress(OSError):
        made = datetime.datetime.fromtimestamp(os.stat(run.path).st_mtime).astimezone().isoformat(timespec="seconds")
    return {**out, "status": "damaged", "why": why, "created": made, "age": age_seconds(made)}


def summaries(root: Path) -> list[dict[str, Any]]:
    found = [summary(Run(Path(root) / name)) for name in run_names(root)]
    return sorted(found, key=lambda s: (math.inf if s["age"] is None else s["age"], s["name"]))


def age(created: Any) -> str:
    """How long ago an ISO time was, in its largest unit; a clock that jumped gives `now`."""
    seconds = age_seconds(created)
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return "now"


def age_seconds(created: Any) -> float | None:
    """Seconds since an ISO time, never negative; None when it is no time."""
    try:
        moment = datetime.datetime.fromisoformat(created).astimezone()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
    return max((datetime.datetime.now().astimezone() - moment).total_seconds(), 0.0)


def list_runs(root: Path, as_json: bool) -> int:
    found = with_queue(root)
    if as_json:
        return jsonl.print_json(found)
    print(runs_table(folded(found)) if found else f"no runs in {root} yet; start one with: seedbed train RECIPE/PRESET")
    return 0


def with_queue(root: Path) -> list[dict[str, Any]]:
    """Summaries of all runs, newest first, with their state in the Slurm queue."""
    found = summaries(root)
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
        best = max if s.get("higher_is_better") else min
        line["best"] = best((v for v in (line["best"], s["best"]) if facts.is_number(v)), default=None)
        line["status"] = ", ".join(f"{count} {status}" for status, count in line["num"].items())
        line["why"] = f"seedbed sweep --show {name}"
    return list(out.values())


def runs_table(found: list[dict[str, Any]]) -> str:
    """Summaries as a table, clipped to the width of the terminal."""
    queue = any(s.get("queue") for s in found)
    header = ["name", "recipe", "status", *["queue"] * queue, "step", "loss", "best", "age", "why"]
    rows = [_run_cells(s, queue) for s in found]
    on = terminal.allowed()
    paint = {2: lambda part: terminal.paint_status(part, on)}
    return table(header, rows, right=range(len(header) - 5, len(header) - 1), paint=paint)


def _run_cells(s: dict[str, Any], queue: bool) -> list[str]:
    recipe = full_name(s["recipe"], s["preset"]) if s["recipe"] else "-"
    why = one_line(str(s["why"] or ""))
    numbers = [number(s["step"]), number(s["loss"]), number(s["best"]), age(s["created"])]
    return [s["name"], clip(recipe, 28), s["status"], *[s.get("queue") or ""] * queue, *numbers, why]


def list_checkpoints(root: Path, name: str, as_json: bool) -> int:
    run = Run.open(root, name)
    found, metric = describe_checkpoints(run)
    if as_json:
        return jsonl.print_json(found)
    if not found:
        print(f"run {run.name} has no checkpoint yet; every.save and every.eval say when it writes one")
        return 0
    header = ("checkpoint", "step", "train loss", metric or "evaluation", "size", "parts", "age", "")
    print(table(header, [_cells(one) for one in found], right=(1, 2, 3, 4, 6)))
    print(f"use one: seedbed sample {run.name} --checkpoint {found[-1]['name']}; `best` is taken where none is named")
    return 0


def describe_checkpoints(run: Run, losses: dict[Any, Any] | None = None) -> tuple[list[dict[str, Any]], str | None]:
    """The checkpoints in plain values, and the name of the number that decides which is best.

    `losses` by step spare whoever knows them another reading of the rows.
    """
    names, best = run.checkpoints()
    metric, points = facts.evaluations(run.events())
    values = dict(points)
    if losses is None:
        losses = {row.get("step"): row.get("loss") for row in run.rows()}
    found = []
    for name in names:
        step = step_of(name)
        assert step is not None, "only such names are listed"
        logged = [at for at, loss in losses.items() if facts.is_number(at) and at <= step and facts.is_number(loss)]
        loss = losses[max(logged)] if logged else None
        known = {"name": name, "step": step, "loss": loss, "evaluation": values.get(step), "best": name == best}
        found.append(known | _on_disk(run.path / "checkpoints" / name))
    return found, metric


def _on_disk(path: Path) -> dict[str, Any]:
    """Sizes of its files, and which files of its manifest are missing; checksums are verified on loading."""
    sizes = {}
    for file in sorted(path.iterdir()):
        with contextlib.suppress(OSError):
            sizes[file.name] = file.stat().st_size
    wanted, missing = {}, ["manifest.json"]
    with contextlib.suppress(UserError):
        wanted = jsonl.read_object(path / "manifest.json").get("sha256") or {}
        missing = [name for name in wanted if name not in sizes]
    made = datetime.datetime.fromtimestamp(path.stat().st_mtime).astimezone().isoformat(timespec="seconds")
    return {"bytes": sum(sizes.values()), "files": sizes, "missing": missing, "created": made}


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    parts = [f"{n.removesuffix('.safetensors')} {size(b)}" for n, b in one["files"].items() if n.endswith(".safetensors")]
    note = f"damaged: no {', '.join(one['missing'])}" if one["missing"] else "best" if one["best"] else ""
    numbers = (number(one["step"]), number(one["loss"]), number(one["evaluation"]))
    return (one["name"], *numbers, size(one["bytes"]), ", ".join(parts), age(one["created"]), note)
