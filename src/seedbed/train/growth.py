"""Detects memory that grows with steps; what evaluations and caches add comes in jumps and does not count.

Readings are compared between two garbage collections, without the first reading: freed memory is allocated again there.
"""

from __future__ import annotations

import itertools
from collections import deque

MEGA = 1e6
RISING = 5 / 6  # the share of blocks that must grow: a few may not, because a step was late or a page came back
MAX_BLOCKS = 6
STEADY = 0.6  # a leak grows at a constant rate; a cache that fills grows more slowly


class Blocks:
    """Growth per step in blocks of at least `span` steps; a shorter part of the run gives one of half that, or none."""

    def __init__(self, span: int, num: int = MAX_BLOCKS) -> None:
        self.span = span
        self.rates: deque[float] = deque(maxlen=num)
        self.num_closed = 0
        self._part: int | None = None
        self._start: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._closed_here = self._is_joined = False

    def add(self, step: int, value: float, part: int) -> None:
        """A reading after `step` steps, in the `part`th part of the run."""
        if part != self._part:
            self._begin(part)
            return
        self._last = (step, value)
        if self._start is None:
            self._start = self._last
        elif step - self._start[0] >= self.span:
            self._close()

    def _begin(self, part: int) -> None:
        """The first reading of a part is not used: memory that was returned is still being allocated again."""
        if self._start and self._last and self._last[0] - self._start[0] >= self.span / 2 and not self._is_joined:
            self._close()
        if self._closed_here:
            self._start = None
        self._is_joined = self._start is not None  # parts that are too short for a block are joined, jumps and all
        self._part, self._closed_here = part, False

    def _close(self) -> None:
        assert self._start and self._last
        self.rates.append((self._last[1] - self._start[1]) / (self._last[0] - self._start[0]))
        self.num_closed += 1
        self._start, self._closed_here, self._is_joined = self._last, True, False

    def rising(self, rate: float) -> bool:
        """Whether nearly all of the last blocks grew by at least `rate` per step."""
        full = len(self.rates) == self.rates.maxlen
        return full and sum(r >= rate for r in self.rates) >= RISING * len(self.rates)


class Levels:
    """Memory in use after a collection, read each time that growth was suspected: the last three readings decide."""

    def __init__(self, rate: float, least: float, much: float) -> None:
        self.rate, self.least, self.much = rate, least, much
        self.seen: deque[tuple[int, float]] = deque(maxlen=3)

    def add(self, step: int, value: float) -> None:
        self.seen.append((step, value))

    def in_mega(self) -> list[tuple[int, float]]:
        """Steps and megabytes, for a person."""
        return [(step, round(value / MEGA, 2)) for step, value in self.seen]

    def growth(self) -> tuple[float, float]:
        """Bytes per step and total bytes that remain after collections, or zeros: two gains, or a large one."""
        found = list(self.seen)
        gains = [(b - a, (b - a) / (t - s)) for (s, a), (t, b) in itertools.pairwise(found) if t > s]
        rates = [rate for _, rate in gains]
        if len(gains) == 2 and min(rates) >= max(self.rate, STEADY * max(rates)) and sum(g for g, _ in gains) >= self.least:
            return (found[-1][1] - found[0][1]) / (found[-1][0] - found[0][0]), found[-1][1] - found[0][1]
        if gains and gains[-1][0] >= self.much and gains[-1][1] >= self.rate:
            return gains[-1][1], gains[-1][0]
        return 0.0, 0.0
