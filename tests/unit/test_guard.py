"""Guards on the host: what is a spike, what is not, and how often a run may be sent back."""

import json
import random

import pytest

from seedbed.config import Guard
from seedbed.train.guard import Incidents, SpikeWatch
from seedbed.train.rollback import answer_to_nonfinite, answer_to_spike


def noisy(num: int, seed: int = 0, start: float = 4.0) -> list[float]:
    rng = random.Random(seed)
    return [start * (0.999**n) + 0.05 * rng.gauss(0, 1) for n in range(num)]


@pytest.mark.parametrize("seed", range(5))
def test_spike_watch_of_a_healthy_run_raises_no_alarm(seed: int) -> None:
    watch = SpikeWatch(Guard())
    assert not any(watch.spikes(loss) for loss in noisy(2500, seed))


def test_spike_is_found_and_not_in_the_statistics() -> None:
    watch = SpikeWatch(Guard())
    for loss in noisy(200):
        watch.spikes(loss)
    limit = watch.limit()
    assert watch.spikes(limit * 1.5) and watch.limit() == limit
    assert watch.spikes(limit * 1.5), "a second one is as visible as the first"


def test_spike_watch_ignores_jumps_of_a_solved_task() -> None:
    """A loss near nothing jumps by factors when a single item fails; what has learned is not sent back for that."""
    watch = SpikeWatch(Guard())
    for loss in [3.0, *(0.001 + 1e-5 * (n % 7) for n in range(200))]:
        assert not watch.spikes(loss)
    for loss, spikes in ((0.29, False), (0.31, True)):
        kept = SpikeWatch(Guard())
        kept.load_state(json.loads(json.dumps(watch.state())))
        assert kept.spikes(loss) == spikes
        kept.restart()
        assert kept.state()["floor"] == pytest.approx(0.3), "a roll-back does not forget where the run began"


def test_spike_band_starts_again_with_a_new_stage() -> None:
    """Longer samples are harder: the loss jumps, and a run that has just been promoted is not sent back for it."""
    watch = SpikeWatch(Guard())
    for loss in noisy(200):
        watch.spikes(loss, 3.0)
    jump = 3 * watch.limit()
    kept = SpikeWatch(Guard())
    kept.load_state(json.loads(json.dumps(watch.state())))
    assert kept.spikes(jump, 3.0), "the same stage, also after a restart"
    assert not watch.spikes(jump, 4.0) and not any(watch.spikes(jump - 0.01 * n, 4.0) for n in range(200))
    assert watch.spikes(10 * jump, 4.0)


def test_nonfinite_losses_do_not_enter_the_statistics() -> None:
    watch = SpikeWatch(Guard())
    for loss in noisy(200):
        watch.spikes(loss)
    limit = watch.limit()
    assert not watch.spikes(float("nan")) and not watch.spikes(float("inf"))
    assert watch.limit() == limit


def test_spike_band_of_a_flat_loss_has_width() -> None:
    watch = SpikeWatch(Guard())
    assert not any(watch.spikes(1.0) for _ in range(200))
    assert not watch.spikes(1.001) and watch.spikes(1.1)


def test_spike_statistics_equal_those_of_the_window() -> None:
    watch, losses = SpikeWatch(Guard(window=32, sigmas=1e6)), noisy(500)
    for loss in losses:
        watch.spikes(loss)
    window = losses[-32:]
    mean = sum(window) / 32
    deviation = (sum((x - mean) ** 2 for x in window) / 32) ** 0.5
    assert watch.limit() == pytest.approx(mean + 1e6 * deviation, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("sigmas", [1.0, 6.0])
def test_spike_fast_path_agrees_with_the_limit(sigmas: float, scale: float) -> None:
    """Every loss, heavy tails and kicks included, is a spike exactly when the window is full and it lies above the limit."""
    rng, watch = random.Random(1), SpikeWatch(Guard(window=32, sigmas=sigmas))
    num_spikes = 0
    for n in range(3000):
        tail = rng.gauss(0, 1) * (1 + 30 * (rng.random() < 0.02))
        loss = scale * (3.0 * 0.999**n - 1.0 + 0.05 * tail)
        wanted = len(watch.losses) == 32 and loss > watch.limit()
        assert watch.spikes(loss) is wanted
        num_spikes += wanted
    assert 10 < num_spikes < 300


def test_guard_state_survives_json_exactly() -> None:
    one, other = Incidents(Guard()), Incidents(Guard())
    for loss in noisy(333):
        one.watch.spikes(loss)
    answer_to_nonfinite(one)
    answer_to_spike(one, 300)
    other.load_state(json.loads(json.dumps(one.state())))
    assert other.state() == one.state() and other.watch.limit() == one.watch.limit()


def test_incidents_skip_then_roll_back_then_stop() -> None:
    incidents = Incidents(Guard(policy="rollback", max_skips=2, max_rollbacks=2))
    answers = [answer_to_nonfinite(incidents) for _ in range(9)]
    assert answers == ["skip", "skip", "rollback", "skip", "skip", "rollback", "skip", "skip", "stop"]
    assert [answer_to_nonfinite(Incidents(Guard(policy="stop")))] == ["stop"]
    skipping = Incidents(Guard(policy="skip", max_skips=1))
    assert [answer_to_nonfinite(skipping), answer_to_nonfinite(skipping)] == ["skip", "stop"]


def test_incidents_of_three_close_spikes_roll_back() -> None:
    incidents = Incidents(Guard())
    assert [answer_to_spike(incidents, s) for s in (100, 200, 300)] == ["warn"] * 3
    incidents = Incidents(Guard())
    assert [answer_to_spike(incidents, s) for s in (100, 110, 120, 130)] == ["warn", "warn", "rollback", "warn"]
    patient = Incidents(Guard(policy="skip"))
    assert [answer_to_spike(patient, s) for s in (1, 2, 3, 4)] == ["warn"] * 4


def test_dip_and_rise_out_of_the_band_are_kept_for_a_look():
    """A loss far below its band, or above it without being a spike, is remembered; ordinary losses are not."""
    watch = SpikeWatch(Guard(window=32))
    for n in range(40):
        assert not watch.spikes(2.0 + 0.01 * (n % 5)) and watch.far == 0.0
    assert not watch.spikes(0.2) and watch.far == 0.2
    watch.far = 0.0
    assert not watch.spikes(2.0) and watch.far == 0.0
