"""The training loop on a small recipe: which rows, evaluations and checkpoints a run leaves, and that it learns."""

from pathlib import Path

import pytest
from helpers import kinds, resume, rows, start, stop_at

from seedbed.launch import local
from seedbed.train import checkpoint


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


def test_loop_writes_rows_evaluations_and_checkpoints_on_schedule(tmp_path: Path) -> None:
    assert start(tmp_path, "one", "steps=12", "every.log=3", "every.eval=4", "every.save=6", "keep=9") == 0
    assert [row["step"] for row in rows(tmp_path, "one") if "loss" in row] == [3, 6, 9, 12]
    assert kinds(tmp_path, "one").count("eval") == 3
    saved = {path.name for path in checkpoint.steps_in(tmp_path / "one" / "checkpoints")}
    assert saved == {"step-000006", "step-000012", "step-000004", "step-000008"}, "by schedule, and each new best"


def test_loop_lowers_the_loss(tmp_path: Path) -> None:
    assert start(tmp_path, "one", "steps=60", "optim.lr=3e-2") == 0
    losses = [row["loss"] for row in rows(tmp_path, "one")]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_loop_continues_rows_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, "straight")
    stop_at(5, monkeypatch)
    assert start(tmp_path, "stopped") == 143 and resume(tmp_path, "stopped") == 0
    same = [(row["step"], row["loss"]) for row in rows(tmp_path, "straight")]
    assert [(row["step"], row["loss"]) for row in rows(tmp_path, "stopped")] == same
