"""Trouble in the middle of a run: what is skipped, what is rolled back, what stops, and that nothing is lost."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import TOY, assert_same_end, kinds, newest, resume, rows, start, stop_at

from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.track import files
from seedbed.track.run import Run
from seedbed.train import checkpoint_loading, loop


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


def at_step(step: int, monkeypatch: pytest.MonkeyPatch, act, times: int = 1) -> None:
    """Do something to the job just before it takes its step number `step`, the first `times` times."""
    real, left = loop.take_step, [times]

    def take(job: loop.Job) -> None:
        if job.step + 1 == step and left[0]:
            left[0] -= 1
            act(job)
        real(job)

    monkeypatch.setattr(loop, "take_step", take)


def events(root: Path, name: str, kind: str) -> list[dict]:
    return [e for e in Run.open(root, name).events() if e["kind"] == kind]


@pytest.mark.parametrize("accum", [1, 4])
def test_poisoned_item_costs_one_step_an_epoch(tmp_path: Path, accum: int) -> None:
    assert start(tmp_path, "one", "data.poison=7", f"accum={accum}", "steps=24") == 0
    found = events(tmp_path, "one", "nonfinite")
    assert len(found) == 2 and all(e["answer"] == "skip" and "loss is not finite" in e["what"] for e in found)
    assert torch.isfinite(newest(tmp_path, "one").tensors["model"]["net.0.weight"]).all()
    logged = [r["step"] for r in rows(tmp_path, "one")]
    assert logged == [s for s in range(1, 25) if s not in {e["step"] for e in found}]


def test_skipped_step_equals_a_run_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a skipped step the weights are those from before it, so the run goes on as if the update had been zero."""
    start(tmp_path, "poisoned", "data.poison=7", "every.save=1", "keep=20")
    step = events(tmp_path, "poisoned", "nonfinite")[0]["step"]
    folder = tmp_path / "poisoned" / "checkpoints"
    before = checkpoint_loading.load(folder / f"step-{step - 1:06d}").tensors
    after = checkpoint_loading.load(folder / f"step-{step + 1:06d}").tensors
    assert not (folder / f"step-{step:06d}").exists()
    count = "main.count.net.0.weight"
    assert after["optim"][count] == before["optim"][count] + 1, "two steps, one of them skipped"


