"""Two replicas over gloo on one CPU: how long a step waits for gradients sent during and after the backward pass.

Both ways alternate in one run. Exposed communication is the time that `Reducer.finish` takes: to send what is
left, and to wait for what has not arrived. With as many ranks as cores, what overlaps competes with the backward pass for them.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

# 4.8 M parameters in buckets of 4 MiB.
SIZE = ["model.depth=6", "model.width=256", "model.heads=4", "data.block=64", "batch=4", "device=cpu", "compile=off"]


def one_rank(turns: int, num_steps: int) -> None:
    from seedbed import config as configs
    from seedbed.dist import reducer
    from seedbed.dist.join import join
    from seedbed.dist.reducer import Reducer
    from seedbed.recipes import find
    from seedbed.train.stepper import Stepper, build

    torch.set_num_threads(1)
    reducer.BUCKET_BYTES = 4 << 20
    recipe, preset = find("gpt/demo")
    config = configs.override(recipe.preset(preset), [*SIZE, f"dist.replicate={os.environ['WORLD_SIZE']}"])
    ranks = join(config.dist, "cpu")
    data = recipe.open_data(config)
    engine = build(recipe, config, data, ranks=ranks)
    stepper = Stepper(engine, data.train)
    start, finish = Reducer.start, Reducer.finish
    exposed: list[float] = []

    def timed(self: Reducer) -> None:
        since = time.perf_counter()
        finish(self)
        exposed[-1] += time.perf_counter() - since

    Reducer.finish = timed
    found: dict[str, list[tuple[float, float]]] = {"during": [], "after": []}
    for turn in range(2 * turns + 2):
        way = ("during", "after")[turn % 2]
        Reducer.start = start if way == "during" else lambda self: None
        for _ in range(num_steps):
            exposed.append(0.0)
            since = time.perf_counter()
            stepper.step(len(exposed) - 1, (len(exposed) - 1) * config.batch, 0.5, 10**6)
            stepper.pop_result(0)
            if turn >= 2:  # the first two are warm-up
                found[way].append((exposed[-1], time.perf_counter() - since))
    if ranks.is_primary:
        report(found, sum(p.numel() for p in engine.system.parameters()), ranks.world)
    ranks.close()


def report(found: dict[str, list[tuple[float, float]]], num: int, world: int) -> None:
    from _report import write_result

    figures: dict[str, Any] = {"ranks": world, "parameters": num}
    for way, steps in found.items():
        waits, times = ([1e3 * s[k] for s in steps] for k in (0, 1))
        figures[way] = {"exposed_ms": round(statistics.median(waits), 2), "step_ms": round(statistics.median(times), 2)}
        print(f"sent {way:6} the backward pass: {figures[way]}", flush=True)
    for key in ("exposed_ms", "step_ms"):
        figures[f"{key}_ratio"] = round(figures["during"][key] / figures["after"][key], 3)
        print(f"{key}: {figures[f'{key}_ratio']} of that without overlap")
    write_result("dist-overlap", figures, f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=6, help="turns of either way that are measured")
    parser.add_argument("--steps", type=int, default=5, help="steps of one turn")
    args = parser.parse_args()
    if "RANK" in os.environ:
        return one_rank(args.turns, args.steps)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(port)
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(args.ranks)
    ]
    sys.exit(max(process.wait() for process in ranks))


if __name__ == "__main__":
    main()
