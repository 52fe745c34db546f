"""Watchers of a live run: data loading, memory, layers, learning rates and evaluations. Nothing here waits for the device.

They run at log points, between steps, so a captured step is unchanged. Every kind of alarm is raised once.
"""

import functools
import itertools
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from seedbed.config import Config
from seedbed.data.feed import Feed
from seedbed.dist import local
from seedbed.nn import eagerly
from seedbed.train import guard
from seedbed.train.engine import Engine
from seedbed.train.optim import multiplier
from seedbed.train.stepper import Readback
from seedbed.train.system import baselines

if TYPE_CHECKING:
    from seedbed.train.memory_growth import Levels

MEGA = 1e6
# Data: the share of waiting that raises an alarm, over this many steps, and the seconds per step below which none is raised:
# where the host gathers batches itself, clean runs spend 10 to 60 microseconds a step, ten times that on a busy machine.
WAIT_SHARE, WAIT_STEPS = 0.10, 100
WAIT_SECONDS = {"cpu": 1e-3, "cuda": 2e-4, "mps": 2e-4}
# Memory, in bytes per step and in total: after a garbage collection, memory of clean runs varies by at most 0.6 MB on the host,
# and not at all on a GPU. Blocks of this many steps raise a suspicion, short ones for fast growth; a collection then decides.
MEMORY_EVERY, BLOCK, SHORT_BLOCK = 20, 100, 20
RISING = 5 / 6  # the share of blocks that must grow: a few may not, because a step was late or a page came back
# Layers: a tensor's first moment this far below its own peak, while the model as a whole still learns, is dead.
DEAD, ALIVE = 1e-6, 1e-3
LAYERS_FROM, LAYERS_EVERY = 10, 100
# Weights: healthy ones have an rms of 0.01 to 2; ten times the first look and above this is an explosion.
HUGE_RMS, HUGE_GROWTH = 10.0, 10.0
FLOOR_FROM, FLOOR_PROGRESS, FLOOR_LOSSES = 200, 0.1, 20
STUCK_EVALUATIONS, STUCK_RATE = 3, 0.01


@dataclass(frozen=True)
class Alarm:
    """What was seen, where, why it matters and what to do; `kind` is the kind of the event."""

    kind: str
    what: str
    where: str
    why: str
    fix: str
    facts: dict[str, Any] = field(default_factory=dict)


def _alarm(kind: str, *facts: Any) -> Alarm:
    """An alarm in words, which are loaded when one is raised."""
    from seedbed.train.alarms import ALARMS

    return ALARMS[kind](*facts)


class Point(NamedTuple):
    """A log point as the watchers see it."""

    step: int
    last_step: int
    seconds: float
    wait: float
    loss: float
    lr_factor: float
    progress: float


class Limits(NamedTuple):
    """Of growing memory: in bytes per step, in total after three collections, and the bytes for which one collection suffices."""

    kind: str
    rate: float
    least: float
    much: float
    first_step: int
    confirm: int  # blocks until growth that was not confirmed is suspected again
    blocks: tuple[tuple[float, int, int], ...]  # rate, steps and number of each kind


FAST = (50 * MEGA / 1000, SHORT_BLOCK, 12)
HOST = Limits("host_leak", 5 * MEGA / 1000, 3 * MEGA, 32 * MEGA, 50, 3, ((5 * MEGA / 1000, BLOCK, 6), FAST))
DEVICE = Limits("device_leak", 0.4 * MEGA / 1000, 0.2 * MEGA, 32 * MEGA, 50, 3, ((0.4 * MEGA / 1000, BLOCK, 6), FAST))
# What the allocator counts as in use is exact: between steps it varies by 2 kB in clean demos. Evaluations add 0.1 to 50 MB once.
COUNTED = HOST._replace(least=0.3 * MEGA, much=math.inf, first_step=20, confirm=2, blocks=((HOST.rate, SHORT_BLOCK, 4),))


