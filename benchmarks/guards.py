"""What guards, watchers and the ring cost on the d=16 loop of benchmarks/loop.py, as a share of a step; target: 1 %.

Every call of theirs is timed inside real runs, less what the timer itself takes, and so is every step. Medians, taken apart by
place in the cycle of looks, since what else the machine does belongs to nobody here. Run `python benchmarks/guards.py`.
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
from loop import LOG, seedbed

from seedbed.train import loop as training
from seedbed.train.engine import Engine
from seedbed.train.guard import SpikeWatch
from seedbed.train.ring import Ring
from seedbed.train.watch import LAYERS_EVERY, Watch

TARGET = 0.01
CYCLE = LAYERS_EVERY // LOG
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


def timer_seconds(count: int = 20_000) -> float:
    """What timing a call adds to it, on average: the part that the timer sees."""
    seconds: list[float] = []
    call = timed(lambda: None, seconds)
    for _ in range(count):
        call()
    return statistics.median(seconds)


def typical(values: list[float]) -> float:
    """The mean over the places in a cycle of the median at each: looks at layers are rare and long, and count as such."""
    return statistics.fmean(statistics.median(values[i::CYCLE]) for i in range(min(CYCLE, len(values))))


def measure(num_steps: int) -> tuple[float, dict[str, float]]:
    """Microseconds of a step, and of each part per step."""
    spent: dict[str, list[float]] = {name: [] for name in PARTS}
    stamps: list[float] = []
    take = training._take_step

    def stamped(job: training.Job) -> None:
        stamps.append(time.perf_counter())
        take(job)

    timer = timer_seconds()
    with ExitStack() as stack:
        for name, (kind, method) in PARTS.items():
            stack.enter_context(patch.object(kind, method, timed(getattr(kind, method), spent[name])))
        stack.enter_context(patch.object(training, "_take_step", stamped))
        seedbed(num_steps)
    parts = {name: 1e6 * (typical(values) - timer) * len(values) / num_steps for name, values in spent.items()}
    return 1e6 * typical([b - a for a, b in itertools.pairwise(stamps)]), parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = [measure(options.steps) for _ in range(options.rounds + 1)][1:]  # the first warms allocators and caches
    step = statistics.median(s for s, _ in rounds)
    shares = {name: statistics.median(parts[name] / s for s, parts in rounds) for name in PARTS}
    share = statistics.median(sum(parts.values()) / s for s, parts in rounds)
    print(f"a step takes {step:.0f} us, of which")
    for name in PARTS:
        print(f"  {name:<28} {shares[name] * step:7.2f} us  {shares[name]:7.3%}")
    print(f"  {'in all':<28} {share * step:7.2f} us  {share:7.3%}  (target: at most {TARGET:.0%})")
    facts = {"step_us": round(step, 1), "share": round(share, 5), "target_share": TARGET}
    shown = {name: round(value, 6) for name, value in shares.items()}
    write_result("guards", {**facts, "shares": shown, "rounds": options.rounds, "steps": options.steps})


if __name__ == "__main__":
    main()
