"""Speed of two checkouts on one machine, in turns: what a user types, the loop's own benchmarks, and steps on a GPU; one table.

    git worktree add --detach /tmp/old COMMIT
    python benchmarks/before_after.py /tmp/old . --rounds 3                       # all rows that suit the machine
    python benchmarks/before_after.py /tmp/old . --only 'loop|guards|packed'      # rows whose name matches

Every round measures both checkouts, each in a process of its own, the order alternating. Commands are measured by the
processor's seconds, since what else the machine does only adds to those of the clock. A row's ratio is the median over rounds of
new over old; below 1 the new checkout is faster. Saving is a training with twenty checkpoints less one with none.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _report import ROOT, commit, write_result

TRAIN = (
    "-m",
    "seedbed",
    "train",
    "gpt/demo",
    "device=cpu",
    "steps=60",
    "every.eval=0",
    "every.sample=0",
    "--no-check",
    "--dirty",
)
TYPED = {"train gpt/demo": ("every.save=0",), "train gpt/demo, 20 checkpoints": ("every.save=3",)}
SCRIPTS = {"loop": ("--rounds", "12"), "guards": ("--rounds", "8")}
# Rows of benchmarks/packed.py on a CPU. Processes of both checkouts stay open and take turns, because single visits to the same
# code differ by a tenth; and operators are counted, which do not differ at all.
PACKED = {"packed: eager": ("job", 1), "packed: pack of 16": ("pack", 16)}
NUM_TURNS, STEPS_PER_TURN = 24, 8
TURNS = """
import sys, time, torch
from _jobs import open_job, open_pack, time_pack, time_steps
kind, num, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
settings = "batch=8 steps=100000 device=cpu compile=off every.eval=0 every.save=0".split()
opened = open_pack("thinker/demo", num, *settings) if kind == "pack" else open_job("thinker/demo", *settings)
take = time_pack if kind == "pack" else time_steps
with opened as job:
    take(job, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        take(job, steps)
    print(sum(one.count for one in seen.key_averages()), flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        take(job, steps)
        print((time.process_time() - start) * 1e3 / steps / num, flush=True)
"""
SMALL = ("data.text=reference", "budget=none")
# Rows of benchmarks/gpt_gpu.py: preset, settings and steps to time.
STEPS = {
    "gpt_gpu: 124M, compiled and captured": ("gpt/gpt2-124m", (), 40),
    "gpt_gpu: shakespeare, compiled and captured": ("gpt/shakespeare", SMALL, 150),
    "gpt_gpu: shakespeare, eager": ("gpt/shakespeare", (*SMALL, "compile=off", "capture=off"), 150),
}
MEASURE = "import json, sys; from _jobs import measure; print(json.dumps(measure(*json.loads(sys.argv[1]))))"


def environment(checkout: Path, folder: str) -> dict[str, str]:
    paths = os.pathsep.join([str(checkout / "src"), str(checkout / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "SEEDBED_RESULTS": folder, "OMP_NUM_THREADS": "1"}


def run(checkout: Path, words: tuple[str, ...], folder: str) -> tuple[float, str]:
    """Processor seconds of a command, and what it printed."""
    env = environment(checkout, folder)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{checkout}: {' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def typed(checkout: Path, folder: str) -> dict[str, float]:
    found = {f"{name}, CPU s": run(checkout, (*TRAIN, *more), folder)[0] for name, more in TYPED.items()}
    none, twenty = found.values()
    return {**found, "20 checkpoints, CPU s": twenty - none}


def script(name: str, checkout: Path, folder: str) -> dict[str, float]:
    """The figures that a benchmark script of the checkout writes."""
    run(checkout, (str(checkout / "benchmarks" / f"{name}.py"), *SCRIPTS[name]), folder)
    (path,) = Path(folder).glob(f"{name}*.json")
    figures = json.loads(path.read_text())["figures"]
    if name == "loop":
        return {"loop: a step, CPU us": figures["seedbed"]["cpu_us"]}
    return {"guards: a step, us": figures["step_us"], "guards: of a step, us": figures["step_us"] * figures["share"]}


def in_turns(name: str, checkouts: list[Path]) -> dict[str, dict[str, Any]]:
    """Processor milliseconds per model-step of both checkouts, whose processes are open at once, and operators."""
    command = [sys.executable, "-c", TURNS, *map(str, PACKED[name]), str(STEPS_PER_TURN)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        workers = [
            stack.enter_context(subprocess.Popen(command, cwd=folder, env=environment(one, folder), **pipes)) for one in checkouts
        ]
        counts = [[float(worker.stdout.readline())] for worker in workers]
        found: list[list[float]] = [[], []]
        for k in range(NUM_TURNS):
            for side in (0, 1) if k % 2 == 0 else (1, 0):
                print(file=workers[side].stdin, flush=True)
                found[side].append(float(workers[side].stdout.readline()))
    return {f"{name}, CPU ms per model-step": compare(*found), f"{name}, operators in {STEPS_PER_TURN} steps": compare(*counts)}


def steps(name: str, checkout: Path, folder: str) -> dict[str, float]:
    row = json.loads(run(checkout, ("-c", MEASURE, json.dumps(STEPS[name])), folder)[1].splitlines()[-1])
    return {f"{name}, ms a step": row["ms"]}


def measurements(only: str) -> dict[str, Any]:
    """By name, a function of checkout and folder that returns figures."""
    found: dict[str, Any] = {"train": typed}
    found |= {name: lambda *where, name=name: script(name, *where) for name in SCRIPTS}
    if torch.cuda.is_available():
        found |= {name: lambda *where, name=name: steps(name, *where) for name in STEPS}
    return {name: measure for name, measure in found.items() if re.search(only, name)}


def compare(old: list[float], new: list[float]) -> dict[str, Any]:
    ratios = sorted(b / a for a, b in zip(old, new, strict=True) if a > 0.0)
    row = {"old": statistics.median(old), "new": statistics.median(new), "ratio": statistics.median(ratios) if ratios else 1.0}
    return {name: round(value, 3) for name, value in row.items()} | {"ratios": [round(r, 3) for r in ratios]}


def kept_rows(name: str) -> dict[str, dict[str, Any]]:
    """Rows that earlier calls have measured."""
    path = Path(os.environ.get("SEEDBED_RESULTS", ROOT / "benchmarks" / "results")) / f"{name}.json"
    return json.loads(path.read_text())["figures"]["rows"] if path.exists() else {}


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| what | before | after | after / before | each round |", "|---|---:|---:|---:|---|"]
    for name, row in rows.items():
        shown = " ".join(f"{r:.3f}" for r in row["ratios"])
        lines.append(f"| {name} | {row['old']:g} | {row['new']:g} | {row['ratio']:.3f} | {shown} |")
    return "\n".join(lines)


def keep(machine: str, rows: dict[str, dict[str, Any]], more: dict[str, dict[str, Any]], note: str) -> None:
    """Add rows to the result files."""
    rows |= {name: {**row, "commit": commit()} for name, row in more.items()}
    path = write_result(f"before-after-{machine}", {"rows": rows}, note)
    path.with_suffix(".md").write_text(f"{note}\n\n{table(rows)}\n".lstrip())
    print(*more, sep=", ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="PATTERN", help="only measurements whose name matches")
    parser.add_argument("--note", default="", help="what is compared, for the result file")
    args = parser.parse_args()
    machine = torch.cuda.get_device_name().split()[-1].lower() if torch.cuda.is_available() else "cpu"
    rows = kept_rows(f"before-after-{machine}")
    for measure in measurements(args.only).values():
        seen: dict[str, dict[str, list[float]]] = {"old": {}, "new": {}}
        for k in range(args.rounds):
            sides = [("old", args.old.resolve()), ("new", args.new.resolve())]
            for side, checkout in sides if k % 2 == 0 else reversed(sides):
                with tempfile.TemporaryDirectory() as folder:
                    for row, value in measure(checkout, folder).items():
                        seen[side].setdefault(row, []).append(value)
        keep(machine, rows, {row: compare(seen["old"][row], seen["new"][row]) for row in seen["old"]}, args.note)
    for name in PACKED:
        if re.search(args.only, name):
            keep(machine, rows, in_turns(name, [args.old.resolve(), args.new.resolve()]), args.note)
    print(table(rows))


if __name__ == "__main__":
    main()
