"""The stopwatch: timers add up to the time that passed, through nesting, pauses, errors and a restart."""

import random
import subprocess
import sys

import pytest

from seedbed.track import clocks
from seedbed.track.clocks import Stopwatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_stopwatch_timers_add_up_to_elapsed_time(clock: Clock):
    watch, rng = Stopwatch(clock=clock), random.Random(1)
    expected = dict.fromkeys(("train", "eval", "save"), 0.0)
    for _ in range(200):
        timer, seconds = rng.choice(list(expected)), rng.random()
        watch.start(timer)
        clock.now += seconds
        expected[timer] += seconds
    assert watch.state() == pytest.approx(expected)
    assert sum(watch.state().values()) == pytest.approx(clock.now - 100)


def test_lap_inside_another_suspends_it(clock: Clock):
    watch = Stopwatch(clock=clock)
    watch.start("train")
    clock.now += 1
    with watch.timer("eval"):
        clock.now += 10
        with watch.timer("save"):
            clock.now += 100
        clock.now += 10
    clock.now += 1
    assert watch.state() == {"train": 2.0, "eval": 20.0, "save": 100.0}


def test_lap_ends_when_its_block_raises(clock: Clock):
    watch = Stopwatch(clock=clock)
    watch.start("train")
    with pytest.raises(KeyError), watch.timer("eval"):
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


def test_lap_within_a_pause_leaves_the_pause_as_it_was(clock: Clock):
    watch = Stopwatch(clock=clock)
    watch.start("train")
    watch.pause()
    with watch.timer("compile"):
        clock.now += 3
    clock.now += 50
    assert watch.state() == {"train": 0.0, "compile": 3.0}
    watch.resume()
    clock.now += 1
    assert watch.state() == {"train": 1.0, "compile": 3.0}


def test_saved_watch_goes_on_where_it_was(clock: Clock):
    watch = Stopwatch(clock=clock)
    watch.start("train")
    clock.now += 7
    again = Stopwatch(clock=clock)
    again.go_on_from(watch.state())
    clock.now += 1000
    assert again["train"] == 7.0
    again.start("train")
    clock.now += 1
    assert again["train"] == 8.0
    assert again["never"] == 0.0


def test_saved_clock_is_not_changed_by_the_stopwatch(clock: Clock):
    saved = {"train": 1.0}
    watch = Stopwatch(clock=clock)
    watch.go_on_from(saved)
    watch.start("train")
    clock.now += 5
    watch.pause()
    assert saved == {"train": 1.0}


def test_wall_clock_does_not_matter(monkeypatch):
    watch = Stopwatch()
    watch.start("train")
    monkeypatch.setattr("time.time", lambda: -1e9)
    assert 0 <= watch["train"] < 60


def test_split_adds_up_to_the_time_since_the_process_began(clock: Clock):
    clock.now = 130.0
    watch, rng = Stopwatch(clock=clock, since=100.0), random.Random(2)
    for _ in range(300):
        act = rng.choice(["timer", "start", "pause", "resume", "wait"])
        if act == "timer":
            with watch.timer(rng.choice(["eval", "save"])):
                clock.now += rng.random()
        elif act == "start":
            watch.start(rng.choice(["train", "compile"]))
        elif act != "wait":
            getattr(watch, act)()
        clock.now += rng.random()
    split = watch.split()
    assert sum(split.values()) == pytest.approx(clock.now - 100.0)
    assert split["start"] >= 30.0 and split["other"] > 0.0
    assert [*split] == [timer for timer in clocks.PARTS if timer in split], "told in one order"


def test_split_counts_this_process_and_state_counts_all(clock: Clock):
    watch = Stopwatch(clock=clock, since=clock.now)
    clock.now += 2
    watch.go_on_from({"train": 50.0, "eval": 7.0})  # as a checkpoint from before splits holds it
    watch.start("train")
    clock.now += 10
    assert watch["train"] == pytest.approx(60.0) and watch.state()["eval"] == 7.0
    assert watch.split() == pytest.approx({"start": 2.0, "train": 10.0, "other": 0.0})


def test_stopwatch_of_the_first_run_counts_from_process_creation():
    code = (
        "import time; time.sleep(0.4); from seedbed.track import clocks; clocks.mark_command(); now = time.monotonic();"
        "print(now - clocks.take_command_start(), time.monotonic() - clocks.take_command_start())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    first, second = map(float, printed)
    assert second < 0.1, "a second run of the process begins with itself"
    if sys.platform == "linux":
        assert first >= 0.4


@pytest.mark.parametrize("stat", ["", "1 (a) b) R", "1 (x) R " + "0 " * 18 + "999999999999 0", "1 (x) R " + "0 " * 18 + "0 0"])
def test_process_file_that_cannot_be_believed_is_not(monkeypatch, stat: str):
    monkeypatch.setattr(clocks.Path, "read_text", lambda self: stat)
    monkeypatch.setattr(clocks, "_IMPORTED", clocks.time.monotonic())
    assert clocks.process_start() == clocks._IMPORTED


def test_split_in_words():
    split = {"start": 8.04, "data": 0.01, "train": 28.6, "eval": 1.5, "other": 0.0}
    assert clocks.split_line(split) == "38.1 s: start 8.0, train 28.6, evaluation 1.5"
    assert clocks.split_in_words({"wall": split, "clock": {"train": 28.6}}) == clocks.split_line(split)
    assert clocks.split_in_words({"wall": split, "clock": {"train": 60.0}}).endswith("; train 60.0 with earlier starts")
    for damaged in ({}, {"wall": None}, {"wall": {}}, {"wall": {"train": "x"}}, {"wall": 3}):
        assert clocks.split_in_words(damaged) == ""
