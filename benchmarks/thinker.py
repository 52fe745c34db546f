"""What thinkers learn on one GPU: copy at 20 and 40, addition over all pairs, the cumsum map, and six Chomsky tasks.

Goals: no error in 65,536 copies; 99.9 % of all 10^6 sums; every cell of the trained cumsum box at 99 % of tokens, cells outside
within 2 points, and 95 % of that at 16 times the trained steps. The Chomsky table has published numbers next to it.
`python benchmarks/thinker.py --only copy,add16 key=value ...`; settings after the parts hold for each of them.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _report import write_result

from seedbed.track.folders import step_of

TASKS = ("reverse_string", "duplicate_string", "odds_first", "missing_duplicate", "binary_addition", "bucket_sort")
# Deletang et al. 2023 (ICLR): mean token accuracy in % at lengths 41 to 500, the best run of a sweep, 1,000,000 steps of 128.
PUBLISHED = {
    "RNN": (62.0, 50.3, 51.0, 52.3, 50.3, 27.9),
    "LSTM": (60.9, 57.6, 55.6, 54.3, 55.5, 99.3),
    "Stack-RNN": (100.0, 52.8, 51.9, 55.2, 52.7, 78.1),
    "Tape-RNN": (100.0, 100.0, 100.0, 100.0, 100.0, 70.7),
    "Transformer": (62.3, 52.8, 52.8, 56.4, 54.3, 91.9),
    "chance": (50.0, 50.0, 50.0, 50.0, 50.0, 20.0),
}
NUM_SEEDS = 5
# What needs an origin: half of a string, or the size of a group.
FROM_AN_ORIGIN = ("bucket_sort", "odds_first")


def seedbed(folder: Path, *words: str) -> None:
    """A command as a person types it; what it says is shown when it fails."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "seedbed", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"seedbed {' '.join(words)} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def full_evaluation(run: Path) -> dict[str, Any]:
    newest = max(run.glob("samples/step-*/full_evaluation.json"), key=lambda path: step_of(path.parent.name) or 0)
    return json.loads(newest.read_text())


def training(run: Path) -> dict[str, Any]:
    """How much of it there was."""
    status, config = json.loads((run / "status.json").read_text()), json.loads((run / "config.json").read_text())["config"]
    clock = {name: round(seconds, 1) for name, seconds in status["clock"].items()}
    return {"steps": status["step"], "batch": config["batch"], "seconds": clock}


def single(preset: str, settings: list[str]) -> dict[str, Any]:
    """One run and its full evaluation; a leak is an error here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seedbed(folder, "train", f"thinker/{preset}", "--run", "one", "--dirty", *settings)
        found, amount = full_evaluation(folder / "runs" / "one"), training(folder / "runs" / "one")
    assert not found["leak"], found["leak_check"]
    short = {key: found[key] for key in ("exact", "token", "num", "num_wrong", "error_bound", "same_answer_of_two_draws")}
    curve = found["curve"]
    far = {"steps": curve["steps"][-1], "exact": curve["exact"][-1], "token": curve["token"][-1]}
    return {**short, "far": far, "pairs": found["pairs"], "map": found["map"], "training": amount, "settings": settings}


def box(found: dict[str, Any]) -> dict[str, Any]:
    """The lowest token accuracy inside the trained box and outside it, and what is left at 16 times the steps."""
    table = found["map"]
    low, high, first, last = table["box"]
    inside, outside = [], []
    for latents, row in zip(table["latents"], table["token"], strict=True):
        for steps, token in zip(table["steps"], row, strict=True):
            (inside if low <= latents <= high and first <= steps <= last else outside).append(token)
    kept = found["far"]["token"] / found["token"]
    return {"lowest_inside": min(inside), "lowest_outside": min(outside, default=None), "kept_at_16x": kept}


def chomsky(tasks: list[str], settings: list[str]) -> None:
    """Every task with five seeds, and a file of its own."""
    for task in tasks:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            words = ["sweep", "thinker/chomsky", f"data.task={task}", "--seeds", str(NUM_SEEDS), "--name", "s", "--dirty"]
            words += ["model.positions.kind=ends"] if task in FROM_AN_ORIGIN else []
            asked = [] if any(s.startswith("data.test=") for s in settings) else ["data.test=256"]
            seedbed(folder, *words, "--no-check", *asked, *settings)
            runs = sorted((folder / "runs").glob("s-*"))
            found, amount = [full_evaluation(run) for run in runs], training(runs[0])
        good = [f for f in found if not f["leak"]]
        row: dict[str, Any] = {"num_leaking": len(found) - len(good), "training": amount}
        for kind in ("token", "exact"):
            means = [100 * over_lengths(f["longer"], kind) for f in good]
            row |= {f"{kind}_median": statistics.median(means), f"{kind}_best": max(means), f"{kind}_all": means}
        row["token_in_range"] = [100 * f["token"] for f in good]
        row["published"] = {name: values[TASKS.index(task)] for name, values in PUBLISHED.items()}
        row["wall_s"] = round(time.perf_counter() - start, 1)
        write_result(f"thinker-chomsky-{task.replace('_', '-')}", row)
        print(task, {k: v for k, v in row.items() if k != "published"}, flush=True)


def over_lengths(rows: list[dict[str, Any]], kind: str) -> float:
    """The mean over all lengths from the first to the last, with straight lines between those that were asked."""
    area = sum((b["length"] - a["length"]) * (a[kind] + b[kind]) / 2 for a, b in itertools.pairwise(rows))
    return area / (rows[-1]["length"] - rows[0]["length"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="copy,copy40,add16,cumsum,chomsky")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of the Chomsky table")
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    for part in args.only.split(","):
        if part == "chomsky":
            chomsky(args.tasks.split(","), args.settings)
            continue
        found = single(part, args.settings)
        if part == "cumsum":
            found["box"] = box(found)
        print(part, json.dumps({k: v for k, v in found.items() if k != "map"}), flush=True)
        write_result(f"thinker-{part}", found)


if __name__ == "__main__":
    main()
