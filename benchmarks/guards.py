"""What guards, watchers and the step history cost on the d=16 loop of benchmarks/loop.py, as a share of a step; target: 1 %.

Every call of theirs is timed inside real runs, less what the timer itself takes. Steps are cut into windows of ten, one log point
each, and the windows of all rounds pooled; at each place in the cycle of looks the quietest quarter counts, chosen by the length
of the whole window, since what else the machine does belongs to nobody here. Run `python benchmarks/guards.py`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from _report import write_result
from loop import CYCLE, LOG, NUM_WARM, seedbed

from seedbed.train import loop as training
from seedbed.train.engine import Engine
from seedbed.train.guard import SpikeWatch
from seedbed.train.stepper import StepHistory
from seedbed.train.watch import LAYERS_EVERY, Watch

TARGET = 0.01
QUIET = 0.25
PARTS = {
    "finite guard, in the step": (Engine, "_guard"),
    "step history, before a step": (StepHistory, "add"),
    "step history, after a step": (StepHistory, "record"),
    "spike statistic": (SpikeWatch, "spikes"),
    "watchers, at log points": (Watch, "look"),
}


def timed(real: Callable[..., Any], spent: list[float], timer: float = 0.0) -> Callable[..., Any]:
    """`real`, whose time is added to `spent`."""

    def call(*given: Any) -> Any:
        time.perf_counter()  # a clock that has not been asked for a while answers late, which is not the part's fault
        start = time.perf_counter()
        out = real(*given)
        spent[0] += time.perf_counter() - start - timer
        return out

    return call


def timer_seconds(count: int = 2000) -> float:
    """What timing a call adds to it: the part that the timer sees."""
    seconds = []
    for _ in range(count):
        spent = [0.0]
        timed(lambda: None, spent)()
        seconds.append(spent[0])
    return statistics.median(seconds)


def measure(num_steps: int) -> np.ndarray:
    """Microseconds per step in each window after warm-up, in whole cycles: of the step, then of each part."""
    spent = {name: [0.0] for name in PARTS}
    stamps: list[list[float]] = []
    take = training.take_step

    def stamped(job: training.Job) -> None:
        stamps.append([time.perf_counter(), *(seconds for (seconds,) in spent.values())])
        take(job)

    timer = timer_seconds()
    with ExitStack() as stack:
        for name, (kind, method) in PARTS.items():
            stack.enter_context(patch.object(kind, method, timed(getattr(kind, method), spent[name], timer)))
        stack.enter_context(patch.object(training, "take_step", stamped))
        seedbed(num_steps)
    edges_W = np.array(stamps)[NUM_WARM::LOG]
    num_windows = (len(edges_W) - 1) // CYCLE * CYCLE
    return 1e6 * np.diff(edges_W[: num_windows + 1], axis=0) / LOG


def quiet(rounds: list[np.ndarray]) -> np.ndarray:
    """Microseconds of a step and of each part, in the quietest windows at each place in the cycle."""
    windows_WC = np.concatenate(rounds)
    found = []
    for place in range(CYCLE):
        here_WC = windows_WC[place::CYCLE]
        order_W = here_WC[:, 0].argsort()
        found.append(np.median(here_WC[order_W[: max(1, int(QUIET * len(order_W)))]], axis=0))
    return np.mean(found, axis=0)


def share(rounds: list[np.ndarray]) -> float:
    step, *parts = quiet(rounds)
    return float(sum(parts) / step)


def verdict(whole: float, halves: list[float]) -> str:
    """Met or missed only where both halves of the rounds say the same."""
    agreed = {x <= TARGET for x in (whole, *halves)}
    return "not resolved: the halves of the rounds disagree" if len(agreed) > 1 else "met" if agreed.pop() else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=NUM_WARM + 3 * LAYERS_EVERY + 1)
    options = parser.parse_args()
    if options.rounds < 2 or options.steps <= NUM_WARM + LAYERS_EVERY:
        parser.error(f"at least 2 rounds of more than {NUM_WARM + LAYERS_EVERY} steps")
    torch.set_num_threads(1)
    rounds = [measure(options.steps) for _ in range(options.rounds + 1)][1:]  # the first warms allocators and caches
    step, *parts = (float(x) for x in quiet(rounds))
    whole, halves = share(rounds), [share(rounds[0::2]), share(rounds[1::2])]
    shown = verdict(whole, halves)
    print(f"a step takes {step:.0f} us, of which")
    for name, value in zip(PARTS, parts, strict=True):
        print(f"  {name:<28} {value:7.2f} us  {value / step:7.3%}")
    print(f"  {'in all':<28} {whole * step:7.2f} us  {whole:7.3%}  by even rounds {halves[0]:.3%}, by odd ones {halves[1]:.3%}")
    print(f"{shown} (target: at most {TARGET:.0%})")
    facts = {"step_us": round(step, 1), "share": round(whole, 5), "halves": [round(x, 5) for x in halves], "verdict": shown}
    shares = {name: round(value / step, 6) for name, value in zip(PARTS, parts, strict=True)}
    counts = {"rounds": options.rounds, "steps": options.steps}
    write_result("guards", {**facts, "target_share": TARGET, "shares": shares, **counts})


if __name__ == "__main__":
    main()
