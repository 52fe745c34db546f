"""Schedules: the ends, the peak and the shape, per step."""

import itertools

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

from seedbed.config import Config, Schedule, diff, override
from seedbed.config.saved import translated
from seedbed.errors import UserError
from seedbed.train import optim
from seedbed.train.optim import SCHEDULES, multiplier


def curve(schedule: Schedule, num_steps: int = 1000) -> list[float]:
    """What the loop applies: progress counts the step about to be taken."""
    return [multiplier(schedule, (n + 1) / num_steps, n + 1) for n in range(num_steps)]


@pytest.mark.parametrize("kind", sorted(SCHEDULES.keys() - {"one_cycle"}))
@pytest.mark.parametrize("warmup", [0.0, 0.1])
def test_every_schedule_warms_up_peaks_at_one_and_ends_at_its_floor(kind: str, warmup: float) -> None:
    values = curve(Schedule(kind=kind, warmup=warmup, floor=0.05, decay=0.4))
    assert max(values) <= 1.0 + 1e-12 and min(values) > 0.0
    assert values[-1] == pytest.approx(1.0 if kind == "constant" else 0.05, abs=1e-9)
    rising = values[: int(1000 * warmup)]
    assert rising == sorted(rising)
    after = values[int(1000 * warmup) :]
    assert after == sorted(after, reverse=True) and after[0] > 0.99
    assert len(set(values)) > (300 if kind != "constant" else 0), "a schedule must move at every step"


def test_warm_up_is_linear_from_the_first_step() -> None:
    values = curve(Schedule(kind="cosine", warmup=0.1))
    assert values[0] == pytest.approx(0.01) and values[49] == pytest.approx(0.5)


def test_cosine_falls_to_a_tenth() -> None:
    values = curve(Schedule(kind="cosine", warmup=0.0, floor=0.1))
    assert values[499] == pytest.approx(0.55, abs=1e-6) and values[249] == pytest.approx(0.1 + 0.9 * 0.853553, abs=1e-4)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "one_cycle"])
def test_rate_never_falls_below_zero(kind: str) -> None:
    """Rounding made the last rate of a cooldown over 0.3 of the run -1e-18."""
    for percent in range(1, 100):
        assert multiplier(Schedule(kind=kind, warmup=0.005, decay=percent / 100, floor=0.0), 1.0, 100) >= 0.0


@pytest.mark.parametrize("num_steps", [10, 100, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine_is_that_of_torch_after_a_linear_warm_up(num_steps: int, warmup: float, floor: float) -> None:
    """Torch counts the steps taken and this one the step about to be taken, so that the last one has the floor."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    num_rising = round(warmup * num_steps)
    falling = CosineAnnealingLR(optimizer, num_steps - num_rising, eta_min=floor)
    rising = LambdaLR(optimizer, lambda step: step / num_rising if num_rising else 1.0)
    scheduler = SequentialLR(optimizer, [rising, falling], [num_rising]) if num_rising else falling
    wanted = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        wanted.append(scheduler.get_last_lr()[0])
    assert curve(Schedule(kind="cosine", warmup=warmup, floor=floor), num_steps) == pytest.approx(wanted, abs=1e-9, rel=0)


def test_cosine_of_an_earlier_version_was_called_gpt3() -> None:
    assert translated({"schedule.kind": "gpt3"})["schedule.kind"] == "cosine"
    assert diff({"schedule.kind": "gpt3", "steps": 1}, {"schedule.kind": "cosine", "steps": 1}) == {}
    with pytest.raises(UserError, match=r"schedule.kind=gpt3 is now called schedule.kind=cosine"):
        override(Config(model=None, data=None), ["schedule.kind=gpt3"])


def test_linear_and_wsd_hold_the_peak_before_the_cooldown() -> None:
    for kind in ("linear", "wsd"):
        values = curve(Schedule(kind=kind, warmup=0.0, decay=0.25, floor=0.0))
        assert values[700] == 1.0 and values[760] < 1.0
    assert curve(Schedule(kind="linear", warmup=0.0, decay=0.5, floor=0.0))[749] == pytest.approx(0.5)
    assert curve(Schedule(kind="wsd", warmup=0.0, decay=0.5, floor=0.0))[749] == pytest.approx(1 - 0.5**0.5)


def test_progress_outside_the_run_is_held_at_its_ends() -> None:
    schedule = Schedule(kind="cosine", warmup=0.0, floor=0.1)
    assert multiplier(schedule, 1.7) == pytest.approx(0.1) and multiplier(schedule, -1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("num_steps", [7, 100, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.3, 0.77, 1.0])
@pytest.mark.parametrize(("div", "final_div"), [(25.0, 1e4), (3.0, 1.0), (1.0, 50.0)])
def test_one_cycle_is_that_of_torch(num_steps: int, warmup: float, div: float, final_div: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    settings = {"pct_start": warmup, "div_factor": div, "final_div_factor": final_div, "cycle_momentum": False}
    scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=num_steps, **settings)
    wanted = []
    for _ in range(num_steps):
        wanted.append(scheduler.get_last_lr()[0])
        optimizer.step()
        if len(wanted) < num_steps:
            scheduler.step()
    found = curve(Schedule(kind="one_cycle", warmup=warmup, div=div, final_div=final_div), num_steps)
    assert found == pytest.approx(wanted, abs=1e-6, rel=0)


def test_no_two_schedule_kinds_coincide() -> None:
    kinds = list(SCHEDULES)
    for warmup, decay in itertools.product((0.0, 0.02, 0.3), (0.2, 0.5, 1.0)):
        curves = {kind: curve(Schedule(kind=kind, warmup=warmup, decay=decay), 200) for kind in kinds}
        for one, other in itertools.combinations(kinds, 2):
            assert max(abs(a - b) for a, b in zip(curves[one], curves[other], strict=True)) > 0.01, (one, other)


def test_one_cycle_of_an_earlier_version_was_a_cosine() -> None:
    old = {"schedule.kind": "one_cycle", "schedule.warmup": 0.1, "schedule.decay": 0.5, "schedule.floor": 0.1}
    assert translated(old)["schedule.kind"] == "cosine"
    assert translated({**old, "schedule.div": 25.0, "schedule.final_div": 1e4})["schedule.kind"] == "one_cycle"


def test_schedule_registered_elsewhere_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "SCHEDULES", {**optim.SCHEDULES})
    config = Config(model=None, data=None)
    with pytest.raises(UserError, match=r"schedule.kind=halves is not one of constant, cosine, linear, wsd, one_cycle"):
        override(config, ["schedule.kind=halves"])

    @optim.shape("halves")
    def halves(after: float, progress: float, schedule: Schedule) -> float:
        return 1.0 if after < 0.5 else 0.5

    chosen = override(config, ["schedule.kind=halves", "schedule.warmup=0.1", "schedule.floor=0"]).schedule
    assert [optim.multiplier(chosen, p) for p in (0.05, 0.2, 0.9)] == [0.5, 1.0, 0.5]
