"""flow on CIFAR-10 with one GPU: train for some minutes, then the whole table of evaluation beside its oracle rows.

The goal is 85 % of 10,000 samples classified as the conditioned class, after at most 8 minutes of training on one H200.
`python benchmarks/flow_cifar.py --images FOLDER --minutes 7.5`; `--run NAME --runs DIR` examines a run that is there already.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _report import write_result

WANTED = 0.85


def seedbed(folder: Path, *words: str) -> str:
    """A command as a person types it; what it says is shown when it fails."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "seedbed", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"seedbed {' '.join(words)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def examine(folder: Path, run: str, guidance: float, num: int) -> dict[str, Any]:
    print(seedbed(folder, "sample", run, "--examine", str(num), "--guidance", str(guidance)), flush=True)
    table = json.loads((folder / "runs" / run / "samples" / "asked" / "full_evaluation.json").read_text())
    status = json.loads((folder / "runs" / run / "status.json").read_text())
    config = json.loads((folder / "runs" / run / "config.json").read_text())["config"]
    clock = {name: round(seconds, 1) for name, seconds in status["clock"].items()}
    return {"guidance": guidance, "table": table, "steps": status["step"], "batch": config["batch"], "seconds": clock}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="a folder with train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--runs", type=Path, help="the folder that holds runs/, with --run")
    parser.add_argument("--run", default="")
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, run = args.runs or Path(name), args.run or "cifar"
        if not args.run:
            words = [f"data.images={Path(args.images).resolve()}", f"budget={60 * args.minutes}", *args.settings]
            seedbed(folder, "train", "flow/cifar10", *words, "--run", run, "--dirty")
        found = examine(folder, run, args.guidance, args.num)
        seedbed(folder, "sample", run, "--grid", "8x10", "--guidance", str(args.guidance))
        asked = folder / "runs" / run / "samples" / "asked"
        path = write_result("flow-cifar10-h200", found)
        for picture in asked.glob("*.png"):
            shutil.copy(picture, path.parent / f"flow-cifar10-{picture.name}")
    share = found["table"]["rows"]["samples"]["accuracy"]
    print(f"{100 * share:.1f} % of {args.num:,} samples have the conditioned class; the target is {100 * WANTED:.0f} %")


if __name__ == "__main__":
    main()