def test_resume_around_a_skipped_step_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, "straight", "data.poison=7", "ema=0.9")
    bad = events(tmp_path, "straight", "nonfinite")[0]["step"]
    for name, stop in (("before", bad - 1), ("at", bad), ("after", bad + 1)):
        stop_at(stop, monkeypatch)
        assert start(tmp_path, name, "data.poison=7", "ema=0.9") == 143
        assert resume(tmp_path, name) == 0
        assert_same_end(tmp_path, "straight", name)


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_nonfinite_weights_end_the_run_with_intact_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Every later step is bad, and every reload is poisoned again: the caps must end it."""

    def poison(job: loop.Job) -> None:
        with torch.no_grad():
            job.system.net[0].weight[0, 0] = float("nan")

    at_step(9, monkeypatch, poison, times=1000)
    assert start(tmp_path, "one", f"guard.policy={policy}", "guard.max_rollbacks=2") == 1
    assert Run.open(tmp_path, "one").status()["status"] == "nan"
    saved = newest(tmp_path, "one")
    assert saved.step == 8 and torch.isfinite(saved.tensors["model"]["net.0.weight"]).all()
    assert kinds(tmp_path, "one").count("rollback") == (2 if policy == "rollback" else 0)


def test_rollback_restores_moments_too_and_skips_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(job: loop.Job) -> None:
        with torch.no_grad():
            job.system.net[0].weight[0, 0] = float("nan")

    at_step(10, monkeypatch, poison, times=1)
    assert start(tmp_path, "one", "guard.max_skips=0") == 0
    (back,) = events(tmp_path, "one", "rollback")
    assert back["to"] == 8 and back["skipped_items"] == 16
    monkeypatch.undo()
    # The same, by hand: continue from step 8 in a fresh process, with the data moved on by two batches.
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    stop_at(8, monkeypatch)
    start(tmp_path, "other", "guard.max_skips=0")

    def move_on(job: loop.Job) -> None:
        job.skipped_items = 16
        job.incidents.num_rollbacks = 1
        job.incidents.watch.restart()

    at_step(9, monkeypatch, move_on)
    assert resume(tmp_path, "other") == 0
    a, b = newest(tmp_path, "one"), newest(tmp_path, "other")
    assert all(torch.equal(a.tensors[f][n], b.tensors[f][n]) for f in a.tensors for n in a.tensors[f])
    assert a.state["items"] == b.state["items"] == 96 and a.state["skipped_items"] == 16


def test_kick_is_seen_as_a_spike_and_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kick(job: loop.Job) -> None:
        with torch.no_grad():
            job.system.net[3].weight.mul_(50)

    at_step(60, monkeypatch, kick)
    settings = ["steps=80", "guard.window=32", "data.num=960", "every.save=10", "every.eval=10"]
    assert start(tmp_path, "one", *settings) == 0
    assert len(events(tmp_path, "one", "spike")) == 3 and events(tmp_path, "one", "rollback")[0]["to"] <= 60
    assert rows(tmp_path, "one")[-1]["loss"] < 1.0
    steps = [r["step"] for r in rows(tmp_path, "one")]
    assert steps == sorted(set(steps)) == list(range(1, 81)), "the rows tell the course that was kept"


def test_clean_run_raises_no_event(tmp_path: Path) -> None:
    start(tmp_path, "one", "steps=400", "data.num=960", "batch=64", "every.eval=100", "every.save=100")
    assert set(kinds(tmp_path, "one")) == {"preflight", "start", "model", "eval", "checkpoint", "sample", "end"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_says_how_to_go_on(tmp_path: Path, monkeypatch, capsys, number: int) -> None:
    at_step(6, monkeypatch, lambda job: os.kill(os.getpid(), number))
    handler = signal.getsignal(number)
    assert start(tmp_path, "one") == 128 + number
    assert signal.getsignal(number) is handler, "the handlers are put back"
    assert "seedbed resume one" in capsys.readouterr().out
    assert newest(tmp_path, "one").step == 6 and Run.open(tmp_path, "one").status()["status"] == "interrupted"


def test_full_disk_during_a_save_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    real = files.write_synced

    def full(path: Path, data: bytes) -> None:
        if "step-000008" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(files, "write_synced", full)
    assert start(tmp_path, "one") == 0
    assert "No space left" in capsys.readouterr().out and "save_failed" in kinds(tmp_path, "one")
    names = [p.name for p in local.checkpoint.steps_in(tmp_path / "one" / "checkpoints")]
    assert names == ["step-000004", "step-000012"]


def test_full_disk_at_the_end_is_an_error_and_the_run_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.write_synced

    def full(path: Path, data: bytes) -> None:
        if "step-000012" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    start(tmp_path, "straight")
    monkeypatch.setattr(files, "write_synced", full)
    with pytest.raises(UserError, match="free some space"):
        start(tmp_path, "full")
    monkeypatch.setattr(files, "write_synced", real)
    assert resume(tmp_path, "full") == 0
    assert_same_end(tmp_path, "straight", "full")


def test_run_in_use_is_refused(tmp_path: Path, monkeypatch) -> None:
    stop_at(5, monkeypatch)
    start(tmp_path, "one")
    with Run.open(tmp_path, "one").lock(), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        resume(tmp_path, "one")
    assert resume(tmp_path, "one") == 0


def test_name_that_exists_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    start(tmp_path, "one")
    before = {p: p.read_bytes() for p in (tmp_path / "one").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="run one exists already"):
        start(tmp_path, "one")
    assert before == {p: p.read_bytes() for p in (tmp_path / "one").rglob("*") if p.is_file()}


@pytest.mark.parametrize("is_constant", [True, False])
def test_sudden_dip_is_reported_with_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_constant: bool) -> None:
    """A step whose loss falls far below its band is an alarm; where the rows of its batch are constant, that is what it says."""
    source = find(TOY)[0].function("data", "Sums")
    real = source.batch

    def batch(self, raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = real(self, raw)
        if int(raw["index"][0]) != 512 * 49:
            return found
        return {**found, "y": found["y"] * 0, "x": found["x"] * (0 if is_constant else 1e-2)}

    monkeypatch.setattr(source, "batch", batch)
    start(tmp_path, "one", "data.num=4096", "optim.lr=1e-8", "steps=60", "guard.window=32", "batch=512")
    kinds_found = {e["kind"]: e["step"] for kind in ("dip", "degenerate") for e in events(tmp_path, "one", kind)}
    assert kinds_found == ({"degenerate": 50} if is_constant else {"dip": 50})
