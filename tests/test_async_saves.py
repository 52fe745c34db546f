"""Checkpoints that one process writes while it trains: the same ones, later; and no error or slow disk loses one."""

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_end, kinds, newest, resume, start, stop_at

from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading, loop

SETTINGS = ["model.dropout=0.3", "ema=0.9", "every.save=2", "every.eval=3"]


@pytest.fixture(autouse=True)
def async_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, and without the report, which has tests of its own."""
    monkeypatch.setattr(local, "saves_async", lambda device: True)
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0, fail_at: int | None = None) -> list[tuple[int, str]]:
    """Let writing take time, or fail at a step; steps and threads of the writes."""
    real, writes = checkpoint.save, []

    def save(folder: Path, step: int, *rest: Any) -> Path:
        writes.append((step, threading.current_thread().name))
        time.sleep(seconds)
        if step == fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, step, *rest)

    monkeypatch.setattr(checkpoint, "save", save)
    return writes


def test_async_saves_leave_the_same_checkpoints(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(local, "saves_async", lambda device: False)
        start(tmp_path, "plain", *SETTINGS)
    writes = slowed(monkeypatch)
    assert start(tmp_path, "async", *SETTINGS) == 0
    assert writes and {thread for _, thread in writes} == {"seedbed-saver"}
    assert_same_end(tmp_path, "plain", "async")
    folders = [tmp_path / name / "checkpoints" for name in ("plain", "async")]
    assert len({tuple(p.name for p in checkpoint.steps_in(folder)) for folder in folders}) == 1
    best = [checkpoint.best(folder) for folder in folders]
    assert best[0] and best[1] and best[0].name == best[1].name
    for path in checkpoint.steps_in(folders[1]):
        a, b = checkpoint_loading.load(path), checkpoint_loading.load(folders[0] / path.name)
        assert all((a.tensors[f][n] == b.tensors[f][n]).all() for f in a.tensors for n in a.tensors[f])


def test_async_saves_resume_equals_uninterrupted_run(tmp_path: Path, monkeypatch) -> None:
    start(tmp_path, "straight", *SETTINGS)
    slowed(monkeypatch, 0.05)
    stop_at(5, monkeypatch)
    assert start(tmp_path, "stopped", *SETTINGS) == 143
    assert newest(tmp_path, "stopped").step == 5, "a stop waits for its checkpoint"
    assert resume(tmp_path, "stopped") == 0
    assert_same_end(tmp_path, "straight", "stopped")


def test_async_saves_do_not_block_steps(tmp_path: Path, monkeypatch) -> None:
    passed, waited = threading.Event(), []
    real_save, real_step = checkpoint.save, loop.take_step

    def save(folder: Path, step: int, *rest: Any) -> Path:
        waited.append(step != 4 or passed.wait(20))
        return real_save(folder, step, *rest)

    def take(job: loop.Job) -> None:
        real_step(job)
        if job.step == 6:
            passed.set()

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(loop, "take_step", take)
    assert start(tmp_path, "slow", "every.save=4", "every.eval=0", "every.sample=0") == 0
    assert waited == [True, True, True], "the write of step 4 ended after step 6 was taken"
    assert checkpoint.steps_in(tmp_path / "slow" / "checkpoints")[0].name == "step-000004"


def test_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path, monkeypatch) -> None:
    slowed(monkeypatch, fail_at=4)
    assert start(tmp_path, "full", "every.save=4", "every.eval=0") == 0
    found = [path.name for path in checkpoint.steps_in(tmp_path / "full" / "checkpoints")]
    assert found == ["step-000008", "step-000012"] and kinds(tmp_path, "full").count("save_failed") == 1


def test_last_checkpoint_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch) -> None:
    slowed(monkeypatch, fail_at=12)
    with pytest.raises(UserError, match="its last checkpoint could not be written"):
        start(tmp_path, "last", "every.eval=0")


def test_error_between_steps_waits_for_the_checkpoint_under_way(tmp_path: Path, monkeypatch) -> None:
    slowed(monkeypatch, 0.2)
    real = loop.take_step

    def take(job: loop.Job) -> None:
        if job.step == 4:
            raise RuntimeError("a fault of the recipe")
        real(job)

    monkeypatch.setattr(loop, "take_step", take)
    with pytest.raises(RuntimeError, match="a fault"):
        start(tmp_path, "broken", "every.save=4", "every.eval=0", "every.sample=0")
    assert newest(tmp_path, "broken").step == 4 and "checkpoint" in kinds(tmp_path, "broken")
    assert Run.open(tmp_path, "broken").status()["status"] == "failed"
    monkeypatch.setattr(loop, "take_step", real)
    assert resume(tmp_path, "broken") == 0
