"""Equalities between whole runs: a straight run, and the same one stopped, resumed, split or damaged on the way."""

import os
from pathlib import Path

import pytest
from helpers import assert_same_end, kinds, newest, resume, rows, start, stop_at

from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.track import edits
from seedbed.track.run import Run
from seedbed.train import checkpoint, loop


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the curves takes longer than these runs; it has tests of its own."""
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


SETTINGS = {
    "plain": [],
    "all at once": ["accum=4", "model.dropout=0.3", "ema=0.9"],
    "muon": ["optim.kind=muon", "ema=0.5"],
    "bf16": ["precision=bf16"],
    "fp16": ["precision=fp16", "accum=2"],
    "several epochs": ["data.num=13"],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("stops", [[5], [1, 4, 11]])
def test_resume_equals_the_straight_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list, stops: list) -> None:
    assert start(tmp_path, "straight", *settings) == 0
    stop_at(stops[0], monkeypatch)
    assert start(tmp_path, "stopped", *settings) == 143
    for stop in stops[1:]:
        stop_at(stop, monkeypatch)
        assert resume(tmp_path, "stopped") == 143
    assert resume(tmp_path, "stopped") == 0
    assert_same_end(tmp_path, "straight", "stopped")
    assert kinds(tmp_path, "stopped").count("resume") == len(stops)


def test_instruments_do_not_change_training(tmp_path: Path) -> None:
    settings = ["model.dropout=0.3", "ema=0.9"]
    start(tmp_path, "often", *settings, "every.eval=1", "every.sample=1", "every.save=1", "every.log=1")
    start(tmp_path, "never", *settings, "every.eval=0", "every.sample=0", "every.save=0", "every.log=1")
    a, b = newest(tmp_path, "often"), newest(tmp_path, "never")
    assert all((a.tensors[f][n] == b.tensors[f][n]).all() for f in a.tensors for n in a.tensors[f])
    assert rows(tmp_path, "often") == rows(tmp_path, "never")


def test_damaged_newest_checkpoint_falls_back_and_ends_the_same(tmp_path: Path, monkeypatch, capsys) -> None:
    start(tmp_path, "straight")
    stop_at(9, monkeypatch)
    start(tmp_path, "damaged")
    folder = tmp_path / "damaged" / "checkpoints"
    assert [p.name for p in checkpoint.steps_in(folder)] == ["step-000004", "step-000008", "step-000009"]
    data = bytearray((folder / "step-000009" / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (folder / "step-000009" / "model.safetensors").write_bytes(data)
    os.truncate(folder / "step-000008" / "state.json", 9)
    assert resume(tmp_path, "damaged") == 0
    said = capsys.readouterr().out
    assert "step-000009/model.safetensors does not match its checksum" in said and "resumed at step 4 of 12" in said
    assert_same_end(tmp_path, "straight", "damaged")


def seen_by(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sample counters that training really consumed, in order."""
    seen: list[int] = []
    real = loop.take_step

    def take(job: loop.Job) -> None:
        counter, batch = job.counter, job.config.batch
        real(job)
        assert job.stepper.feed.part(0)["index"][0] == counter
        seen.extend(range(counter, counter + batch))

    monkeypatch.setattr(loop, "take_step", take)
    return seen


def test_half_the_batch_sees_each_remaining_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_by(monkeypatch)
    stop_at(5, monkeypatch)
    start(tmp_path, "halved")
    assert seen == list(range(40))
    monkeypatch.undo()
    seen = seen_by(monkeypatch)
    assert resume(tmp_path, "halved", "batch=4") == 0
    assert seen == list(range(40, 96)), "each of the 56 remaining samples, once, in order"
    last = rows(tmp_path, "halved")[-1]
    assert last["step"] == 5 + 56 // 4 and last["items"] == 96
    assert last["lr"] == pytest.approx(1e-3), "the schedule follows items, so it ends at its floor"
    assert Run.open(tmp_path, "halved").config_json()["config"]["batch"] == 4


def test_more_steps_stretch_a_finished_run(tmp_path: Path) -> None:
    start(tmp_path, "short")
    with pytest.raises(UserError, match=r"is finished; to train it longer: seedbed resume short steps=24"):
        resume(tmp_path, "short")
    assert resume(tmp_path, "short", "steps=20") == 0
    assert rows(tmp_path, "short")[-1]["step"] == 20 and newest(tmp_path, "short").step == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.width=8", "model.width cannot change on resume"),
        ("optim.lr=1", "optim.lr cannot change on resume"),
        ("seed=7", "seed cannot change on resume"),
        ("data.num=50", "data.num cannot change on resume"),
        ("steps=3", "steps=3 is before step 5"),
        ("nonsense=1", "unknown key"),
    ],
)
def test_fixed_keys_cannot_change_on_resume(tmp_path: Path, monkeypatch, change: str, message: str) -> None:
    stop_at(5, monkeypatch)
    start(tmp_path, "one")
    before = newest(tmp_path, "one")
    with pytest.raises(UserError, match=message):
        resume(tmp_path, "one", change)
    assert resume(tmp_path, "one") == 0, "the refusal has harmed nothing"
    assert before.step == 5


def test_killed_run_without_a_checkpoint_starts_again(tmp_path: Path, monkeypatch) -> None:
    def die(job: loop.Job) -> None:
        raise KeyboardInterrupt

    start(tmp_path, "straight")
    monkeypatch.setattr(loop, "take_step", die)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, "early")
    monkeypatch.undo()
    assert resume(tmp_path, "early") == 0
    assert_same_end(tmp_path, "straight", "early")


def test_changed_data_is_refused_with_both_names(tmp_path: Path, monkeypatch) -> None:
    stop_at(5, monkeypatch)
    start(tmp_path, "one")
    state = tmp_path / "one" / "config.json"
    state.write_text(state.read_text().replace('"num": 96', '"num": 95'))
    with pytest.raises(UserError, match=r"was edited.*data\.num 96 -> 95"):
        resume(tmp_path, "one")
    assert edits.accept(Run.open(tmp_path, "one"))
    with pytest.raises(UserError, match="trained on sums-96, the source now gives sums-95"):
        resume(tmp_path, "one")
