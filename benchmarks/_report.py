"""Writes one benchmark's figures beside the facts needed to repeat them: hardware, torch, commit, command, date."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def write_result(name: str, figures: dict[str, Any], note: str = "") -> Path:
    """Write `benchmarks/results/NAME.json` (or under $SEEDBED_RESULTS) and say where it is."""
    folder = Path(os.environ.get("SEEDBED_RESULTS", ROOT / "benchmarks" / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "name": name,
        "figures": figures,
        "note": note,
        "hardware": hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": command(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path


def hardware() -> dict[str, Any]:
    """What the figures were measured on, without naming the machine."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    facts = {"cpu": cpu_name(), "num_cores": len(cpus), "num_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def cpu_name() -> str:
    """The processor's model where the system tells it, its architecture otherwise."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit measured, marked when the work tree differs; $SEEDBED_COMMIT names it where git is absent."""
    if "SEEDBED_COMMIT" in os.environ:
        return os.environ["SEEDBED_COMMIT"]
    try:
        head = _git("rev-parse", "--short=12", "HEAD").strip()
        changed = [line for line in _git("status", "--porcelain").splitlines() if "benchmarks/results/" not in line]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" with uncommitted changes" if changed else "")


def command() -> str:
    """The command line as typed at the top of the repository."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
