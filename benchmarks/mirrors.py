"""What a mirror costs a step of the d=16 loop of benchmarks/loop.py, the worst case there is; target: 1 %.

Within one run the mirror hears every second window of steps, so that what else the machine does falls on both kinds alike: each
window that it hears is compared with those before and after it. Its calls on the training thread are timed as well.
Run `python benchmarks/mirrors.py` on a quiet machine.
"""

import argparse
import itertools
import os
import statistics
import time
from typing import Any
from unittest.mock import patch

from _report import write_result
from loop import CYCLE, LOG, seedbed

from seedbed.track.mirrors import choose
from seedbed.track.mirrors.base import Mirror, Sink
from seedbed.track.run import Run
from seedbed.train import loop as training

TARGET = 0.01
SLEEPING = "sleeping 10 s a call"
WINDOW = CYCLE * LOG
NUM_FIRST = 4  # windows in which packages are loaded and allocators fill


class Sleeping(Sink):
    """A service that takes ten seconds for whatever it is asked."""

    def open(self, config: dict[str, Any]) -> None:
        time.sleep(10)

    def numbers(self, *_: Any) -> None:
        time.sleep(10)

    text = media = close = numbers


class Timed(Mirror):
    """A mirror that adds up what its calls take on the training thread."""

    spent = 0.0

    def row(self, values: dict[str, Any]) -> None:
        start = time.perf_counter()
        super().row(values)
        self.spent += time.perf_counter() - start


def sink(kind: str, run: Run) -> Sink:
    return Sleeping(run) if kind == SLEEPING else choose._kind(kind)(run)


def measure(kind: str, num_steps: int) -> tuple[list[float], float]:
    """Seconds of every window, the mirror hearing every second one, and those spent in its calls."""
    stamps: list[float] = []
    mirrors: list[Timed] = []
    take = training._take_step

    def counted(job: training.Job) -> None:
        if not mirrors:
            mirrors.append(Timed(sink(kind, job.run), lambda text: None))
        if job.step % WINDOW == 0:
            job.run.listeners = [] if len(stamps) % 2 else [mirrors[0]]
            stamps.append(time.perf_counter())
        take(job)
        if job.step == num_steps:
            job.run.listeners = []
            mirrors[0].close(time.monotonic() + 5)

    with patch.object(training, "_take_step", counted):
        seedbed(num_steps)
    return [b - a for a, b in itertools.pairwise(stamps)], mirrors[0].spent


def costs(windows: list[float]) -> list[float]:
    """How much longer each heard window took than its neighbours, as a share."""
    heard = range(NUM_FIRST, len(windows) - 1, 2)
    return [2 * windows[i] / (windows[i - 1] + windows[i + 1]) - 1 for i in heard]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    given = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    figures: dict[str, dict[str, float]] = {}
    for kind in (SLEEPING, "tensorboard", "wandb"):
        windows, spent = measure(kind, given.steps)
        found = costs(windows)
        centre = statistics.median(found)
        error = 1.86 * statistics.median(abs(value - centre) for value in found) / len(found) ** 0.5
        calls = 2 * spent / sum(windows)  # it hears one half
        figures[kind] = {"cost": centre, "standard_error": error, "in_calls": calls, "num_pairs": len(found)}
        step = 1e6 * statistics.median(windows) / WINDOW
        print(f"{kind:<22} {step:7.0f} us a step  {centre:+.2%} ± {error:.2%} with it  {calls:.3%} in its calls", flush=True)
    worst = figures[SLEEPING]
    word = "below" if worst["cost"] - 2 * worst["standard_error"] < TARGET and worst["in_calls"] < TARGET else "ABOVE"
    print(f"a service that sleeps costs {worst['cost']:+.2%}: {word} the target of {TARGET:.0%}")
    write_result("mirrors", figures, "a row every 10 steps; wandb offline")


if __name__ == "__main__":
    main()
