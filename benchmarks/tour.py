"""What a new user types, timed from outside: every preset and instrument that suits the machine, each in a process of its own.

    python benchmarks/tour.py                                  # all rows for this machine, each training started twice
    python benchmarks/tour.py --list                           # the rows, and what each would need
    python benchmarks/tour.py --only 'train world' --starts 2  # rows whose name matches; earlier rows of the table are kept
    python benchmarks/tour.py --only check --jobs 4            # checks beside each other; trainings always run alone
    python benchmarks/tour.py --data FOLDER --folder SCRATCH --minutes 9

Commands run in an empty folder with a cache folder of their own: a first start finds it empty, a second one as the first left it.
Wall seconds are measured from outside; their split is what the run itself has recorded (`wall` in status.json), and "exit" is
what no process can tell: the time before its creation and after its last line. Rows are written as they are done.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from _report import ROOT, commit, write_result

from seedbed import config as configs
from seedbed import recipes
from seedbed.recipes import catalogue
from seedbed.track.clocks import PARTS

CHECK_LIMIT, BATCH_LIMIT, OVER_TRAINING = 30.0, 60.0, 30.0
USED = "used"  # the short run that verbs on runs are given
MODULES = {"doom": "vizdoom", "atari": "ale_py"}
# Presets whose checks fit a CPU of a few cores.
CPU_CHECKS = ("demo", "thinker/ablation")


@dataclass(frozen=True)
class Row:
    """One command, as typed after `seedbed`."""

    name: str
    words: tuple[str, ...]
    limits: dict[int, float] = field(default_factory=dict)  # wall seconds, by start
    over_training: float = 0.0  # wall seconds beside those of training
    needs: str = ""
    alone: bool = True

    @property
    def trains(self) -> bool:
        return self.words[:1] == ("train",) and "--dry" not in self.words


# ---- rows ----------------------------------------------------------------------------------------------------------------


def rows_for(machine: str, data: Path | None, steps: int) -> list[Row]:
    """What to type on this machine, in the order of worth."""
    trained = _gpu_trainings(steps) if machine == "gpu" else []
    trained += [_train(f"{name}/demo") for name in recipes.names()]
    checks = [_check(name, machine) for name in _presets() if machine == "gpu" or name.endswith(CPU_CHECKS)]
    rows = [*trained, *_verbs(machine), *checks]
    return [_with_needs(row, data) for row in rows]


def _train(name: str, *settings: str, **limits: Any) -> Row:
    return Row(" ".join(["train", name, *settings]), ("train", name, *settings), **limits)


def _gpu_trainings(steps: int) -> list[Row]:
    short = f"steps={steps}"
    over = {"over_training": OVER_TRAINING}
    return [
        _train("gpt/shakespeare", limits={2: 40.0}),
        _train("world/box64", "steps=2600", limits={1: 150.0, 2: 90.0}),
        _train("flow/s2-32", **over),
        _train("ebt/s1", short, **over),
        _train("flow/shapes-64", short, **over),
        _train("ebt/shakespeare-s1", short, **over),
        _train("thinker/copy", short),
        _train("gpt/gpt2-124m"),
    ]


def _check(name: str, machine: str) -> Row:
    return Row(f"check {name}", ("check", name), limits={1: CHECK_LIMIT} if machine == "gpu" else {}, alone=False)


def _verbs(machine: str) -> list[Row]:
    large = "gpt/gpt2-124m" if machine == "gpu" else "gpt/demo"
    text = "gpt/shakespeare" if machine == "gpu" else "gpt/demo"
    typed = {
        "find-batch": ("find-batch", large),
        "find-lr": ("find-lr", text),
        "profile": ("profile", large),
        "plan": ("plan", large),
        "sweep": ("sweep", "thinker/demo", "steps=200", "optim.lr=1e-3,2e-3,4e-3"),
        "overfit": ("overfit", "gpt/demo"),
        "dry run": ("train", "gpt/demo", "--dry"),
        "resume": ("resume", USED, "steps=40"),
        "sample": ("sample", USED, "--prompt", "The statement "),
        "export": ("export", USED, "--out", "exported"),
        "runs show": ("runs", "show", USED),
        "runs list": ("runs", "list"),
        "report": ("report", USED, "--html"),
        "doctor": ("doctor",),
        "data inspect": ("data", "inspect", "gpt/demo"),
        "data show": ("data", "show", "flow/demo"),
        "overview": (),
    }
    limits = {"find-batch": {1: BATCH_LIMIT}} if machine == "gpu" else {}
    return [Row(name, words, limits=limits.get(name, {})) for name, words in typed.items()]


def _presets() -> list[str]:
    return [f"{name}/{preset}" for name in recipes.names() for preset in catalogue.describe(name)]


def _with_needs(row: Row, data: Path | None) -> Row:
    """The row, and what is missing here that its preset reads."""
    name = next((word for word in row.words[1:2] if "/" in word), "")
    if not name:
        return row
    recipe, preset = recipes.find(name)
    facts = configs.flatten(recipe.preset(preset))
    missing = ""
    text, images, recording = (str(facts.get(f"data.{key}", "")) for key in ("text", "images", "recording"))
    if text and text not in ("reference", "stdlib") and not text.startswith("random:"):
        missing = text if data is None or not (data / text).is_file() else ""
    elif images and images != "shapes" and not images.startswith("random:"):
        missing = images if data is None or not (data / images).exists() else ""
    elif module := MODULES.get(recording.partition(":")[0]):
        missing = "" if importlib.util.find_spec(module) else module
    elif recording and recording != "box":
        missing = recording if data is None or not (data / recording).exists() else ""
    return Row(row.name, row.words, row.limits, row.over_training, missing, row.alone)


# ---- one command -----------------------------------------------------------------------------------------------------------


class Place:
    """The folder in which commands are typed, with their caches beside it."""

    def __init__(self, root: Path, data: Path | None) -> None:
        self.root, self.work = root, root / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        for path in data.iterdir() if data else ():
            if not (self.work / path.name).exists():
                (self.work / path.name).symlink_to(path.resolve())

    def cache_of(self, row: Row) -> Path:
        """Trainings have a cache of their own, so that a first start is one; the rest share theirs."""
        return self.root / "caches" / (re.sub(r"\W+", "-", row.name) if row.trains else "shared")

    def type(self, words: Iterable[str], cache: Path, log: Path, seconds: float) -> tuple[float, int | str]:
        """Wall seconds and exit code of `seedbed WORDS`; what it says goes to `log`."""
        env = {**os.environ, "SEEDBED_CACHE": str(cache), **bytecode(self.root)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            start = time.monotonic()
            child = subprocess.Popen(
                [sys.executable, "-m", "seedbed", *words],
                cwd=self.work,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | str = child.wait(timeout=max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                code = "time-out"
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return time.monotonic() - start, code


def bytecode(root: Path) -> dict[str, str]:
    """An installed torch has its bytecode beside it, and loads in half the time; where it has none, a folder here keeps it."""
    is_there = Path(importlib.util.cache_from_source(torch.__file__)).exists()
    return {} if is_there else {"PYTHONPYCACHEPREFIX": str(root / "bytecode")}


def measure(place: Place, row: Row, start: int, seconds: float, company: int = 1) -> dict[str, Any]:
    """One row of the table."""
    cache, run = place.cache_of(row), f"{re.sub(r'[^a-z0-9]+', '-', row.name)}-{start}"
    if row.trains and start == 1:
        shutil.rmtree(cache, ignore_errors=True)
    shutil.rmtree(place.work / "runs" / run, ignore_errors=True)
    words = [*row.words, *(["--run", run] if row.trains else []), "--dirty"]
    log = place.root / "logs" / f"{run}.log"
    wall, code = place.type(words, cache, log, seconds)
    found: dict[str, Any] = {"command": " ".join(["seedbed", *row.words]), "start": start, "wall": round(wall, 2), "exit": code}
    told = run if row.trains else USED if row.words[:1] == ("resume",) else ""
    found |= of_run(place.work / "runs" / told) if told else of_log(log.read_text(errors="replace"))
    if "split" in found:
        found["split"]["exit"] = round(max(wall - sum(found["split"].values()), 0.0), 2)
    if code not in (0, "time-out"):
        found["said"] = log.read_text(errors="replace").strip().splitlines()[-3:]
    return {**found, **judged(row, found, start), **({"beside": company} if company > 1 else {})}


def of_run(path: Path) -> dict[str, Any]:
    """Split, alarms and result of a run from the files in its folder."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((path / "status.json").read_text())
        found |= {"status": status.get("status"), "steps": status.get("step")}
        if isinstance(status.get("wall"), dict):
            found["split"] = {lap: round(seconds, 2) for lap, seconds in status["wall"].items()}
    with contextlib.suppress(OSError, ValueError):
        events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        checks = next((e for e in events if e["kind"] == "preflight"), {})
        alarms = [e["kind"] for e in events if "what" in e and "fix" in e]
        found["alarms"] = [*checks.get("errors", []), *checks.get("warnings", []), *alarms]
        last = next((e for e in reversed(events) if e["kind"] == "eval"), {})
        metric = next(((k, v) for k, v in last.items() if k not in ("step", "kind")), None)
        found["metric"] = f"{metric[0]} {metric[1]:.4f}" if metric else ""
    return found


