"""Run folders for tests of charts: many runs of many metrics, odd ones, a sweep and two ablations; nothing is trained."""

import json
import math
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _runs import make_run

NUM_RUNS, NUM_PARTS, NUM_ROWS = 24, 54, 50
MANY = [f"many-{n:02d}" for n in range(NUM_RUNS)]
PREDICTION = {"ratio": 1.25, "basis": "memory 40%"}
SUMMARY = [
    {"label": "baseline", "axis": "baseline", "outcome": "ok", "ratio": 1.0, "predicted": 1.0, "verdict": "baseline"},
    {
        **{"label": "compile=blocks", "axis": "compile", "outcome": "ok", "verdict": "faster", "basis": "memory 40%"},
        **{"ratio": 1.5, "noise": 0.02, "predicted": 1.25, "items_per_s": 5200.0, "low": 5000.0, "high": 5400.0},
        **{"loss": 2.5, "loss_sd": 0.02, "allocated": 1 << 30},
    },
    {"label": "float8=true", "axis": "float8", "outcome": "not run", "why": "it needs precision=bf16"},
]


def make_all(root: Path) -> None:
    """24 runs of 60 metrics, three odd ones, a sweep, a finished ablation and one that goes on."""
    from unit.sweep_samples import end, make

    rng, now = random.Random(0), datetime.now(UTC)
    for number, name in enumerate(MANY):
        make_run(root / name, rows(1.2 + number / 20, rng), 4 * number, now)
    for name in ("known", "silent", "odd"):
        make_run(root / name, rows(2.0, rng, __proto__=1.5, constructor=7.0), 0, now)
    set_config(root / "known", "data", {"block": 64})
    with open(root / "known" / "events.jsonl", "a") as file:
        file.write('{"step": 0, "kind": "model", "flops_per_item": 1e6}\n')
    (root / "silent" / "rows.jsonl").write_text("")
    (root / "silent" / "events.jsonl").write_text("")
    text = (root / "odd" / "rows.jsonl").read_text().splitlines()
    (root / "odd" / "rows.jsonl").write_text("\n".join([*text[:-1], text[-1].replace("0.0003", "-1.3e-18")]) + "\n")
    with open(root / "odd" / "events.jsonl", "a") as file:
        file.writelines(f'{{"step": {s}, "kind": "eval", "__proto__": {s / 10}}}\n' for s in (100, 200, 300))
    sweep = make(root, "optim.lr=1e-2,1e-3,3e-3", "batch=16,64", "seed=0,1,2", name="some")
    for trial in sweep.trials():
        lr, batch = trial.settings["optim.lr"], trial.settings["batch"]
        state = "diverged" if trial.number == 3 else "done"
        end(sweep, trial, abs(math.log10(lr) + 2.5) + batch / 100 + rng.gauss(0, 0.03), state)
    for name, summary in (("first", SUMMARY), ("going", [])):
        (root.parent / "ablations" / name).mkdir(parents=True)
        planned = [
            {"label": one["label"], "axis": one["axis"], "outcome": "waiting", "prediction": PREDICTION} for one in SUMMARY
        ]
        kept = {"identity": {"recipe": "gpt/demo"}, "facts": {"device": "cpu"}, "steps": 40, "repeats": 3}
        (root.parent / "ablations" / name / "report.json").write_text(json.dumps({**kept, "rows": planned, "summary": summary}))


def rows(level: float, rng: random.Random, **constants: float) -> str:
    out = []
    for i in range(1, NUM_ROWS + 1):
        row = {
            "step": 10 * i,
            "loss": level + 3 / i + rng.gauss(0, 0.02),
            "lr": 3e-4,
            "items": 640 * i,
            "seconds": 0.1 * i * level,
        }
        row |= {"items_per_s": rng.gauss(5000, 90), "memory": 1_200_000_000, "psnr": 20 + math.log(i), **constants}
        row |= {f"part_{k:02d}": math.sin(i / 9 + k) + level for k in range(NUM_PARTS)}
        out.append(json.dumps(row))
    return "\n".join(out) + "\n"


def set_config(path: Path, key: str, value: Any) -> None:
    kept = json.loads((path / "config.json").read_text())
    kept["config"][key] = value
    (path / "config.json").write_text(json.dumps(kept))
