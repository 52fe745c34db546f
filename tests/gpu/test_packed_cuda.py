"""Packs on a GPU: one graph for all runs, equal to eager steps and to the same runs alone, also after packing again."""

from pathlib import Path

import pytest
import torch
from helpers import kinds, newest, no_host_sync, resume, rows, start
from test_packed import GRID, RECIPE, at_step, folders, stop

from seedbed.launch import trials
from seedbed.track.run import Run
from seedbed.tune.packing.pack import Pack

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TensorFloat-32, so that what is compared differs by rounding of float32 only."""
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda name: None)


def train(root: Path, name: str, *settings: str) -> dict[str, str]:
    return trials.train_packed(folders(root, name, [[*s, "device=cuda", *settings] for s in GRID]))


def assert_close(root: Path, one: str, other: str) -> None:
    """Adam amplifies rounding, so losses are compared closely and weights loosely."""
    a, b = newest(root, one), newest(root, other)
    assert a.step == b.step
    torch.testing.assert_close(b.tensors["model"], a.tensors["model"], rtol=1e-2, atol=2e-3)
    for mine, theirs in zip(rows(root, one), rows(root, other), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def how(root: Path, name: str) -> list[str]:
    return [event["step_runs"] for event in Run.open(root, name).events() if event["kind"] == "pack"]


def test_captured_equals_eager_and_alone(tmp_path: Path) -> None:
    assert set(train(tmp_path, "c").values()) == set(train(tmp_path, "e", "capture=off").values()) == {"done"}
    assert all("captured as one CUDA graph" in text for text in how(tmp_path, "c0"))
    assert all("capture=off" in text for text in how(tmp_path, "e0"))
    for k, settings in enumerate(GRID):
        assert start(tmp_path, f"a{k}", *settings, "device=cuda", recipe=RECIPE) == 0
        assert_close(tmp_path, f"e{k}", f"c{k}")
        assert_close(tmp_path, f"a{k}", f"c{k}")


def test_compiled_equals_eager(tmp_path: Path) -> None:
    train(tmp_path, "c", "compile=whole")
    train(tmp_path, "e", "capture=off")
    assert "compiled (whole), captured as one CUDA graph" in how(tmp_path, "c0")[0]
    for k in range(len(GRID)):
        assert_close(tmp_path, f"e{k}", f"c{k}")


@pytest.mark.parametrize("settings", [["data.poison=70", "guard.max_skips=0"], ["optim.lr=10", "optim.clip=0"]], ids=" ".join)
def test_diverging_trial_changes_no_other(tmp_path: Path, settings: list[str]) -> None:
    for name, extra in (("c", []), ("s", settings)):
        grid = [[*s, "device=cuda"] for s in [*GRID, ["seed=9", "every.save=0", "every.eval=0", *extra]]]
        trials.train_packed(folders(tmp_path, name, grid))
    for k in range(len(GRID)):
        a, b = newest(tmp_path, f"c{k}"), newest(tmp_path, f"s{k}")
        for file, group in a.tensors.items():
            assert all(torch.equal(tensor, b.tensors[file][name]) for name, tensor in group.items())


def test_packing_again_captures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pack, "_pays", lambda self, left: True)
    grid = [["steps=7"], ["steps=9"], ["steps=24", "seed=3"], ["steps=30", "seed=4"]]
    trials.train_packed(folders(tmp_path, "r", [[*s, "device=cuda"] for s in grid]))
    assert len(how(tmp_path, "r3")) == 3 and all("captured" in text for text in how(tmp_path, "r3"))
    assert start(tmp_path, "a", *grid[3], "device=cuda", recipe=RECIPE) == 0
    assert_close(tmp_path, "a", "r3")


def test_interrupted_trial_resumes_as_a_single_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at_step(11, stop, patch)
        assert set(train(tmp_path, "p").values()) == {"interrupted"}
    assert resume(tmp_path, "p1") == 0
    assert start(tmp_path, "a1", *GRID[1], "device=cuda", recipe=RECIPE) == 0
    assert "resume" in kinds(tmp_path, "p1")
    assert_close(tmp_path, "a1", "p1")


def test_step_does_not_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Pack.take_step

    def take(self: Pack) -> None:
        with no_host_sync():
            real(self)

    monkeypatch.setattr(Pack, "take_step", take)
    assert set(train(tmp_path, "p").values()) == {"done"}
