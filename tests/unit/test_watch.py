"""The watchers of a live run, fed with made-up numbers: what they see, what they let pass, and that they say it once."""

import json
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from seedbed.config import Config, Guard, Schedule
from seedbed.train import watch
from seedbed.train.engine import Engine
from seedbed.train.guard import SpikeWatch
from seedbed.train.ring import Ring, spelled
from seedbed.train.schedule import multiplier
from seedbed.train.system import System
from seedbed.train.watch import Evaluations, Floor, HostMemory, Layers, Loader, Point, Rates, steady_growth


def point(step: int, *, seconds: float = 0.0, wait: float = 0.0, rate: float = 1.0, last: int = 10_000) -> Point:
    return Point(step, last, seconds, wait, 1.0, rate, step / last)


class Tiny(System):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)

    def loss(self, batch, engine):
        return self.b(self.a(batch["x"])).square().mean(), {}


def engine(**settings) -> Engine:
    torch.manual_seed(0)
    return Engine(Tiny(), Config(model=None, data=None, **settings), torch.device("cpu"))


def feed(tier: str = "device") -> SimpleNamespace:
    return SimpleNamespace(tier=tier, source=object(), describe=lambda: "somewhere", device=torch.device("cpu"))


# ---- data ------------------------------------------------------------------------------------------------------------


def waits(per_step: float, share: float, num: int = 40, every: int = 5, tier: str = "device") -> list:
    loader = Loader(feed(tier))
    return [
        loader.look(point(i * every, seconds=i * every * per_step / share, wait=i * every * per_step)) for i in range(1, num + 1)
    ]


@pytest.mark.parametrize("tier", ["device", "generated", "memory-map"])
def test_waiting_is_reported_after_a_hundred_steps(tier: str) -> None:
    found = [bool(alarm) for alarm in waits(0.002, 0.3, tier=tier)]
    assert found.index(True) == 20 and all(found[20:])


@pytest.mark.parametrize(("per_step", "share"), [(0.002, 0.09), (0.0005, 0.9), (1e-5, 0.3)])
def test_little_waiting_is_not(per_step: float, share: float) -> None:
    assert not any(waits(per_step, share))


def test_one_long_wait_is_no_slow_loader() -> None:
    loader, found = Loader(feed()), []
    for i in range(1, 80):
        found.append(loader.look(point(i * 5, seconds=i * 0.05 + (60 if i > 30 else 0), wait=60.0 if i > 30 else 0.0)))
    assert not any(found)


# ---- memory ----------------------------------------------------------------------------------------------------------


def series(bytes_at) -> deque:
    return deque((20 * i, float(bytes_at(20 * i))) for i in range(60))


@pytest.mark.skipif(watch._resident() is None, reason="the system does not tell a process's memory")
def test_memory_is_read_anew_each_time() -> None:
    before = watch._resident()
    block = bytearray(b"x") * 256_000_000  # more than the allocator may have kept from what others have freed
    grown = watch._resident()
    del block
    assert before and grown and 150e6 < grown - before < 270e6


def test_a_leak_has_its_slope() -> None:
    dice = random.Random(0)
    slope, grown = steady_growth(series(lambda step: 1e9 + 6e4 * step + 1e6 * dice.random()))
    assert slope == pytest.approx(6e4, rel=0.1) and grown == pytest.approx(6e4 * 1180, rel=0.1)


@pytest.mark.parametrize(
    "shape",
    [
        lambda step: 1e9,
        lambda step: 1e9 + (5e8 if step > 700 else 0),
        lambda step: 1e9 + 3e8 * (step % 200 == 0),
        lambda step: 1e9 + 2e8 * min(step, 300) / 300,
        lambda step: 1e9 - 1e4 * step,
    ],
    ids=["flat", "jump", "peaks", "warm-up", "falling"],
)
def test_what_is_no_leak(shape) -> None:
    assert steady_growth(series(shape)) == (0.0, 0.0)


def test_a_leak_is_reported_even_when_the_run_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, size = HostMemory(), [1e9]
    monkeypatch.setattr(HostMemory, "read", lambda self: size[0])
    found = []
    for taken in range(0, 1000, 5):
        size[0] = 1e9 + 3e5 * taken
        step = taken if taken < 300 else taken - 200
        found.append(memory.look(point(step)))
    first = next(i for i, alarm in enumerate(found) if alarm)
    assert 5 * first < 800 and "MB per 1,000 steps" in found[first].what


# ---- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "gpt3", "one_cycle", "wsd", "linear"])
def test_a_rate_that_follows_its_schedule_is_quiet(kind: str) -> None:
    built = engine(schedule=Schedule(kind=kind, floor=0.0))
    rates = Rates(built)
    for step in range(1, 10_001, 7):
        used = float(torch.tensor(multiplier(built.config.schedule, step / 10_000)))
        assert rates.look(point(step, rate=used)) is None


@pytest.mark.parametrize("used", [1.0, 0.0, 0.4999])
def test_a_rate_that_strays_is_named(used: float) -> None:
    rates = Rates(engine(schedule=Schedule(kind="linear", warmup=0.0, decay=1.0, floor=0.0)))
    found = rates.look(point(5000, rate=used))
    assert found and "the schedule says 0.0005" in found.what


# ---- layers ----------------------------------------------------------------------------------------------------------


def looked(built: Engine, layers: Layers, steps: range, change=lambda step: None) -> list:
    found = []
    for step in steps:
        change(step)
        for optimizer in built.optimizers.values():
            for part in optimizer.parts:
                for mean in part.means:
                    mean.mul_(0.9).add_(0.1)
        change(step)
        found += layers.look(step)
    return found + layers.read()


