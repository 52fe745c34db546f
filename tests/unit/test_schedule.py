"""Schedules: the ends, the peak and the shape, per step."""

import pytest

from seedbed.config import Schedule
from seedbed.train.schedule import multiplier


def curve(schedule: Schedule, num_steps: int = 1000) -> list[float]:
    """What the loop applies: progress counts the step about to be taken."""
    return [multiplier(schedule, (n + 1) / num_steps) for n in range(num_steps)]


@pytest.mark.parametrize("kind", ["constant", "gpt3", "one_cycle", "wsd", "linear"])
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
    values = curve(Schedule(kind="gpt3", warmup=0.1))
    assert values[0] == pytest.approx(0.01) and values[49] == pytest.approx(0.5)


def test_gpt3_is_a_cosine_to_a_tenth() -> None:
    values = curve(Schedule(kind="gpt3", warmup=0.0, floor=0.1))
    assert values[499] == pytest.approx(0.55, abs=1e-6) and values[249] == pytest.approx(0.1 + 0.9 * 0.853553, abs=1e-4)


def test_linear_and_wsd_hold_the_peak_before_the_cooldown() -> None:
    for kind in ("linear", "wsd"):
        values = curve(Schedule(kind=kind, warmup=0.0, decay=0.25, floor=0.0))
        assert values[700] == 1.0 and values[760] < 1.0
    assert curve(Schedule(kind="linear", warmup=0.0, decay=0.5, floor=0.0))[749] == pytest.approx(0.5)
    assert curve(Schedule(kind="wsd", warmup=0.0, decay=0.5, floor=0.0))[749] == pytest.approx(1 - 0.5**0.5)


def test_progress_outside_the_run_is_held_at_its_ends() -> None:
    schedule = Schedule(kind="gpt3", warmup=0.0, floor=0.1)
    assert multiplier(schedule, 1.7) == pytest.approx(0.1) and multiplier(schedule, -1.0) == pytest.approx(1.0)
