"""How fast the feed delivers, against plain copies of as many bytes in the same process, turn by turn."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from seedbed.data.feed import NUM_SLOTS, Feed, Source

# Enough memory for a plain copy not to live in a cache.
POOL = 256 << 20
NUM_WARM, MIN_ROUNDS, SECONDS = 3, 30, 2.0
# One turn: long enough to be a stream of batches, short enough that most turns are not interrupted.
TURN = 0.002


def compare(source: Source, *, batch: int, limit_bytes: int | None = None) -> dict[str, Any]:
    """GB/s of the feed on the CPU, of a tensor's `copy_` and of numpy's (a bare memcpy): medians of short turns.

    All three end with the same bytes in host memory: a batch as the model takes it.
    """
    feed = Feed(source, batch=batch, parts=1, seed=1, device=torch.device("cpu"), limit_bytes=limit_bytes)
    counter = 0

    def step() -> int:
        nonlocal counter
        feed.load(counter)
        counter += batch
        return sum(tensor.nbytes for name, tensor in feed.part(0).items() if name != "index")

    num_bytes = step()
    copy, memcpy = _plain_copies(num_bytes)
    # A reading thread works on through the others' turns, so its own turn must be longer than its store of ready batches.
    least = 1 if feed.tier == "device" else 4 * NUM_SLOTS
    taken = _in_turn({"feed": step, "copy": copy, "memcpy": memcpy}, least)
    feed.close()
    facts = {"tier": feed.tier, "batch": batch, "bytes_per_batch": num_bytes, "num_threads": torch.get_num_threads()}
    speeds = {name: {"ms": round(t * 1e3, 4), "gb_per_s": round(num_bytes / t / 1e9, 3)} for name, t in taken.items()}
    ratios = {"ratio": round(taken["copy"] / taken["feed"], 3), "ratio_memcpy": round(taken["memcpy"] / taken["feed"], 3)}
    return facts | speeds | ratios


def _plain_copies(num_bytes: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two ways to copy the next bytes of a large memory, as one block, into memory that is ready."""
    pool, target = np.ones(max(POOL, 4 * num_bytes), np.uint8), np.ones(num_bytes, np.uint8)
    tensor, there = torch.from_numpy(pool), torch.from_numpy(target)
    place = 0

    def advance() -> slice:
        nonlocal place
        place = 0 if place + 2 * num_bytes > len(pool) else place + num_bytes
        return slice(place, place + num_bytes)

    return lambda: there.copy_(tensor[advance()]), lambda: np.copyto(target, pool[advance()])


def _in_turn(ways: dict[str, Callable[[], Any]], least: int) -> dict[str, float]:
    """The median time of a call of each way. They take turns, so that what else the machine does strikes all alike."""
    repeats = {name: max(least, int(TURN / _timed(act, 3))) for name, act in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + SECONDS
    while len(taken["feed"]) < NUM_WARM + MIN_ROUNDS or time.perf_counter() < end:
        for name, act in ways.items():
            taken[name].append(_timed(act, repeats[name]))
    return {name: statistics.median(values[NUM_WARM:]) for name, values in taken.items()}


def _timed(act: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        act()
    return (time.perf_counter() - start) / count
