"""The watchers of a live run, fed with made-up numbers: what they see, what they let pass, and that they say it once."""

import gc
import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import kinds, start
from torch import nn

from seedbed.config import Config, Guard, Schedule
from seedbed.train import alarms, guard, loop, watch
from seedbed.train.engine import Engine
from seedbed.train.guard import SpikeWatch
from seedbed.train.optim import multiplier
from seedbed.train.stepper import StepHistory, StepResult, format_number
from seedbed.train.system import System
from seedbed.train.watch import DEVICE, HOST, Evaluations, Floor, Layers, Limits, Loader, Memory, Point, Rates


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
def test_data_wait_is_reported_after_a_hundred_steps(tier: str) -> None:
    found = [bool(alarm) for alarm in waits(0.002, 0.3, tier=tier)]
    assert found.index(True) == 20 and all(found[20:])


@pytest.mark.parametrize(("per_step", "share"), [(0.002, 0.09), (0.0005, 0.9), (1e-5, 0.3)])
def test_data_wait_that_is_short_is_not_reported(per_step: float, share: float) -> None:
    assert not any(waits(per_step, share))


def test_data_wait_that_is_long_once_is_not_reported() -> None:
    loader, found = Loader(feed()), []
    for i in range(1, 80):
        found.append(loader.look(point(i * 5, seconds=i * 0.05 + (60 if i > 30 else 0), wait=60.0 if i > 30 else 0.0)))
    assert not any(found)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(watch._resident() is None, reason="the system does not tell a process's memory")
def test_memory_is_read_each_time() -> None:
    before = watch._resident()
    block = bytearray(b"x") * 256_000_000  # more than the allocator may have kept from what others have freed
    grown = watch._resident()
    del block
    assert before and grown and 150e6 < grown - before < 270e6


RECORDED = json.loads((Path(__file__).parent / "recorded_memory.json").read_text())
EVALUATED = {"thinker/demo": 200, "gpt/demo": 150, "world/demo": 100}
BOTH = pytest.mark.parametrize("kind", [HOST, DEVICE], ids=["host", "device"])


