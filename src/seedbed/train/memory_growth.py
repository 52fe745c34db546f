"""Growth of memory that is left after garbage collections, which decides; loaded when growth is suspected."""

import itertools
from collections import deque

from seedbed.train.watch import MEGA, Limits

STEADY = 0.6  # a leak grows at a constant rate; a cache that fills grows more slowly


class Levels:
    """Memory in use after a collection, read each time that growth was suspected: the last three readings decide."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.seen: deque[tuple[int, float]] = deque(maxlen=3)

    def in_mega(self) -> list[tuple[int, float]]:
        """Steps and megabytes, for a person."""
        return [(step, round(value / MEGA, 2)) for step, value in self.seen]

    def growth(self) -> tuple[float, float]:
        """Bytes per step and total bytes that remain after collections, or zeros: two gains, or a large one."""
        found = list(self.seen)
        gains = [(b - a, (b - a) / (t - s)) for (s, a), (t, b) in itertools.pairwise(found) if t > s]
        rates, limits = [rate for _, rate in gains], self.limits
        if len(gains) == 2 and min(rates) >= max(limits.rate, STEADY * max(rates)) and sum(g for g, _ in gains) >= limits.least:
            return (found[-1][1] - found[0][1]) / (found[-1][0] - found[0][0]), found[-1][1] - found[0][1]
        if gains and gains[-1][0] >= limits.much and gains[-1][1] >= limits.rate:
            return gains[-1][1], gains[-1][0]
        return 0.0, 0.0
