"""Growth of memory: what a GPU's tensors hold between steps, and what is left after garbage collections, which decides."""

import itertools
from collections import deque

import torch

from seedbed.train.watch import DEVICE_LEAST, DEVICE_RATE, MEGA, HostMemory

STEADY = 0.6  # a leak grows at a constant rate; a cache that fills grows more slowly


class DeviceMemory(HostMemory):
    """Memory of GPU tensors between steps, without what the allocator has cached."""

    kind = "device_leak"
    rate, least = DEVICE_RATE, DEVICE_LEAST

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def read(self) -> float:
        return float(torch.cuda.memory_allocated(self.device))


class Levels:
    """Memory in use after a collection, read each time that growth was suspected: the last three readings decide."""

    def __init__(self, rate: float, least: float, much: float) -> None:
        self.rate, self.least, self.much = rate, least, much
        self.seen: deque[tuple[int, float]] = deque(maxlen=3)

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
