"""Sharded checkpoints that a thread writes while training goes on: what one costs the steps beside it.

Ranks train gpt/demo with sharded weights. Blocks of steps with a checkpoint at their start alternate with blocks without one; the
difference of their times is what a checkpoint costs, of which `pause_ms` is the copy that the step waits for. Limit: 5 % of the
steps between two checkpoints. On a CPU the thread competes with the steps for the cores; on a GPU, `--ranks 1` measures one rank.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

LIMIT = 0.05
SIZE = ["model.depth=6", "model.width=256", "model.heads=4", "data.block=64", "batch=4", "compile=off", "ema=0.9"]


def one_rank(folder: Path, turns: int, num_steps: int, every: int) -> None:
    from seedbed import config as configs
    from seedbed.dist.join import join
    from seedbed.recipes import find
    from seedbed.train import checkpoint
    from seedbed.train.async_saving import Saver
    from seedbed.train.stepper import Stepper, build

    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    recipe, preset = find("gpt/demo")
    degrees = [f"dist.shard={world}"] if world > 1 else ["dist.single=shard"]
    config = configs.override(recipe.preset(preset), [*SIZE, *degrees])
    ranks = join(config.dist, config.device)
    data = recipe.open_data(config)
    engine = build(recipe, config, data, ranks=ranks)
    stepper, saver, part = Stepper(engine, data.train), Saver(), checkpoint.Part(ranks.background, engine.rows)
    blocks: dict[bool, list[float]] = {True: [], False: []}
    pauses: list[float] = []
    step = 0
    for turn in range(2 * turns + 2):
        saves = turn % 2 == 0
        since = time.perf_counter()
        if saves:
            saver.start(folder, step, engine.tensors(), {}, part, best=False)
            pauses.append(time.perf_counter() - since)
        for _ in range(num_steps):
            stepper.step(step, step * config.batch, 0.5, 10**6)
            stepper.pop_result(0)
            step += 1
        if saves:
            saver.result()
        blocks[saves].append(time.perf_counter() - since)
    if ranks.is_primary:
        num_bytes = sum(t.nbytes for group in engine.tensors().values() for t in group.values())
        # The first block of either kind is warm-up.
        with_save, without = (statistics.median(blocks[saves][1:]) for saves in (True, False))
        report(world, num_bytes, num_steps, every, statistics.median(pauses[1:]), with_save, without)
    ranks.barrier()
    stepper.close()
    ranks.close()


def report(world: int, num_bytes: int, num_steps: int, every: int, pause: float, with_save: float, without: float) -> None:
    from _report import write_result

    step = without / num_steps
    figures: dict[str, Any] = {"ranks": world, "mb_per_rank": round(num_bytes / 1e6, 1)}
    figures |= {"step_ms": round(1e3 * step, 2), "pause_ms": round(1e3 * pause, 2), "steps_of_a_block": num_steps}
    figures |= {"checkpoint_ms": round(1e3 * (with_save - without), 1), "steps_between_checkpoints": every}
    figures |= {"share": round((with_save - without) / (every * step), 4), "limit": LIMIT}
    print(figures)
    write_result("dist-saving", figures, f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=6, help="pairs of blocks that are measured")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block: as many as a checkpoint takes, or more")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints, for the share")
    args = parser.parse_args()
    if "RANK" in os.environ:
        return one_rank(Path(os.environ["FOLDER"]), args.turns, args.steps, args.every)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(port), "FOLDER": folder}
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(args.ranks)
        ]
        status = max(process.wait() for process in ranks)
    sys.exit(status)


if __name__ == "__main__":
    main()