class Watch:
    """All watchers of one run, in this process."""

    def __init__(self, engine: Engine, feed: Feed) -> None:
        self.loader, self.rates, self.layers = Loader(feed), Rates(engine), Layers(engine)
        host = ((HOST, _resident), (COUNTED, guard.allocated))
        self.memories = [Memory(limits, read) for limits, read in host if read() is not None]
        if engine.device.type == "cuda":
            self.memories.append(Memory(DEVICE, functools.partial(torch.cuda.memory_allocated, engine.device)))
        self.floor, self.evaluations = Floor(), Evaluations()
        self.raised: set[str] = set()

    def look(self, point: Point, own: Sequence[Alarm] = ()) -> list[Alarm]:
        """New alarms at a log point, the recipe's own among them."""
        self.floor.losses.append(point.loss)
        memory = [memory.look(point) for memory in self.memories]
        return self._new([self.loader.look(point), self.rates.look(point), *self.layers.look(point.step), *own, *memory])

    def evaluated(self, step: int, numbers: dict[str, float], engine: Engine, feed: Feed, progress: float) -> list[Alarm]:
        """New alarms after an evaluation."""
        rate = multiplier(engine.config.schedule, progress)
        return self._new([self.evaluations.look(numbers, rate), self.floor.look(step, progress, engine, feed)])

    def end(self) -> list[Alarm]:
        """Alarms of the last readings."""
        return self._new(self.layers.read())

    def _new(self, found: Sequence[Alarm | None]) -> list[Alarm]:
        if not any(found):  # nearly always empty
            return []
        fresh = {alarm.kind: alarm for alarm in found if alarm and alarm.kind not in self.raised}
        self.raised |= fresh.keys()
        return list(fresh.values())


