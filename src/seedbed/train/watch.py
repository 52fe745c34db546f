"""What a live run is watched for beside its loss: data, memory, layers, rates and evaluations. Nothing here waits for the device.

Looks happen at log points, between steps, so a captured step stays as it is. Every kind of alarm is raised once.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import statistics
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from seedbed.dist.ranks import local
from seedbed.train.schedule import multiplier

if TYPE_CHECKING:
    from seedbed.config import Config
    from seedbed.data.feed import Feed
    from seedbed.train.engine import Engine

MEGA = 1e6
# Data: waiting counts from this share on, over this many steps, and never below what no loader can be blamed for. Where the
# host gathers for itself, clean runs spend 10 to 60 microseconds a step, ten times that on a crowded machine.
WAIT_SHARE, WAIT_STEPS = 0.10, 100
WAIT_SECONDS = {"cpu": 1e-3, "cuda": 2e-4, "mps": 2e-4}
# Host memory: clean runs grow 0 to 1 MB in 2,400 steps, a list of loss tensors 63 MB in 1,000.
LEAK_RATE, LEAK_SHARE, LEAK_SEEN = 16 * MEGA / 1000, 0.25, 64 * MEGA
MEMORY_EVERY, MEMORY_FROM, MIN_SAMPLES, MAX_SAMPLES, JUDGE_EVERY = 20, 50, 24, 500, 4
# Layers: a tensor's first moment this far below its own peak, while the model as a whole still learns, is dead.
DEAD, ALIVE = 1e-6, 1e-3
LAYERS_FROM, LAYERS_EVERY = 10, 100
# Weights: healthy ones have an rms of 0.01 to 2; ten times the first look and above this is an explosion.
HUGE_RMS, HUGE_GROWTH = 10.0, 10.0
FLOOR_FROM, FLOOR_PROGRESS, FLOOR_LOSSES = 200, 0.1, 20
STUCK_EVALUATIONS, STUCK_RATE = 3, 0.01


@dataclass(frozen=True)
class Alarm:
    """What was seen, where, why it matters and what to do; `kind` is the event's."""

    kind: str
    what: str
    where: str
    why: str
    fix: str
    facts: dict[str, Any] = field(default_factory=dict)


class Point(NamedTuple):
    """A log point as the watchers see it."""

    step: int
    last_step: int
    seconds: float
    wait: float
    loss: float
    rate: float
    progress: float


class Watch:
    """All watchers of one run, in this process."""

    def __init__(self, engine: Engine, feed: Feed) -> None:
        self.loader, self.rates, self.layers = Loader(feed), Rates(engine), Layers(engine)
        self.memories = [HostMemory()] if _resident() is not None else []
        self.memories += [DeviceMemory(engine.device)] if engine.device.type == "cuda" else []
        self.floor, self.evaluations = Floor(), Evaluations()
        self.raised: set[str] = set()

    def look(self, point: Point, own: Sequence[Alarm] = ()) -> list[Alarm]:
        """New alarms at a log point, the recipe's own among them."""
        self.floor.losses.append(point.loss)
        found = [self.loader.look(point), self.rates.look(point), *self.layers.look(point.step), *own]
        for memory in self.memories:
            found.append(memory.look(point))
        return self._new(found)

    def evaluated(self, step: int, numbers: dict[str, float], engine: Engine, feed: Feed, progress: float) -> list[Alarm]:
        """New alarms after an evaluation."""
        rate = multiplier(engine.config.schedule, progress)
        return self._new([self.evaluations.look(step, numbers, rate), self.floor.look(step, progress, engine, feed)])

    def end(self) -> list[Alarm]:
        """What the last look still has to tell."""
        return self._new(self.layers.read())

    def _new(self, found: Sequence[Alarm | None]) -> list[Alarm]:
        if not any(found):  # nearly always
            return []
        fresh = {alarm.kind: alarm for alarm in found if alarm and alarm.kind not in self.raised}
        self.raised |= fresh.keys()
        return list(fresh.values())


