"""Checkpoint names beyond six digits, and folders inside checkpoints/ that we did not make."""

import random
from pathlib import Path

import pytest
import torch
from helpers import assert_same_end, kinds, newest, resume, start, stop_at

from seedbed.checks.replay_context import starting_point
from seedbed.launch import local
from seedbed.report import summaries
from seedbed.track.folders import folder_name, step_names, step_of
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


EDGES = [1, 999_998, 999_999, 1_000_000, 1_000_001, 9_999_999, 10_000_000, 999_999_999, 1_000_000_000, 1_000_000_001, 2**40]


def test_checkpoint_name_and_step_round_trip() -> None:
    rng = random.Random(0)
    for step in [*EDGES, *(rng.randrange(10 ** rng.randint(1, 18)) for _ in range(500))]:
        assert step_of(folder_name(step)) == step and len(folder_name(step)) == 5 + max(6, len(str(step)))
    assert folder_name(240) == "step-000240" and folder_name(1_000_120) == "step-1000120"


STRANGE = ["step-000060-copy", "step-60", "step-0000060", "step-", "step-00006x", "step-०००००६", "Step-000060", "step-000060.bak"]


@pytest.mark.parametrize("name", STRANGE)
def test_checkpoint_names_of_other_forms_are_ignored(name: str) -> None:
    assert step_of(name) is None


def save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, step, {"model": {"w": torch.full((2,), float(step))}}, {})


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shuffled = random.Random(1).sample(EDGES, len(EDGES))
    for step in shuffled:
        save(folder, step)
    assert step_names(folder) == [folder_name(step) for step in EDGES] == Run(tmp_path).checkpoints()[0]
    assert [one["step"] for one in summaries.describe_checkpoints(Run(tmp_path))[0]] == EDGES
    for step in (1_000_000, 1_000_000_000):
        assert [p.name for p in checkpoint.steps_before(folder, step)] == [folder_name(s) for s in EDGES if s < step]
    newest = checkpoint_loading.load_newest(folder)
    assert newest is not None and newest.step == EDGES[-1]


@pytest.mark.parametrize("edge", [10**6, 10**9])
def test_pruning_and_forgetting_go_by_number(tmp_path: Path, edge: int) -> None:
    for step in range(edge - 3, edge + 4):
        path = save(tmp_path, step)
        if step == edge - 2:
            checkpoint.mark_best(tmp_path, path)
        checkpoint.prune(tmp_path, keep=2)
        found = checkpoint_loading.load_newest(tmp_path)
        assert found is not None and found.step == step
    assert step_names(tmp_path) == [folder_name(s) for s in (edge - 2, edge + 2, edge + 3)]
    checkpoint.forget_after(tmp_path, edge + 2)
    assert step_names(tmp_path) == [folder_name(edge - 2), folder_name(edge + 2)]
    checkpoint.forget_after(tmp_path, edge - 1)
    assert step_names(tmp_path) == [folder_name(edge - 2)]
    assert checkpoint.best(tmp_path) == (tmp_path / folder_name(edge - 2)).resolve()


@pytest.mark.parametrize("edge", [10**6, 10**9])
def test_replay_starts_at_the_checkpoint_below_the_step(tmp_path: Path, edge: int) -> None:
    for step in (edge - 2, edge + 1, edge + 5):
        save(tmp_path / "checkpoints", step)
    for step, wanted in ((edge - 1, edge - 2), (edge + 1, edge - 2), (edge + 2, edge + 1), (edge + 9, edge + 5)):
        found, _ = starting_point(Run(tmp_path), step)
        assert found is not None and found.step == wanted


def test_prune_keeps_folders_of_other_names(tmp_path: Path) -> None:
    mine = ["step-000020-copy", "step-000020.bak", "step-99", ".aside-mine", "notes"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "dear").write_text("to me")
    for step in range(10, 60, 10):
        save(tmp_path, step)
        checkpoint.prune(tmp_path, keep=1)
    checkpoint.forget_after(tmp_path, 0)
    assert step_names(tmp_path) == []
    assert all((tmp_path / name / "dear").read_text() == "to me" for name in mine)


@pytest.mark.parametrize("edge", [10**6, pytest.param(10**9, marks=pytest.mark.slow)])
def test_resume_across_a_million_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: int) -> None:
    """A run that stands shortly before the edge trains over it, is stopped beyond it, and goes on where it stopped."""
    for name in ("straight", "stopped"):
        start(tmp_path, name, "steps=4", "every.save=2", "keep=2")
        move_to(tmp_path / name, edge - 5)
    assert resume(tmp_path, "straight", f"steps={edge + 9}") == 0
    stop_at(edge + 2, monkeypatch)
    assert resume(tmp_path, "stopped", f"steps={edge + 9}") == 143
    assert newest(tmp_path, "stopped").step == edge + 2
    assert resume(tmp_path, "stopped") == 0 and kinds(tmp_path, "stopped").count("resume") == 2
    assert newest(tmp_path, "stopped").step == edge + 9
    assert_same_end(tmp_path, "straight", "stopped")


def move_to(run: Path, step: int) -> None:
    """Let a run's last checkpoint be that of a far later step."""
    saved = checkpoint_loading.load_newest(run / "checkpoints")
    assert saved is not None
    for path in checkpoint.steps_in(run / "checkpoints"):
        checkpoint.remove(path)
    part = checkpoint.Part(origin=lambda: saved.origin)
    checkpoint.save(run / "checkpoints", step, saved.tensors, {**saved.state, "items": step * 8}, part)


def test_folder_called_tmp_is_ignored(tmp_path: Path) -> None:
    start(tmp_path, "one", "steps=2")
    (tmp_path / "one" / ".x.tmp").mkdir()
    (tmp_path / "one" / ".x.tmp" / "dear").write_text("to me")
    with Run.open(tmp_path, "one").lock():
        assert (tmp_path / "one" / ".x.tmp" / "dear").exists()
    (tmp_path / ".x.tmp").mkdir()
    start(tmp_path, "two", "steps=2")
    assert (tmp_path / ".x.tmp").is_dir()
