"""Seconds from the command `seedbed sample RUN` to its first token or image, for a run of every demo preset, on the CPU.

A run has a few steps only: what it writes is noise, and takes as long as something better would. Beside the seconds on the
wall stand those of the processor, and those of `import torch` alone in the same run. Limit: 3 s on an idle machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _report import write_result

LIMIT = 3.0
DEMOS = {"gpt/demo": [], "flow/demo": [], "thinker/demo": [], "ebt/demo": [], "world/demo": ["data.frames=600"]}
SEEDBED = [sys.executable, "-m", "seedbed"]


def first_output(command: list[str], folder: str) -> tuple[float, float]:
    """Seconds on the wall and of the processor until the first byte of standard output."""
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        first = process.stdout.read(1)
        wall = time.perf_counter() - start
        user, system = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        rest, errors = process.communicate()
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {errors.decode()[-500:]}{rest.decode()[-500:]}")
    return wall, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the fastest of so many is reported")
    given = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for preset, settings in DEMOS.items():
            name = preset.split("/")[0]
            train = [*SEEDBED, "train", preset, "steps=2", *settings, "--no-check", "--run", name]
            subprocess.run(train, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        commands = {"import torch": [sys.executable, "-c", "import torch; print()"]}
        commands |= {preset: [*SEEDBED, "sample", preset.split("/")[0]] for preset in DEMOS}
        for name, command in commands.items():
            wall, cpu = min(first_output(command, folder) for _ in range(given.rounds))
            rows[name] = {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2)}
            print(f"{name:14s} {wall:6.2f} s on the wall, {cpu:6.2f} s of the processor", flush=True)
    slowest = max(row["wall_s"] for name, row in rows.items() if name in DEMOS)
    print(f"slowest: {slowest:.2f} s (limit {LIMIT:.0f} s)")
    write_result("first-output-cpu", {"limit_s": LIMIT, "slowest_s": slowest, "rows": rows})


if __name__ == "__main__":
    main()