def test_healthy_layers_are_quiet() -> None:
    built = engine()
    assert looked(built, Layers(built), range(1, 400)) == []


def test_a_parameter_without_gradient_is_named_at_the_first_look() -> None:
    built = engine()
    layers = Layers(built)
    mean = built.optimizers["main"].tensors()["mean.a.weight"]
    found = looked(built, layers, range(1, 30), lambda step: mean.zero_())
    assert [a.kind for a in found] == ["unused"] and found[0].facts["parameters"] == ["a.weight"]


def test_a_layer_that_dies_is_named() -> None:
    built = engine()
    layers = Layers(built)
    mean = built.optimizers["main"].tensors()["mean.b.weight"]

    def die(step: int) -> None:
        if step > 100:
            mean.zero_()

    found = looked(built, layers, range(1, 400), die)
    assert found and {a.kind for a in found} == {"dead"} and found[0].where == "b.weight"


def test_all_gradients_falling_together_is_convergence() -> None:
    built = engine()
    layers = Layers(built)
    found = []
    for step in range(1, 400):
        for mean in built.optimizers["main"].parts[0].means + built.optimizers["main"].parts[-1].means:
            mean.fill_(0.9**step)
        found += layers.look(step)
    assert found + layers.read() == []


def test_weights_that_explode_are_named() -> None:
    built = engine()
    layers = Layers(built)

    def grow(step: int) -> None:
        if step == 100:
            with torch.no_grad():
                built.system.a.weight.fill_(50.0)

    found = looked(built, layers, range(1, 200), grow)
    assert found and {(a.kind, a.where) for a in found} == {("exploding", "a.weight")}


# ---- evaluations -----------------------------------------------------------------------------------------------------


def test_numbers_that_never_move_are_named() -> None:
    seen = Evaluations()
    found = [seen.look(step, {"loss": 1.25, "accuracy": 0.5}, 1.0) for step in range(4)]
    assert [bool(alarm) for alarm in found] == [False, False, True, True]


@pytest.mark.parametrize(
    ("values", "rate"),
    [([1.0, 1.0 + 1e-12, 1.0], 1.0), ([0.0] * 5, 1.0), ([1.0] * 5, 1.0), ([2.5] * 5, 0.0)],
    ids=["last bit", "never right", "always right", "rate 0"],
)
def test_numbers_that_may_stay(values: list[float], rate: float) -> None:
    seen = Evaluations()
    assert not any(seen.look(step, {"error": value}, rate) for step, value in enumerate(values))


def test_a_loss_above_the_floor_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_baselines", lambda engine, feed: {"always the same": 2.0, "better": 1.0})
    floor = Floor()
    assert floor.look(500, 0.5, engine(), feed()) is None, "no loss has been seen"
    floor.losses.extend([2.5, 2.6])
    assert floor.look(100, 0.5, engine(), feed()) is None, "too early to judge"
    assert floor.look(500, 0.05, engine(), feed()) is None, "a tenth of the run is not over"
    found = floor.look(500, 0.5, engine(), feed())
    assert found and "`always the same`" in found.what
    floor.losses.extend([1.5] * 20)
    assert floor.look(500, 0.5, engine(), feed()) is None


def test_a_probe_that_fails_does_not_end_the_run() -> None:
    built = engine()
    built.system.probe = lambda batch: 1 / 0
    assert watch._baselines(built, SimpleNamespace(part=lambda k: {})) == {}


# ---- spikes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_heavy_tails_are_no_spikes_and_kicks_are(seed: int) -> None:
    """Squared errors of a few items: six deviations are nothing unusual there."""
    dice = random.Random(seed)
    spikes = SpikeWatch(Guard())
    losses = [sum(dice.gauss(0, 0.1) ** 2 for _ in range(3)) for _ in range(1500)]
    assert not any(spikes.spikes(loss) for loss in losses)
    assert spikes.spikes(100 * max(losses))


# ---- the ring --------------------------------------------------------------------------------------------------------


def test_the_ring_keeps_the_last_steps_and_joins_what_arrives_late(tmp_path: Path) -> None:
    ring = Ring(4)
    for step in range(1, 8):
        ring.take(step, 10 * step, 8 * step, ("stage", step))
        if step > 1:
            ring.measure(step - 1, [float(step - 1), float("nan")])
    ring.write(tmp_path / "ring.json", ["loss", "grad_norm"], seed=3)
    shown = json.loads((tmp_path / "ring.json").read_text())
    assert [e["step"] for e in shown["steps"]] == [4, 5, 6, 7] and shown["seed"] == 3
    assert shown["steps"][0] == {
        "step": 4, "counter": 40, "items": 32, "variant": "('stage', 4)", "loss": 4.0, "grad_norm": "nan",
    }  # fmt: skip
    assert "loss" not in shown["steps"][-1], "the last one has not been read"


def test_a_step_taken_twice_is_told_apart() -> None:
    ring = Ring()
    ring.take(5, 40, 40, None)
    ring.measure(5, [1.0])
    ring.take(5, 48, 40, None)
    ring.measure(5, [2.0])
    assert [(e["counter"], e["loss"]) for e in ring.to_json(["loss"])["steps"]] == [(40, 1.0), (48, 2.0)]


@pytest.mark.parametrize("value", [0.1, 1e-45, float(torch.tensor(1 / 3)), 3.4e38])
def test_numbers_survive_json_to_the_last_bit(value: float) -> None:
    assert json.loads(json.dumps(spelled(value))) == value


def test_numbers_that_are_not_finite_are_spelled() -> None:
    assert [spelled(v) for v in (float("nan"), float("inf"), float("-inf"))] == ["nan", "inf", "-inf"]
