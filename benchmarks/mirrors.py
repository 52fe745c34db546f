"""What a mirror costs a step of the d=16 loop of benchmarks/loop.py, the worst case there is; target: 1 %.

Within one run the mirror hears every second window of steps, so that what else the machine does falls on both kinds alike: each
window that it hears is compared with those before and after it, by the clock on the wall and by the time that the training thread
was on a core, which a busy machine spoils less. Its calls on that thread are timed as well. Run `python benchmarks/mirrors.py`.
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

from seedbed.report.mirrors import choose
from seedbed.report.mirrors.base import Mirror, Sink
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

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        start = time.perf_counter()
        super().__call__(kind, values)
        self.spent += time.perf_counter() - start


def sink(kind: str, run: Run) -> Sink:
    return Sleeping(run) if kind == SLEEPING else choose.SINKS[kind](run)


def measure(kind: str, num_steps: int) -> tuple[list[float], list[float], float]:
    """Seconds of every window, on the wall and on a core, the mirror hearing every second one; and those spent in its calls."""
    stamps: list[tuple[float, float]] = []
    mirrors: list[Timed] = []
    take = training.take_step

    def counted(job: training.Job) -> None:
        if not mirrors:
            mirrors.append(Timed(sink(kind, job.run), lambda text: None))
        if job.step % WINDOW == 0:
            job.run.listeners = [] if len(stamps) % 2 else [mirrors[0]]
            stamps.append((time.perf_counter(), time.thread_time()))
        take(job)
        if job.step == num_steps:
            job.run.listeners = []
            mirrors[0].close(time.monotonic() + 5)

    with patch.object(training, "take_step", counted):
        seedbed(num_steps)
    wall, core = ([b[i] - a[i] for a, b in itertools.pairwise(stamps)] for i in (0, 1))
    return wall, core, mirrors[0].spent


def cost(windows: list[float]) -> tuple[float, float]:
    """How much longer a heard window took than its neighbours, as a share: the median, and its standard error."""
    heard = range(NUM_FIRST, len(windows) - 1, 2)
    found = [2 * windows[i] / (windows[i - 1] + windows[i + 1]) - 1 for i in heard]
    centre = statistics.median(found)
    return centre, 1.86 * statistics.median(abs(value - centre) for value in found) / len(found) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    given = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    figures: dict[str, dict[str, float]] = {}
    for kind in (SLEEPING, "tensorboard", "wandb"):
        wall, core, spent = measure(kind, given.steps)
        (by_wall, wall_error), (by_core, core_error) = cost(wall), cost(core)
        calls = 2 * spent / sum(wall)  # it hears one half
        figures[kind] = {"wall": by_wall, "wall_error": wall_error, "core": by_core, "core_error": core_error, "in_calls": calls}
        shown = f"wall {by_wall:+.2%} ± {wall_error:.2%}  core {by_core:+.2%} ± {core_error:.2%}  in its calls {calls:.3%}"
        print(f"{kind:<22} {1e6 * statistics.median(core) / WINDOW:6.0f} us a step  {shown}", flush=True)
    worst = figures[SLEEPING]
    word = "below" if worst["core"] < TARGET and worst["in_calls"] < TARGET else "ABOVE"
    print(f"a service that sleeps costs the training thread {worst['core']:+.2%}: {word} the target of {TARGET:.0%}")
    write_result("mirrors", figures, f"{given.steps} steps, a row every {LOG}; wandb offline")


if __name__ == "__main__":
    main()