class Loader:
    """The share of time that the loop waited for data, over at least a hundred steps."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.points: deque[Point] = deque()

    def look(self, point: Point) -> Alarm | None:
        if self.points and point.step <= self.points[-1].step:
            self.points.clear()
        self.points.append(point)
        while len(self.points) > 2 and point.step - self.points[1].step >= WAIT_STEPS:
            self.points.popleft()
        first = self.points[0]
        steps = point.step - first.step
        if steps < WAIT_STEPS or point.wait - first.wait < 0.5 * WAIT_SHARE * (point.seconds - first.seconds):
            return None
        # Medians: intervals in which the machine was busy with something else do not count.
        pairs = [(a, b) for a, b in itertools.pairwise(self.points) if b.seconds > a.seconds]
        if not pairs:
            return None
        share = statistics.median((b.wait - a.wait) / (b.seconds - a.seconds) for a, b in pairs)
        wait = statistics.median((b.wait - a.wait) / (b.step - a.step) for a, b in pairs)
        if share < WAIT_SHARE or wait < WAIT_SECONDS[self.feed.device.type]:
            return None
        return _alarm("data_wait", self.feed, steps, share, wait)


class Memory:
    """Growth of memory during steps: this process's own, by its pages or its allocator's count, or that of tensors on a GPU.

    Readings at log points raise a suspicion; memory left after a garbage collection confirms it.
    """

    def __init__(self, limits: Limits, read: Callable[[], float | None]) -> None:
        self.limits, self.read = limits, read
        self.blocks = {rate: Blocks(span, num) for rate, span, num in limits.blocks}
        self.levels: Levels | None = None
        self.taken = self.last_step = self.last_read = self.num_suspicions = 0
        self.wait: dict[float, int] = dict.fromkeys(self.blocks, 0)

    def look(self, point: Point) -> Alarm | None:
        # Steps of this process: a roll-back resets the run's step, not its memory.
        self.taken += max(point.step - self.last_step, 0) if self.last_step else 0
        self.last_step = point.step
        if self.taken < self.limits.first_step or (self.last_read and self.taken - self.last_read < MEMORY_EVERY):
            return None
        self.last_read, value, part = self.taken, self.read() or 0.0, guard.num_collections()
        suspected = False
        for rate, blocks in self.blocks.items():
            blocks.add(self.taken, value, part if blocks.span == BLOCK else 0)  # short blocks detect fast growth
            if blocks.num_closed >= self.wait[rate] and blocks.rising(rate):
                self.num_suspicions, suspected = self.num_suspicions + 1, True
                # Growth that three collections did not confirm is garbage: they become rarer.
                self.wait[rate] = blocks.num_closed + self.limits.confirm * 2 ** max(0, self.num_suspicions - 2)
        return self._confirm(point) if suspected else None

    def _confirm(self, point: Point) -> Alarm | None:
        from seedbed.train.memory_growth import Levels

        guard.gc_collect()
        self.levels = self.levels or Levels(self.limits)
        self.levels.seen.append((self.taken, self.read() or 0.0))
        slope, grown = self.levels.growth()
        return _alarm(self.limits.kind, self.levels, slope, grown, point) if slope > 0 else None


def _resident() -> float | None:
    """Bytes of this process's own memory, without pages of mapped files; None where the system does not provide it."""
    file = _open_statm(os.getpid())
    if file is None:
        return None
    _, resident, shared, *_ = os.pread(file, 200, 0).split()
    return float(int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _open_statm(pid: int) -> int | None:
    """Kept open, since opening costs more than reading; by process, since it describes the process that opened it."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY)
    except OSError:
        return None


class Rates:
    """The learning rate that a step used, compared with base learning rate times schedule."""

    def __init__(self, engine: Engine) -> None:
        self.config: Config = engine.config
        self.groups = [g for o in engine.optimizers.values() for g in o.groups]
        self.base = [g.lr for g in self.groups]

    def look(self, point: Point) -> Alarm | None:
        wanted = multiplier(self.config.schedule, point.progress, point.step)
        for group, base in zip(self.groups, self.base, strict=True):
            used, meant = group.lr * point.lr_factor, base * wanted
            if abs(used - meant) > 1e-5 * base:
                return _alarm("schedule", point.step, self.config.schedule.kind, group.name, used, meant)
        return None


class Layers:
    """Norms of every weight and of its first moment, computed between steps and read at the next log point."""

    def __init__(self, engine: Engine) -> None:
        self.names: list[str] = []
        self.optimizers: list[str] = []
        params: list[Tensor] = []
        self.moments: list[Tensor] = []
        for optimizer_name, optimizer in engine.optimizers.items():
            found = {n: p for g in optimizer.groups for n, p in g.params.items()}
            for name, tensor in optimizer.tensors().items():
                prefix, _, rest = name.partition(".")
                if prefix in ("mean", "momentum"):
                    owner = rest if prefix == "mean" else rest.rpartition(".")[0]
                    self.names.append(owner)
                    self.optimizers.append(optimizer_name)
                    self.moments.append(tensor)
                    params.append(found[owner])
        self.params = [local(p).detach() for p in params]
        self.ranks = engine.ranks
        # Sharded weights and their moments; Muon's momenta are not sharded.
        sharded = [hasattr(p, "to_local") for p in params]
        sharded += [hasattr(p, "to_local") and m.shape == local(p).shape for p, m in zip(params, self.moments, strict=True)]
        self.is_sharded = torch.tensor(sharded, device=engine.device) if any(sharded) else None
        self.sizes = [p.numel() for p in params]
        self.readback = Readback(engine.device)
        self.first: list[float] | None = None
        self.peaks = [0.0] * len(self.names)
        self.last_look = self.looks = 0

    def look(self, step: int) -> list[Alarm]:
        if step < self.last_look:
            self.readback.drop()
            self.last_look = step
        if step < LAYERS_FROM or (self.looks and step - self.last_look < LAYERS_EVERY):
            return []
        found = self.read()
        self.looks, self.last_look = self.looks + 1, step
        vector = torch.stack(torch._foreach_norm([*self.params, *self.moments])).float()
        if self.is_sharded is not None:
            vector = torch.where(self.is_sharded, self.ranks.sum_over_shards(vector.square()).sqrt(), vector)
        self.readback.push(step, vector)
        return found

    def read(self) -> list[Alarm]:
        """Check the previous reading, which has arrived by now."""
        found = self.readback.pop(leave=0)
        if found is None:
            return []
        (step, values), count = found, len(self.names)
        weights, moments = values[:count], values[count:]
        self.peaks = [max(a, b) for a, b in zip(self.peaks, moments, strict=True)]
        alarms = [*self._unused(step), *self._dead(moments), *self._huge(weights)]
        self.first = self.first or weights
        return alarms

    def _unused(self, step: int) -> list[Alarm]:
        """Tensors whose gradient has been zero at every step, except those of an optimizer that has not started."""
        begun = {name for name, peak in zip(self.optimizers, self.peaks, strict=True) if peak > 0}
        names = {n: None for n, o, m in zip(self.names, self.optimizers, self.peaks, strict=True) if m == 0 and o in begun}
        return [_alarm("unused", step, list(names), len(set(self.names)))] if names else []

    def _dead(self, moments: list[float]) -> list[Alarm]:
        dead = [n for n, m, peak in zip(self.names, moments, self.peaks, strict=True) if peak > 0 and m < DEAD * peak]
        return [_alarm("dead", dead[0])] if dead and sum(moments) >= ALIVE * sum(self.peaks) else []

    def _huge(self, weights: list[float]) -> list[Alarm]:
        if self.first is None:
            return []
        for name, size, norm, before in zip(self.names, self.sizes, weights, self.first, strict=True):
            rms, was = norm / size**0.5, before / size**0.5
            if rms > HUGE_RMS and rms > HUGE_GROWTH * was:
                return [_alarm("exploding", name, rms, was)]
        return []


class Evaluations:
    """Metrics on validation data that never change are not being measured."""

    def __init__(self) -> None:
        self.seen: deque[dict[str, float]] = deque(maxlen=STUCK_EVALUATIONS)

    def look(self, numbers: dict[str, float], rate: float) -> Alarm | None:
        if rate < STUCK_RATE:
            return None
        self.seen.append(dict(numbers))
        same = len(self.seen) == STUCK_EVALUATIONS and all(seen == self.seen[0] for seen in self.seen)
        if not same or all(value in (0.0, 1.0) for value in numbers.values()):
            return None
        return _alarm("stuck_eval", STUCK_EVALUATIONS, numbers)


class Floor:
    """The loss compared with that of the easiest trivial predictor that the recipe declares."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=FLOOR_LOSSES)
        self.baselines: dict[str, float] | None = None

    def look(self, step: int, progress: float, engine: Engine, feed: Feed) -> Alarm | None:
        if step < FLOOR_FROM or progress < FLOOR_PROGRESS or not self.losses:
            return None
        if self.baselines is None:
            self.baselines = _baselines(engine, feed)
        if not self.baselines:
            return None
        (name, floor), loss = next(iter(self.baselines.items())), statistics.fmean(self.losses)
        return _alarm("floor", step, loss, name, floor) if loss > floor else None


def _baselines(engine: Engine, feed: Feed) -> dict[str, float]:
    """The recipe's baselines on the loaded batch, easiest first. A probe that fails must not end a run."""
    try:
        with engine.evaluating(), eagerly():  # one call is not worth compiling
            return baselines(engine.system, feed.part(0))
    except Exception:
        return {}


# ---- memory that grows with steps ------------------------------------------------------------------------------------------
# What evaluations and caches add comes in jumps and does not count. Readings are compared between two garbage collections,
# without the first one: freed memory is allocated again there.


class Blocks:
    """Growth per step in blocks of at least `span` steps; a shorter part of the run gives one of half that, or none."""

    def __init__(self, span: int, num: int) -> None:
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
