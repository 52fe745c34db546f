"""List of a run's checkpoints: step, size, loss, evaluation. Needs no torch."""

import contextlib
import datetime
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.report import facts
from seedbed.report.summaries import age
from seedbed.track import jsonl
from seedbed.track.folders import step_of
from seedbed.track.jsonl import print_json
from seedbed.track.run import Run
from seedbed.track.text import number, size, table


def list_checkpoints(root: Path, name: str, as_json: bool) -> int:
    """Every checkpoint of a run, oldest first."""
    run = Run.open(root, name)
    found, metric = describe(run)
    if as_json:
        return print_json(found)
    if not found:
        print(f"run {run.name} has no checkpoint yet; every.save and every.eval say when it writes one")
        return 0
    header = ("checkpoint", "step", "train loss", metric or "evaluation", "size", "parts", "age", "")
    print(table(header, [_cells(one) for one in found], right=(1, 2, 3, 4, 6)))
    print(f"use one: seedbed sample {run.name} --checkpoint {found[-1]['name']}; `best` is taken where none is named")
    return 0


def describe(run: Run, losses: dict[Any, Any] | None = None) -> tuple[list[dict[str, Any]], str | None]:
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
