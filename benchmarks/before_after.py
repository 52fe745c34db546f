"""Speed of two checkouts on one CPU, interleaved: what a user types, by the processor's seconds, and the loop's own benchmarks.

    git worktree add --detach /tmp/old COMMIT
    python benchmarks/before_after.py /tmp/old . --rounds 5

Seconds of the processor, since what else the machine does only adds to those of the clock. Saving is a training with twenty
checkpoints less one with none.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _report import write_result

TRAIN = ("-m", "seedbed", "train", "gpt/demo", "steps=60", "every.eval=0", "every.sample=0", "--no-check", "--dirty")
TYPED = {"train": (*TRAIN, "every.save=0"), "train, 20 checkpoints": (*TRAIN, "every.save=3")}
SCRIPTS = {"loop": ("--rounds", "12"), "guards": ("--rounds", "8"), "packed": ("--device", "cpu", "--rounds", "3")}


def run(checkout: Path, words: tuple[str, ...], folder: str) -> float:
    """Seconds of the processor that a command takes."""
    env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "SEEDBED_RESULTS": folder, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: {' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def script_figures(checkout: Path, name: str, folder: str) -> dict[str, Any]:
    """The figures that a benchmark script of the checkout writes."""
    run(checkout, (str(checkout / "benchmarks" / f"{name}.py"), *SCRIPTS[name]), folder)
    (path,) = (path for path in Path(folder).glob(f"{name}*.json"))
    return json.loads(path.read_text())["figures"]


def compare(old: list[float], new: list[float]) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    middle = {"old_s": statistics.median(old), "new_s": statistics.median(new), "ratio": statistics.median(ratios)}
    return {name: round(value, 3) for name, value in middle.items()} | {"ratios": [round(r, 3) for r in sorted(ratios)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scripts", action="store_true", help="the benchmarks of the loop too, which take ten minutes")
    args = parser.parse_args()
    checkouts = {"old": args.old.resolve(), "new": args.new.resolve()}
    seconds: dict[str, dict[str, list[float]]] = {side: {name: [] for name in TYPED} for side in checkouts}
    figures: dict[str, Any] = {"typed": {}, "scripts": {}}
    for _ in range(args.rounds + 1):  # the first round fills caches
        for side, checkout in checkouts.items():
            for name, words in TYPED.items():
                with tempfile.TemporaryDirectory() as folder:
                    seconds[side][name].append(run(checkout, words, folder))
    for side in checkouts:
        rows = {name: values[1:] for name, values in seconds[side].items()}
        rows["20 checkpoints"] = [b - a for a, b in zip(rows["train"], rows["train, 20 checkpoints"], strict=True)]
        seconds[side] = rows
    for name in seconds["old"]:
        figures["typed"][name] = row = compare(seconds["old"][name], seconds["new"][name])
        print(f"{name:24} {row}", flush=True)
    write_result("before-after-cpu", figures)
    for name in SCRIPTS if args.scripts else ():
        for side, checkout in checkouts.items():
            with tempfile.TemporaryDirectory() as folder:
                figures["scripts"][f"{name}, {side}"] = script_figures(checkout, name, folder)
        write_result("before-after-cpu", figures)


if __name__ == "__main__":
    main()
