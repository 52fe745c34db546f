"""The stopwatch: laps add up to the time that passed, through nesting, pauses, errors and a restart."""

import random

import pytest

from seedbed.track.clocks import Stopwatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_laps_add_up_to_the_time_that_passed(clock: Clock):
    watch, dice = Stopwatch(clock=clock), random.Random(1)
    expected = dict.fromkeys(("train", "eval", "save"), 0.0)
    for _ in range(200):
        lap, seconds = dice.choice(list(expected)), dice.random()
        watch.start(lap)
        clock.now += seconds
        expected[lap] += seconds
    assert watch.state() == pytest.approx(expected)
    assert watch.total == pytest.approx(clock.now - 100)


def test_a_lap_inside_another_suspends_it(clock: Clock):
    watch = Stopwatch(clock=clock)
    watch.start("train")
    clock.now += 1
    with watch.lap("eval"):
        clock.now += 10
        with watch.lap("save"):
            clock.now += 100
        clock.now += 10
    clock.now += 1
    assert watch.state() == {"train": 2.0, "eval": 20.0, "save": 100.0}


def test_a_lap_ends_when_its_block_raises(clock: Clock):
    watch = Stopwatch(clock=clock)
    watch.start("train")
    with pytest.raises(KeyError), watch.lap("eval"):
        clock.now += 5
        raise KeyError
    clock.now += 1
    assert watch.state() == {"train": 1.0, "eval": 5.0}


def test_pause_stops_every_count_and_resume_goes_on(clock: Clock):
    watch = Stopwatch(clock=clock)
    watch.resume()
    assert watch.state() == {}
    watch.start("train")
    clock.now += 1
    watch.pause()
    watch.pause()
    clock.now += 50
    assert watch["train"] == 1.0
    watch.resume()
    clock.now += 2
    assert watch["train"] == 3.0


def test_a_lap_within_a_pause_leaves_the_pause_as_it_was(clock: Clock):
    watch = Stopwatch(clock=clock)
    watch.start("train")
    watch.pause()
    with watch.lap("compile"):
        clock.now += 3
    clock.now += 50
    assert watch.state() == {"train": 0.0, "compile": 3.0}
    watch.resume()
    clock.now += 1
    assert watch.state() == {"train": 1.0, "compile": 3.0}


def test_a_saved_watch_goes_on_where_it_was(clock: Clock):
    watch = Stopwatch(clock=clock)
    watch.start("train")
    clock.now += 7
    again = Stopwatch(saved=watch.state(), clock=clock)
    clock.now += 1000
    assert again["train"] == 7.0
    again.start("train")
    clock.now += 1
    assert again["train"] == 8.0
    assert again["never"] == 0.0


def test_what_was_saved_is_not_changed_by_the_watch(clock: Clock):
    saved = {"train": 1.0}
    watch = Stopwatch(saved=saved, clock=clock)
    watch.start("train")
    clock.now += 5
    watch.pause()
    assert saved == {"train": 1.0}


def test_the_wall_clock_does_not_matter(monkeypatch):
    watch = Stopwatch()
    watch.start("train")
    monkeypatch.setattr("time.time", lambda: -1e9)
    assert 0 <= watch["train"] < 60