@dataclass
class Machine:
    """Memory as a function of the steps taken and of those since the last sweep, read by a watcher at its log points."""

    raw: Callable[[int, int], float]
    held: Callable[[int], float]  # right after a sweep
    log: int = 10
    eval: int = 250

    def run(self, kind: Limits, num_steps: int, patch: pytest.MonkeyPatch) -> int | None:
        """The step at which a leak is first reported."""
        sweeps, swept_at, just_swept, now = 0, 0, False, 0

        def sweep() -> None:
            nonlocal sweeps, swept_at, just_swept
            sweeps, swept_at, just_swept = sweeps + 1, now, True

        patch.setattr(guard, "gc_collect", sweep)
        patch.setattr(guard, "num_collections", lambda: sweeps)
        memory = Memory(kind, lambda: self.held(now) if just_swept else self.raw(now, now - swept_at))
        for now in range(self.log, num_steps + 1, self.log):
            just_swept = False
            if memory.look(point(now, last=num_steps)):
                return now
            if self.eval and -(-now // self.eval) * self.eval < now + self.log:
                sweep()
        return None


def recorded(name: str, leak: Callable[[int], float] = lambda step: 0.0) -> Machine:
    """A demo's memory as it was recorded, over and over again, and a leak on top of it."""
    rows, every = RECORDED[name], EVALUATED[name]
    values = {step: 1024.0 * kb for step, kb in rows if step != "swept"}
    swept = [1024.0 * kb for step, kb in rows if step == "swept"]
    log, end = min(values), max(values) // every * every

    def raw(step: int, since: int) -> float:
        later = (step - 1 - every) % (end - every) + every + 1  # what the start of a run adds comes once
        return values[step if step <= end else -(-later // log) * log] + leak(step)

    return Machine(raw, lambda step: swept[(step // every) % len(swept)] + leak(step), log, every)


LEAKS = {
    "steadily": lambda step: 1e4 * step,
    "now and then": lambda step: 1e6 * ((step + 37) // 100),
    "at log points": lambda step: 2e5 * (step // 20),
    "fast": lambda step: 1e6 * step,
}


@pytest.mark.parametrize("name", RECORDED)
def test_demo_has_no_leak_however_long_it_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded(name).run(HOST, 20_000, monkeypatch) is None


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("name", RECORDED)
def test_leak_in_a_demo_is_found_within_2000_steps(name: str, leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(name, LEAKS[leak]).run(HOST, 2000, monkeypatch)
    assert found and (leak != "fast" or found <= 640)


@BOTH
@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize(("log", "eval"), [(5, 0), (10, 250), (20, 100), (50, 500), (100, 1000), (100, 0), (10, 40), (5, 50)])
def test_leak_is_found_whatever_the_log_points(kind, leak: str, log: int, eval: int, monkeypatch) -> None:
    grows = LEAKS[leak]
    machine = Machine(lambda step, since: 1e9 + grows(step), lambda step: 9.9e8 + grows(step), log, eval)
    assert machine.run(kind, 2000, monkeypatch)


def noise(size: float) -> Callable[[int], float]:
    return lambda step: size * random.Random(step).random()


CLEAN = {
    "flat": (lambda step, since: 1e9, lambda step: 1e9),
    "noise": (lambda step, since: 1e9 + noise(2e6)(step), lambda step: 1e9 + noise(3e5)(step)),
    "one jump": (lambda step, since: 1e9 + 5e8 * (step > 700), lambda step: 1e9 + 5e8 * (step > 700)),
    "warm-up": (lambda step, since: 1e9 + 2e8 * min(step, 300) / 300, lambda step: 1e9 + 2e8 * min(step, 300) / 300),
    "slowing down": (lambda step, since: 1e9 + 3e7 * (1 - 0.99 ** (step / 5)), lambda step: 1e9 + 3e7 * (1 - 0.99 ** (step / 5))),
    "falling": (lambda step, since: 1e9 - 1e4 * step, lambda step: 1e9 - 1e4 * step),
    "stairs at evaluations": (lambda step, since: 1e9 + 2e7 * (step // 500), lambda step: 1e9 + 2e7 * (step // 500)),
    "pages that come back": (lambda step, since: 1e9 + 3e7 * (1 - 0.9 ** (since / 5)), lambda step: 9.7e8),
    "garbage that is swept": (lambda step, since: 1e9 + 5e4 * since, lambda step: 1e9),
    "garbage in pieces": (lambda step, since: 1e9 + 1e6 * (since // 90), lambda step: 1e9 + noise(3e5)(step)),
    "arenas": (lambda step, since: 1e9 + 6.4e7 * (step // 1700), lambda step: 1e9 + 6.4e7 * (step // 1700)),
}


@BOTH
@pytest.mark.parametrize("shape", CLEAN)
@pytest.mark.parametrize(("log", "eval"), [(10, 500), (50, 500), (10, 0), (100, 1000)])
def test_leak_alarm_ignores_bounded_growth(kind, shape: str, log: int, eval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is DEVICE and "noise" in shape:
        pytest.skip("what tensors hold on a device is counted, not sampled")
    assert Machine(*CLEAN[shape], log, eval).run(kind, 20_000, monkeypatch) is None


# What the first evaluation of each demo adds to the allocator's count, as measured; its steps, log and evaluation points.
COUNTED = {
    "gpt/demo": (1.6e5, 600, 20, 150),
    "ebt/demo": (5.4e7, 500, 20, 250),
    "thinker/demo": (3.3e5, 1200, 50, 200),
    "flow/demo": (9e5, 1100, 20, 400),
    "world/demo": (1.4e6, 700, 20, 100),
}


def counted(name: str, leak: Callable[[int], float] = lambda step: 0.0) -> Machine:
    added, _, log, every = COUNTED[name]

    def held(step: int) -> float:
        return 1e9 + added * (step > every) + noise(2e3)(step) + leak(step)

    return Machine(lambda step, since: held(step), held, log, every)


@pytest.mark.parametrize("leak", ["steadily", "at log points", "fast"])
@pytest.mark.parametrize("name", COUNTED)
def test_counted_leak_is_found_by_the_middle_of_a_demo(name: str, leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = COUNTED[name][1]
    found = counted(name, LEAKS[leak]).run(watch.COUNTED, steps, monkeypatch)
    assert found and found <= steps / 2


@pytest.mark.parametrize("name", COUNTED)
def test_counted_memory_of_a_clean_demo_raises_no_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(name).run(watch.COUNTED, 20_000, monkeypatch) is None


NOT_ALLOCATED = ("noise", "warm-up", "slowing down")  # of the process: pages and arenas, not what is in use


@pytest.mark.parametrize("shape", [shape for shape in CLEAN if shape not in NOT_ALLOCATED])
@pytest.mark.parametrize(("log", "eval"), [(10, 500), (20, 100), (50, 500), (10, 0)])
def test_counted_memory_ignores_bounded_growth(shape: str, log: int, eval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(*CLEAN[shape], log, eval).run(watch.COUNTED, 20_000, monkeypatch) is None
    assert guard.num_collections() <= 16 + (20_000 // eval if eval else 0), "collections that confirm nothing become rarer"


@pytest.mark.skipif(guard.allocated() is None, reason="the C library does not count what is in use")
@pytest.mark.parametrize(
    "make", [lambda: bytearray(10**6), lambda: torch.ones(250_000), lambda: [object() for _ in range(15_625)]]
)
def test_counted_memory_has_arrays_tensors_and_small_objects(make: Callable[[], object]) -> None:
    make()  # imports and caches of a first call
    gc.collect()
    before = guard.allocated()
    kept = make()
    grown = guard.allocated()
    del kept
    after = guard.allocated()
    assert before and grown and after and 0.3e6 < grown - before < 1.5e6 and abs(after - before) < 1e5


# 10 kB a step, and settings that make steps fast; how many there are and when they are logged is the demo's.
SMALL = ("model.width=32", "model.heads=2", "model.depth=1", "device=cpu")
PLANTED = {
    "gpt/demo": (lambda: bytearray(10_000), (*SMALL, "data.block=16")),
    "ebt/demo": (lambda: torch.zeros(2_500), (*SMALL, "data.block=8", "model.control=false")),
    "thinker/demo": (lambda: [f"{i:015d}" for i in range(156)], ("device=cpu",)),
}


@pytest.mark.slow
@pytest.mark.skipif(guard.allocated() is None, reason="the C library does not count what is in use")
@pytest.mark.parametrize("leaks", [True, False])
@pytest.mark.parametrize("name", PLANTED)
def test_real_leak_in_a_demo_is_reported_by_its_middle(name: str, leaks: bool, tmp_path: Path, monkeypatch) -> None:
    kept, (make, settings), real = [], PLANTED[name], loop.take_step
    half = COUNTED[name][1] // 2

    def take(job: loop.Job) -> None:
        real(job)
        if leaks:
            kept.append(make())
        if job.step == half:
            job.stop_signal = signal.SIGTERM

    monkeypatch.setattr(loop, "take_step", take)
    assert start(tmp_path, "one", *settings, recipe=name) == 143
    assert ("host_leak" in kinds(tmp_path, "one")) == leaks


def test_leak_has_its_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = []
    monkeypatch.setitem(alarms.ALARMS, "host_leak", lambda levels, slope, grown, at: printed.append((slope, grown)))
    Machine(lambda step, since: 1e9 + 6e4 * step, lambda step: 9e8 + 6e4 * step).run(HOST, 1500, monkeypatch)
    assert printed[0][0] == pytest.approx(6e4, rel=0.1) and printed[0][1] > 5e6


@pytest.mark.slow
def test_leak_is_reported_even_when_the_run_rolls_back() -> None:
    size, found = [1e9], []
    memory = Memory(HOST, lambda: size[0])
    for taken in range(0, 1000, 5):
        size[0] = 1e9 + 3e5 * taken
        step = taken if taken < 300 else taken - 200
        found.append(memory.look(point(step)))
    first = next(i for i, alarm in enumerate(found) if alarm)
    assert 5 * first < 800 and "MB per 1,000 steps" in found[first].what


@pytest.mark.skipif(watch._resident() is None, reason="the system does not tell a process's memory")
@pytest.mark.parametrize("size", [pytest.param(0, marks=pytest.mark.slow), 10_000])
def test_real_leak_of_1_mb_per_100_steps_is_seen(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, real = [], loop.take_step

    def take(job: loop.Job) -> None:
        real(job)
        if size:
            kept.append(bytearray(b"x") * size)

    monkeypatch.setattr(loop, "take_step", take)
    settings = ["device=cpu", "steps=2000", "batch=4", "every.log=10", "every.eval=250", "every.save=500"]
    assert start(tmp_path, "one", *settings) == 0
    assert ("host_leak" in kinds(tmp_path, "one")) == bool(size)


# ---- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "cosine", "one_cycle", "wsd", "linear"])
def test_rate_that_follows_its_schedule_is_quiet(kind: str) -> None:
    built = engine(schedule=Schedule(kind=kind, floor=0.0))
    rates = Rates(built)
    for step in range(1, 10_001, 7):
        used = float(torch.tensor(multiplier(built.config.schedule, step / 10_000, step)))
        assert rates.look(point(step, rate=used)) is None


@pytest.mark.parametrize("used", [1.0, 0.0, 0.4999])
def test_rate_that_strays_is_named(used: float) -> None:
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


def test_parameter_without_gradient_is_named_at_the_first_look() -> None:
    built = engine()
    layers = Layers(built)
    mean = built.optimizers["main"].tensors()["mean.a.weight"]
    found = looked(built, layers, range(1, 30), lambda step: mean.zero_())
    assert [a.kind for a in found] == ["unused"] and found[0].facts["parameters"] == ["a.weight"]


def test_layer_that_dies_is_named() -> None:
    built = engine()
    layers = Layers(built)
    mean = built.optimizers["main"].tensors()["mean.b.weight"]

    def die(step: int) -> None:
        if step > 100:
            mean.zero_()

    found = looked(built, layers, range(1, 400), die)
    assert found and {a.kind for a in found} == {"dead"} and found[0].where == "b.weight"


def test_layers_alarm_ignores_convergence() -> None:
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


def test_evaluation_metrics_that_never_change_are_reported() -> None:
    seen = Evaluations()
    found = [seen.look({"loss": 1.25, "accuracy": 0.5}, 1.0) for _ in range(4)]
    assert [bool(alarm) for alarm in found] == [False, False, True, True]


@pytest.mark.parametrize(
    ("values", "rate"),
    [([1.0, 1.0 + 1e-12, 1.0], 1.0), ([0.0] * 5, 1.0), ([1.0] * 5, 1.0), ([2.5] * 5, 0.0)],
    ids=["last bit", "never right", "always right", "rate 0"],
)
def test_evaluation_metrics_that_may_stay_are_not_reported(values: list[float], rate: float) -> None:
    seen = Evaluations()
    assert not any(seen.look({"error": value}, rate) for value in values)


def test_loss_above_the_floor_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_probe_that_fails_does_not_end_the_run() -> None:
    built = engine()
    built.system.probe = lambda batch: 1 / 0
    assert watch._baselines(built, SimpleNamespace(part=lambda k: {})) == {}


# ---- spikes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_spike_watch_separates_heavy_tails_from_spikes(seed: int) -> None:
    """Squared errors of a few items: six deviations are nothing unusual there."""
    rng = random.Random(seed)
    spikes = SpikeWatch(Guard())
    losses = [sum(rng.gauss(0, 0.1) ** 2 for _ in range(3)) for _ in range(1500)]
    assert not any(spikes.spikes(loss) for loss in losses)
    assert spikes.spikes(100 * max(losses))


# ---- step history ----------------------------------------------------------------------------------------------------


def test_step_history_keeps_the_last_steps_and_joins_what_arrives_late(tmp_path: Path) -> None:
    step_history = StepHistory(4)
    for step in range(1, 8):
        step_history.add(step, 10 * step, 8 * step, ("stage", step))
        if step > 1:
            step_history.record(StepResult(step - 1, float(step - 1), 0.5, metrics={"grad_norm": float("nan")}))
    step_history.write(tmp_path, seed=3)
    shown = json.loads((tmp_path / "step_history.json").read_text())
    assert [e["step"] for e in shown["steps"]] == [4, 5, 6, 7] and shown["seed"] == 3
    assert shown["steps"][0] == {
        "step": 4, "counter": 40, "items": 32, "variant": "('stage', 4)", "loss": 4.0, "grad_norm": "nan",
        "lr_factor": 0.5, "halted": 0.0,
    }  # fmt: skip
    assert "loss" not in shown["steps"][-1], "the last one has not been read"


def test_step_history_tells_a_step_taken_twice_apart() -> None:
    step_history = StepHistory()
    step_history.add(5, 40, 40, None)
    step_history.record(StepResult(5, 1.0))
    step_history.add(5, 48, 40, None)
    step_history.record(StepResult(5, 2.0))
    assert [(e["counter"], e["loss"]) for e in step_history.to_json()["steps"]] == [(40, 1.0), (48, 2.0)]


@pytest.mark.parametrize("value", [0.1, 1e-45, float(torch.tensor(1 / 3)), 3.4e38])
def test_step_history_numbers_survive_json_exactly(value: float) -> None:
    assert json.loads(json.dumps(format_number(value))) == value


def test_format_number_writes_non_finite_numbers_as_words() -> None:
    assert [format_number(v) for v in (float("nan"), float("inf"), float("-inf"))] == ["nan", "inf", "-inf"]
