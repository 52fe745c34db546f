"""Benchmark of the feed against plain copies of as many bytes in the same process, interleaved."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from seedbed.data.feed import Feed, Source
from seedbed.data.prefetch import NUM_SLOTS

# Larger than the processor's caches.
POOL = 256 << 20
NUM_STRETCHES, MIN_ROUNDS, SECONDS = 16, 5, 5.0
# Seconds of one measurement: a stream of batches, yet short enough that most are not interrupted.
TURN = 0.004


def compare(source: Source, *, batch: int, limit_bytes: int | None = None) -> dict[str, Any]:
    """GB/s of the feed on the CPU, of a tensor's `copy_` and of numpy's (a bare memcpy): medians of short turns.

    All three end with the same bytes in host memory: a batch as the model takes it. Ratios are of wall time, those named
    `_cpu` of processor time, which tells more on a busy machine.
    """
    feed = Feed(source, batch=batch, parts=1, seed=1, device=torch.device("cpu"), limit_bytes=limit_bytes)
    counter = 0

    def step() -> dict[str, torch.Tensor]:
        nonlocal counter
        feed.load(counter)
        counter += batch
        return feed.part(0)

    num_bytes = sum(tensor.nbytes for name, tensor in step().items() if name != "index")
    copy, memcpy = _plain_copies(num_bytes)
    # A reading thread works on through the others' turns, so its own turn must be longer than its store of ready batches.
    least = 1 if feed.tier == "device" else 4 * NUM_SLOTS
    taken = _in_turn({"feed": step, "copy": copy, "memcpy": memcpy}, least)
    feed.close()
    result: dict[str, Any] = {"tier": feed.tier, "batch": batch, "bytes_per_batch": num_bytes}
    result["num_threads"] = torch.get_num_threads()
    for name, (wall, cpu) in taken.items():
        result[name] = {"ms": round(wall * 1e3, 4), "cpu_ms": round(cpu * 1e3, 4), "gb_per_s": round(num_bytes / wall / 1e9, 3)}
    for plain, name in (("copy", "ratio"), ("memcpy", "ratio_memcpy")):
        result[name] = round(taken[plain][0] / taken["feed"][0], 3)
        result[f"{name}_cpu"] = round(taken[plain][1] / taken["feed"][1], 3)
    return result


def _plain_copies(num_bytes: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    pool, target = np.ones(max(POOL, 4 * num_bytes), np.uint8), np.ones(num_bytes, np.uint8)
    tensor, there = torch.from_numpy(pool), torch.from_numpy(target)
    place = 0

    def advance() -> slice:
        nonlocal place
        place = 0 if place + 2 * num_bytes > len(pool) else place + num_bytes
        return slice(place, place + num_bytes)

    return lambda: there.copy_(tensor[advance()]), lambda: np.copyto(target, pool[advance()])


def _in_turn(ways: dict[str, Callable[[], Any]], least: int) -> dict[str, tuple[float, float]]:
    """Wall and processor time of a call of each way: the median of turns, in the stretch that was least disturbed.

    The ways take turns, so that what else the machine does strikes all of them; neighbours come and go within seconds.
    """
    # The quickest of some calls: one that was interrupted would make turns so short that every call is the first.
    repeats = {name: max(least, int(TURN / min(_timed(act, 1)[0] for _ in range(20)))) for name, act in ways.items()}
    best = {name: (math.inf, math.inf) for name in ways}
    for _ in range(NUM_STRETCHES):
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        end = time.perf_counter() + SECONDS / NUM_STRETCHES
        while len(taken["feed"]) < MIN_ROUNDS or time.perf_counter() < end:
            for name, act in ways.items():
                taken[name].append(_timed(act, repeats[name]))
        for name, times in taken.items():
            walls, cpus = zip(*times, strict=True)
            best[name] = min(best[name][0], statistics.median(walls)), min(best[name][1], statistics.median(cpus))
    return best


def _timed(act: Callable[[], Any], count: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        act()
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count
