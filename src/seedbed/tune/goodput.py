"""plan --world 64,256,1024: simulates runs that lose ranks, and finds the best interval between checkpoints on each network."""

from dataclasses import dataclass

import numpy as np
from rich.console import Console

from seedbed.track import text
from seedbed.tune.scale import PER_NODE, Scale
from seedbed.tune.show import grid

GPU = "H100 SXM"
# Hours until one GPU fails, on average: 419 interruptions of 16,384 H100 in 54 days, as the report on Llama 3 states (2024).
HOURS_PER_FAILURE = 50_000.0
# Assumed seconds from a failure to the first step after it, and bytes per second of copies to a host and of a machine's writes.
RESTART, COPIED, WRITTEN = 300.0, 20e9, 2e9
NUM_FAILURES = 20_000  # of a simulation
INTERVALS = np.geomspace(10.0, 100_000.0, 81)  # seconds between checkpoints that are tried


@dataclass(frozen=True)
class Failures:
    """Seconds between failures, from one to the next step, of a pause for a checkpoint, and until that is on the disk."""

    between: float
    restart: float
    pause: float
    write: float

    def kept(self, interval: float, seed: int = 0) -> float:
        """The share of time that ends up in the weights, simulated: work after the last finished checkpoint is lost."""
        stretches = np.random.default_rng(seed).exponential(self.between, NUM_FAILURES)
        useful = np.maximum(stretches - self.restart - self.write, 0.0)
        return float(interval * np.floor(useful / (interval + self.pause)).sum() / stretches.sum())

    def best_interval(self) -> float:
        """The interval of those tried, none shorter than a write, of which the most time is kept."""
        return float(max(np.maximum(INTERVALS, self.write), key=self.kept))


@dataclass(frozen=True)
class Goodput:
    """One line of the table: shares of the compute that communication and failures leave, and tokens per second that are kept."""

    world: int
    link: str
    efficiency: float
    hours_between: float
    pause: float
    interval: float
    kept: float
    tokens: float


def failures_of(found: Scale) -> Failures:
    """What is lost by failures in this world."""
    state = sum(found.memory[name] for name in ("weights", "moments", "averages"))
    writers = min(PER_NODE, found.degrees.shard)  # of one machine: the shards of the first replica
    between = HOURS_PER_FAILURE * 3600.0 / found.degrees.world
    return Failures(between, RESTART, state / COPIED, state * writers / WRITTEN)


def simulate(found: Scale) -> list[Goodput]:
    """The world on every network."""
    failures, world = failures_of(found), found.degrees.world
    interval = failures.best_interval()
    facts = (failures.between / 3600.0, failures.pause, interval, failures.kept(interval))
    return [Goodput(world, e.link, e.efficiency, *facts, facts[-1] * e.tokens) for e in found.speeds if e.gpu == GPU]


def show(found: list[Goodput], out: Console) -> None:
    rows = []
    for e in found:
        minutes = f"{e.interval / 60:.1f}"
        shares = (f"{share:.1%}" for share in (e.efficiency, e.kept, e.efficiency * e.kept))
        rows.append([str(e.world), e.link, f"{e.hours_between:,.0f}", f"{e.pause:.2g}", minutes, *shares, text.scaled(e.tokens)])
    names = ["ranks", "links", "fails every h", "pause s", "saves every min", "computing", "kept", "goodput", "tokens/s"]
    out.print(grid(names, rows, left=2))
    rates = f"{COPIED / 1e9:g} GB/s to the host, {WRITTEN / 1e9:g} GB/s to the disk of a machine"
    out.print(
        f"assumed: {GPU}, {HOURS_PER_FAILURE:,.0f} h per GPU and failure, restart in {RESTART:.0f} s, {rates}", markup=False
    )