def of_log(text: str) -> dict[str, Any]:
    """Alarms that a check printed, and its slowest checks."""
    alarms = [m[1] for m in re.finditer(r"^FAIL (\w+) .*\[(?!note)", text, re.M)]
    slow = sorted(((float(m[2]), m[1]) for m in re.finditer(r"^  \w+ +([A-Z]\d+) .*? (\d+\.\d) s  ", text, re.M)), reverse=True)
    found: dict[str, Any] = {"alarms": alarms}
    return {**found, "slowest": " ".join(f"{name} {seconds:g}" for seconds, name in slow[:3])} if slow else found


def judged(row: Row, found: dict[str, Any], start: int) -> dict[str, Any]:
    """The row's limit, where it has one, and whether it is kept."""
    limit = row.limits.get(start)
    if row.over_training and "split" in found:
        limit = round(found["split"].get("train", 0.0) + row.over_training, 1)
    if limit is None:
        return {}
    return {"limit": limit, "kept": found["exit"] == 0 and found["wall"] <= limit}


# ---- the table -------------------------------------------------------------------------------------------------------------


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: wall seconds, limit, the split, and what was said."""
    laps = [*PARTS, "exit"]
    head = ["command", "start", "wall s", "limit", *(PARTS.get(lap, lap) for lap in laps), "code", "alarms", "result"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(laps) + 3) + "---|---|---|"]
    for name, row in rows.items():
        if "skipped" in row:
            lines.append(f"| {name} | | | " + "| " * (len(laps) + 2) + f"| {row['skipped']} |")
            continue
        split = row.get("split", {})
        limit = f"{row['limit']:g} {'pass' if row['kept'] else 'MISS'}" if "limit" in row else ""
        cells = [f"{split[lap]:.1f}" if split.get(lap, 0.0) >= 0.05 else "" for lap in laps]
        told = row.get("metric") or row.get("slowest") or ""
        beside = f" ({row['beside']} at once)" if row.get("beside") else ""
        shown = [row["command"], str(row["start"]), f"{row['wall']:.1f}{beside}", limit, *cells, str(row["exit"])]
        lines.append("| " + " | ".join([*shown, " ".join(row.get("alarms", [])) or "none", told]) + " |")
    return "\n".join(lines)


def shown(name: str, row: dict[str, Any]) -> str:
    """One row on one line of the terminal."""
    if "skipped" in row:
        return f"{name:<44} {row['skipped']}"
    split = " ".join(f"{PARTS.get(lap, lap)} {s:.1f}" for lap, s in row.get("split", {}).items() if s >= 0.05)
    limit = f"  limit {row['limit']:g} {'pass' if row['kept'] else 'MISS'}" if "limit" in row else ""
    alarms = f"  alarms {' '.join(row['alarms'])}" if row.get("alarms") else ""
    code = f"  exit {row['exit']}" if row["exit"] else ""
    return f"{name:<44} {row['wall']:7.1f} s{limit}{code}{alarms}  {split}{row.get('slowest', '')}"


class Results:
    """The rows measured so far, in a file that also keeps what earlier calls have measured."""

    def __init__(self, machine: str, note: str) -> None:
        self.name, self.note = f"tour-{machine}", note
        self.folder = Path(os.environ.get("SEEDBED_RESULTS", ROOT / "benchmarks" / "results"))
        self.rows: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.rows = json.loads((self.folder / f"{self.name}.json").read_text())["figures"]["rows"]
        self.commit = commit()

    def add(self, name: str, row: dict[str, Any]) -> None:
        stamp = {"commit": self.commit, "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
        self.rows[name] = {**row, **stamp}
        print(shown(name, row), flush=True)
        with contextlib.redirect_stdout(io.StringIO()):
            path = write_result(self.name, {"rows": self.rows}, self.note)
        path.with_suffix(".md").write_text(f"{self.note}\n\n{table(self.rows)}\n".lstrip())


# ---- the tour --------------------------------------------------------------------------------------------------------------


def tour(args: argparse.Namespace, place: Place, rows: list[Row], results: Results) -> None:
    end = time.monotonic() + 60.0 * args.minutes
    timed, beside = [r for r in rows if r.alone or args.jobs == 1], [r for r in rows if not r.alone and args.jobs > 1]
    prepared = False
    for row in timed:
        if row.needs:
            results.add(row.name, {"skipped": f"skipped: needs {row.needs}"})
            continue
        if USED in row.words and not prepared:
            words = ("train", "gpt/demo", "steps=20", "--run", USED, "--no-check", "--dirty")
            shutil.rmtree(place.work / "runs" / USED, ignore_errors=True)
            place.type(words, place.cache_of(row), place.root / "logs" / "used.log", end - time.monotonic())
            prepared = True
        shutil.rmtree(place.work / "exported", ignore_errors=True)
        for start in range(1, 1 + (args.starts if row.trains else 1)):
            left = end - time.monotonic()
            if left < 5.0:
                print(f"the time is over before: {row.name}, start {start}")
                return
            name = f"{row.name}, start {start}" if row.trains and args.starts > 1 else row.name
            results.add(name, measure(place, row, start, left))
        if row.trains and not args.folder:
            shutil.rmtree(place.cache_of(row), ignore_errors=True)

    def check(row: Row) -> tuple[Row, dict[str, Any]]:
        left = end - time.monotonic()
        if row.needs or left < 5.0:
            return row, {"skipped": f"skipped: needs {row.needs}" if row.needs else "skipped: the time is over"}
        return row, measure(place, row, 1, left, args.jobs)

    with ThreadPoolExecutor(args.jobs) as pool:
        for row, found in pool.map(check, beside):
            results.add(row.name, found)


def machine_name(machine: str) -> str:
    if machine == "gpu":
        return re.sub(r"\W+", "-", torch.cuda.get_device_name().removeprefix("NVIDIA ").lower())
    return f"cpu-{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only rows whose name matches this regular expression")
    parser.add_argument("--starts", type=int, default=2, help="how often each training is started")
    parser.add_argument("--steps", type=int, default=600, help="of trainings that are long by themselves")
    parser.add_argument("--minutes", type=float, default=600.0, help="no row begins, or goes on, after this")
    parser.add_argument("--jobs", type=int, default=1, help="checks that run beside each other")
    parser.add_argument("--data", type=Path, help="a folder with what presets read: tinyshakespeare.txt, cifar10 ...")
    parser.add_argument("--folder", type=Path, help="where to type, kept afterwards; otherwise one that goes away")
    parser.add_argument("--note", default="")
    parser.add_argument("--list", action="store_true", help="print the rows and measure nothing")
    args = parser.parse_args()
    machine = args.machine if args.machine != "auto" else "gpu" if torch.cuda.is_available() else "cpu"
    rows = [row for row in rows_for(machine, args.data, args.steps) if re.search(args.only, row.name)]
    if args.list:
        for row in rows:
            print(f"{row.name:<44} seedbed {' '.join(row.words)}" + (f"  (needs {row.needs})" if row.needs else ""))
        return
    with contextlib.ExitStack() as stack:
        root = args.folder.absolute() if args.folder else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results = Results(machine_name(machine), args.note)
        place = Place(root, args.data)
        tour(args, place, rows, results)
        print(f"\n{table(results.rows)}\n\nwrote {results.folder / results.name}.json and .md; logs in {root / 'logs'}")


if __name__ == "__main__":
    main()
