"""What guards, watchers and the ring cost on the d=16 loop of benchmarks/loop.py, as a share of a step; target: 1 %.

Every call of theirs is timed inside real runs, and so is every step. Means without the slowest hundredth, which belongs to
whatever else the machine was doing. Run `python benchmarks/guards.py`.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from _report import write_result
from loop import seedbed

from seedbed.train import loop as training
from seedbed.train.engine import Engine
from seedbed.train.guard import SpikeWatch
from seedbed.train.ring import Ring
from seedbed.train.watch import Watch

TARGET = 0.01
PARTS = {
    "finite guard, in the step": (Engine, "_guard"),
    "ring, before a step": (Ring, "take"),
    "ring, after a step": (Ring, "measure"),
    "spike statistic": (SpikeWatch, "spikes"),
    "watchers, at log points": (Watch, "look"),
}


def timed(real: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        start = time.perf_counter()
        out = real(*given)
        seconds.append(time.perf_counter() - start)
        return out

    return call


def trimmed(values: list[float]) -> float:
    return statistics.fmean(sorted(values)[: max(1, len(values) * 99 // 100)])


def measure(num_steps: int) -> tuple[float, dict[str, float]]:
    """Microseconds of a step, and of each part per step."""
    spent: dict[str, list[float]] = {name: [] for name in PARTS}
    stamps: list[float] = []
    take = training._take_step

    def stamped(job: training.Job) -> None:
        stamps.append(time.perf_counter())
        take(job)

    with ExitStack() as stack:
        for name, (kind, method) in PARTS.items():
            stack.enter_context(patch.object(kind, method, timed(getattr(kind, method), spent[name])))
        stack.enter_context(patch.object(training, "_take_step", stamped))
        seedbed(num_steps)
    steps = [b - a for a, b in itertools.pairwise(stamps)]
    parts = {name: 1e6 * trimmed(values) * len(values) / num_steps for name, values in spent.items()}
    return 1e6 * statistics.median(steps), parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = [measure(options.steps) for _ in range(options.rounds + 1)][1:]  # the first warms allocators and caches
    step = statistics.median(s for s, _ in rounds)
    figures: dict[str, float] = {}
    print(f"a step takes {step:.0f} us, of which")
    for name in PARTS:
        figures[name] = round(statistics.median(parts[name] for _, parts in rounds), 2)
        print(f"  {name:<28} {figures[name]:7.2f} us  {figures[name] / step:7.3%}")
    total = sum(figures.values())
    print(f"  {'in all':<28} {total:7.2f} us  {total / step:7.3%}  (target: at most {TARGET:.0%})")
    facts = {"step_us": round(step, 1), "total_us": round(total, 2), "share": round(total / step, 5), "target_share": TARGET}
    write_result("guards", {**facts, "parts_us": figures, "rounds": options.rounds, "steps": options.steps})


if __name__ == "__main__":
    main()
