"""Run folders made up for benchmarks and pictures: the files of trained runs, without the training."""

import json
import math
import random
from datetime import datetime, timedelta
from pathlib import Path

RECIPES = (("gpt", "demo"), ("flow", "shapes"), ("ebt", "demo"), ("thinker", "prefix"))
WHYS = (
    "is half the depth enough?",
    "warm-up of 200 steps against 50",
    "the rate of the last sweep, twice as long",
    "does weight decay matter at this size?",
    "",
    "reference for the week",
)


def make_runs(root: Path, num_runs: int, num_rows: int, num_kinds: int = 20, num_per_sweep: int = 25, seed: int = 0) -> list[str]:
    """Write `num_runs` ended runs of `num_rows` rows, every fifth group of them a sweep; rows are shared by kinds of runs."""
    root.mkdir(parents=True, exist_ok=True)
    kinds = [_rows(random.Random(seed + kind), num_rows) for kind in range(min(num_kinds, num_runs))]
    start = datetime.now().astimezone() - timedelta(minutes=40 * num_runs)
    names: list[str] = []
    for number in range(num_runs):
        group = number // num_per_sweep
        sweep = f"gpt-demo-{group:02d}" if group % 5 == 4 else None
        name = f"{sweep}-{number % num_per_sweep + 1:04d}" if sweep else f"run-{number:04d}"
        parent = names[-1] if names and number % 3 == 2 and not sweep else None
        make_run(root / name, kinds[number % len(kinds)], number, start + timedelta(minutes=40 * number), sweep, parent)
        names.append(name)
    return names


def make_run(path: Path, rows: str, number: int, created: datetime, sweep: str | None = None, parent: str | None = None) -> None:
    """One run's folder, as training would have left it."""
    recipe, preset = RECIPES[0] if sweep else RECIPES[number % len(RECIPES)]
    rate = 1e-3 * (1 + number % 5)
    config = {"steps": 1000, "batch": 64, "seed": number % 3, "optim": {"lr": rate, "clip": 1.0}, "model": {"width": 128}}
    facts = {"recipe": recipe, "preset": preset, "config": config, "hash": f"{number:08x}", "changes": {"optim.lr": rate}}
    facts |= {"parent": parent, "why": WHYS[number % len(WHYS)], "created": created.isoformat(timespec="seconds")}
    facts |= {"version": "0.1.0"} | ({"sweep": sweep} if sweep else {})
    last = json.loads(rows.rstrip().rpartition("\n")[2])
    evals = [{"step": int(last["step"] * s / 8), "kind": "eval", "loss": last["loss"] + 2.0 / s, "time": s} for s in range(1, 9)]
    events = [{"step": 0, "kind": "preflight", "outcome": "passed", "errors": [], "warnings": [], "time": 0.0}, *evals]
    events += [{"step": last["step"] // 2, "kind": "spike", "loss": 9.9, "time": 5.0}] if number % 7 == 0 else []
    events += [{"step": last["step"], "kind": "sample", "text": f"To be run {number}, or not to be.", "files": [], "time": 9.0}]
    clock = {"train": last["seconds"], "eval": last["seconds"] / 12, "save": last["seconds"] / 40, "compile": 4.2}
    status = {"status": "done", "step": last["step"], "last_step": last["step"], "loss": last["loss"], "clock": clock}
    status |= {"best": last["loss"] + 0.25, "best_step": last["step"], "verdict": "bound by matrix multiplication"}
    for folder in ("samples", "checkpoints"):
        (path / folder).mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(facts))
    (path / "code.json").write_text(json.dumps({"version": "0.1.0", "commit": "0" * 40}))
    (path / "status.json").write_text(json.dumps(status))
    (path / "rows.jsonl").write_text(rows)
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (path / "console.log").write_text("".join(f"step {step:>6}  loss 2.3456\n" for step in range(0, last["step"], 1000)))


def _rows(rng: random.Random, num: int) -> str:
    floor, fall, noise = rng.uniform(1.0, 2.0), rng.uniform(0.2, 0.5), rng.uniform(0.02, 0.08)
    out = []
    for index in range(1, num + 1):
        loss = floor + 6 * (10 * index) ** -fall + rng.gauss(0, noise)
        rate = 0.003 * min(1.0, index / 50) * (0.55 + 0.45 * math.cos(math.pi * index / num))
        row = {"step": 10 * index, "loss": loss, "grad_norm": abs(rng.gauss(1, 0.2)), "lr": rate, "lrs": {"main": rate}}
        row |= {"items": 640 * index, "epoch": index / 500, "items_per_s": rng.gauss(5200, 90), "wait": 0.01}
        row |= {"seconds": 0.123 * index, "memory": 1_234_567_890, "mfu": 0.31}
        out.append(json.dumps(row))
    return "\n".join(out) + "\n"