class Loader:
    """The share of time for which data held the loop up, over at least a hundred steps."""

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
        # Medians: an interval in which the machine was busy with something else says nothing about the loader.
        pairs = [(a, b) for a, b in itertools.pairwise(self.points) if b.seconds > a.seconds]
        if not pairs:
            return None
        share = statistics.median((b.wait - a.wait) / (b.seconds - a.seconds) for a, b in pairs)
        wait = statistics.median((b.wait - a.wait) / (b.step - a.step) for a, b in pairs)
        if share < WAIT_SHARE or wait < WAIT_SECONDS[self.feed.device.type]:
            return None
        return Alarm(
            "data_wait",
            f"waiting for data took {share:.0%} of the last {steps} steps, {1e3 * wait:.1f} ms a step (limit 10 %)",
            f"{type(self.feed.source).__name__}, {self.feed.describe()}",
            "the device idles while the source is read: the run takes longer than it must",
            _LOADER_FIX[self.feed.tier],
            {"share": round(share, 4)},
        )


_LOADER_FIX = {
    "device": "make the source's `locate` and rows cheaper; `seedbed profile` shows the phases",
    "generated": "make the source's `batch` cheaper; `seedbed profile` shows the phases",
    "memory-map": "put the data on a faster disk, store it in a narrower dtype, or free memory so that it fits",
}


class HostMemory:
    """The slope of this process's own memory; pages of mapped files do not count."""

    kind = "host_leak"

    def __init__(self) -> None:
        self.samples: deque[tuple[int, float]] = deque(maxlen=MAX_SAMPLES)
        self.taken = self.last_step = self.num_read = 0

    def read(self) -> float:
        found = _resident()
        assert found is not None
        return found

    def look(self, point: Point) -> Alarm | None:
        # Steps that this process has taken: a roll-back takes the run back, not its memory.
        self.taken += max(point.step - self.last_step, 0) if self.last_step else 0
        self.last_step = point.step
        if self.taken < MEMORY_FROM or (self.samples and self.taken - self.samples[-1][0] < MEMORY_EVERY):
            return None
        self.samples.append((self.taken, self.read()))
        self.num_read += 1
        if self.num_read % JUDGE_EVERY:
            return None
        slope, grown = steady_growth(self.samples)
        return self.judge(slope, grown, point) if slope > 0 else None

    def judge(self, slope: float, grown: float, point: Point) -> Alarm | None:
        projected = slope * max(point.last_step - point.step, 0)
        if slope < LEAK_RATE or (projected < LEAK_SHARE * _available() and grown < LEAK_SEEN):
            return None
        what = f"host memory grows by {1000 * slope / MEGA:.0f} MB per 1,000 steps ({grown / MEGA:.0f} MB seen)"
        fix = "store plain numbers (`.item()` at log points, never tensors) and bound every list that grows"
        why = f"at this rate it takes {projected / MEGA:,.0f} MB more before the run ends, and may be killed for it"
        return Alarm(self.kind, what, _growing_type(), why, fix, {"mb_per_1000_steps": round(1000 * slope / MEGA, 1)})


class DeviceMemory(HostMemory):
    """Memory that tensors on the GPU hold between steps."""

    kind = "device_leak"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def read(self) -> float:
        return float(torch.cuda.memory_allocated(self.device))

    def judge(self, slope: float, grown: float, point: Point) -> Alarm | None:
        if grown < MEGA:
            return None
        what = f"GPU memory between steps grows by {200 * slope / MEGA:.1f} MB per 200 steps ({grown / MEGA:.0f} MB seen)"
        why = "something keeps tensors of past steps alive; the run will end out of memory"
        fix = "detach what is kept across steps (`x.detach()`), and keep numbers, not tensors"
        return Alarm(self.kind, what, _growing_type(), why, fix, {"mb_per_200_steps": round(200 * slope / MEGA, 2)})


def steady_growth(samples: deque[tuple[int, float]]) -> tuple[float, float]:
    """Bytes per step and bytes in all when memory grows steadily through all quarters of the window, else zeros.

    Medians of quarters are deaf to an evaluation's peak; a jump that stays is one large quarter and three flat ones.
    """
    if len(samples) < MIN_SAMPLES:
        return 0.0, 0.0
    size = len(samples) // 4
    kept = list(samples)[-4 * size :]
    middle = [statistics.median(v for _, v in kept[k * size : (k + 1) * size]) for k in range(4)]
    gains = [b - a for a, b in itertools.pairwise(middle)]
    mean = sum(gains) / 3
    if mean <= 0 or min(gains) < mean / 3:
        return 0.0, 0.0
    distance = (kept[-1][0] - kept[0][0]) * 3 / 4
    return 3 * mean / distance, kept[-1][1] - kept[0][1]


def _resident() -> float | None:
    """Bytes of this process's own memory; None where the system does not tell."""
    file = _open_statm(os.getpid())
    if file is None:
        return None
    _, resident, shared, *_ = os.pread(file, 200, 0).split()
    return float(int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _open_statm(pid: int) -> int | None:
    """Kept open, since to open it costs more than the rest of a look; by process, since it tells of the one that opened it."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY)
    except OSError:
        return None


def _available() -> float:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(float(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def _growing_type() -> str:
    """What there is most of among the objects made since training began; older ones are frozen away from the collector."""
    new = gc.get_objects()
    tensors = [x for x in new if type(x) is Tensor]
    if len(tensors) > 100:
        size = sum(t.numel() * t.element_size() for t in tensors)
        shape = Counter(tuple(t.shape) for t in tensors).most_common(1)[0][0]
        return f"{len(tensors):,} tensors made since the start are alive ({size / MEGA:.0f} MB, most of shape {shape})"
    kind, count = Counter(type(x).__name__ for x in new).most_common(1)[0]
    return f"{count:,} objects of type {kind} made since the start are alive, {sys.getallocatedblocks():,} blocks in all"


class Rates:
    """The learning rate that a step really used, against base rate times schedule."""

    def __init__(self, engine: Engine) -> None:
        self.config: Config = engine.config
        self.groups = [g for o in engine.optimizers.values() for g in o.groups]
        self.base = [g.lr for g in self.groups]

    def look(self, point: Point) -> Alarm | None:
        wanted = multiplier(self.config.schedule, point.progress)
        for group, base in zip(self.groups, self.base, strict=True):
            used, meant = group.lr * point.rate, base * wanted
            if abs(used - meant) > 1e-5 * base:
                return Alarm(
                    "schedule",
                    f"step {point.step} used a learning rate of {used:.4g} in group {group.name}, the schedule says {meant:.4g}",
                    "train/engine.py Engine.begin, train/schedule.py multiplier",
                    f"schedule={self.config.schedule.kind} is declared, another course is trained",
                    "set rates only through the config; a recipe must not write to the optimizer's groups",
                    {"used": used, "meant": meant},
                )
        return None


class Layers:
    """Norms of every weight and of its first moment, taken between steps and read at the next look."""

    def __init__(self, engine: Engine) -> None:
        self.device = engine.device
        self.names: list[str] = []
        self.players: list[str] = []
        params: list[Tensor] = []
        self.moments: list[Tensor] = []
        for player, optimizer in engine.optimizers.items():
            found = {n: p for g in optimizer.groups for n, p in g.params.items()}
            for name, tensor in optimizer.tensors().items():
                prefix, _, rest = name.partition(".")
                if prefix in ("mean", "momentum"):
                    owner = rest if prefix == "mean" else rest.rpartition(".")[0]
                    self.names.append(owner)
                    self.players.append(player)
                    self.moments.append(tensor)
                    params.append(found[owner])
        self.params = [local(p).detach() for p in params]
        self.ranks = engine.ranks
        # Weights that are cut, and the moments that follow them; Muon's momenta are whole everywhere.
        is_cut = [hasattr(p, "to_local") for p in params]
        is_cut += [hasattr(p, "to_local") and m.shape == local(p).shape for p, m in zip(params, self.moments, strict=True)]
        self.cut = torch.tensor(is_cut, device=self.device) if any(is_cut) else None
        self.sizes = [p.numel() for p in params]
        self.pending: tuple[int, Tensor, Any] | None = None
        self.first: list[float] | None = None
        self.peaks = [0.0] * len(self.names)
        self.last_look = self.looks = 0

    def look(self, step: int) -> list[Alarm]:
        if step < self.last_look:
            self.pending, self.last_look = None, step
        if step < LAYERS_FROM or (self.looks and step - self.last_look < LAYERS_EVERY):
            return []
        found = self.read()
        self.looks, self.last_look = self.looks + 1, step
        vector = torch.stack(torch._foreach_norm([*self.params, *self.moments])).float()
        if self.cut is not None:
            vector = torch.where(self.cut, self.ranks.total_of_pieces(vector.square()).sqrt(), vector)
        event = None
        if self.device.type == "cuda":
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            vector = host.copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.pending = (step, vector, event)
        return found

    def read(self) -> list[Alarm]:
        """Judge the look before this one, whose numbers have arrived long ago."""
        if self.pending is None:
            return []
        step, vector, event = self.pending
        self.pending = None
        if event:
            event.synchronize()
        values = vector.tolist()
        count = len(self.names)
        weights, moments = values[:count], values[count:]
        self.peaks = [max(a, b) for a, b in zip(self.peaks, moments, strict=True)]
        found = [*self._unused(step), *self._dead(step, moments), *self._huge(step, weights)]
        self.first = self.first or weights
        return found

    def _unused(self, step: int) -> list[Alarm]:
        """Tensors whose gradient has been zero at every step; a player that has not begun is not blamed."""
        begun = {player for player, peak in zip(self.players, self.peaks, strict=True) if peak > 0}
        names = {n: None for n, p, m in zip(self.names, self.players, self.peaks, strict=True) if m == 0 and p in begun}
        if not names:
            return []
        shown = ", ".join(list(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return [
            Alarm(
                "unused",
                f"{len(names)} of {len(set(self.names))} parameters have had no gradient in {step} steps: {shown}",
                next(iter(names)),
                "they keep their initial values: dead code, a detached branch, or a layer that the loss does not reach",
                "connect them, remove them, or freeze them on purpose with requires_grad_(False)",
                {"parameters": list(names)},
            )
        ]

    def _dead(self, step: int, moments: list[float]) -> list[Alarm]:
        if sum(moments) < ALIVE * sum(self.peaks):
            return []
        dead = [n for n, m, peak in zip(self.names, moments, self.peaks, strict=True) if peak > 0 and m < DEAD * peak]
        why = "it learned before and no longer does: saturated or dead units, or a branch that was cut off"
        fix = "look at its activations with `seedbed replay`; lower the learning rate or change the activation"
        what = "has had no gradient for many steps, while the rest of the model still learns"
        return [Alarm("dead", f"{name} {what}", name, why, fix) for name in dead[:1]]

    def _huge(self, step: int, weights: list[float]) -> list[Alarm]:
        if self.first is None:
            return []
        for name, size, norm, before in zip(self.names, self.sizes, weights, self.first, strict=True):
            rms, was = norm / size**0.5, before / size**0.5
            if rms > HUGE_RMS and rms > HUGE_GROWTH * was:
                what = f"the weights of {name} have an rms of {rms:.3g}, {was:.3g} at the start"
                why = "weights this large saturate what follows and make the next spike or overflow likely"
                fix = "lower optim.lr, raise optim.weight_decay, or normalise the input of that layer"
                return [Alarm("exploding", what, name, why, fix, {"rms": rms, "before": was})]
        return []


class Evaluations:
    """Numbers on held-out data that never move are not measured, whatever they say."""

    def __init__(self) -> None:
        self.seen: deque[dict[str, float]] = deque(maxlen=STUCK_EVALUATIONS)

    def look(self, step: int, numbers: dict[str, float], rate: float) -> Alarm | None:
        if rate < STUCK_RATE:
            return None
        self.seen.append(dict(numbers))
        same = len(self.seen) == STUCK_EVALUATIONS and all(seen == self.seen[0] for seen in self.seen)
        if not same or all(value in (0.0, 1.0) for value in numbers.values()):
            return None
        shown = ", ".join(f"{k} {v:.6g}" for k, v in numbers.items())
        return Alarm(
            "stuck_eval",
            f"{STUCK_EVALUATIONS} evaluations in a row gave the same numbers to the last bit: {shown}",
            "System.evaluate",
            "the weights have changed and the answer has not: it is stale, or does not depend on the model",
            "evaluate the live module, drop caches between evaluations, check what `evaluate` really computes",
        )


class Floor:
    """The loss against the easiest trivial predictor that the recipe declares."""

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
        if loss <= floor:
            return None
        return Alarm(
            "floor",
            f"after {step} steps the loss {loss:.4g} is still above {floor:.4g}, that of the trivial predictor `{name}`",
            "System.loss",
            "whatever is being learned, it is worth less than an answer that looks at nothing",
            "run `seedbed check` on this preset; try a higher learning rate, or `seedbed overfit` on one batch",
            {"loss": loss, "baseline": floor},
        )


def _baselines(engine: Engine, feed: Feed) -> dict[str, float]:
    """What the recipe declares, on the batch at hand; easiest first. A probe that fails must not end a run."""
    try:
        with engine.evaluating(), torch.compiler.set_stance("force_eager"):  # one call is not worth compiling
            probe = engine.system.probe(feed.part(0))
            return probe.baselines(probe.batch) if probe and probe.baselines else {}
    except Exception:
        return {}
