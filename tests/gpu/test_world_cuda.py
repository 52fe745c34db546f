"""What only a GPU can show of the world recipe: captured and compiled steps equal eager ones in every stage."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import rows, start
from world_samples import TINY, made

from seedbed.launch import local
from seedbed.recipes.world.examine import examine
from seedbed.recipes.world.stages import Stage
from seedbed.track.run import Run
from seedbed.train.system import Sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
QUIET = ["device=cuda", "precision=fp32", "compile=off", "every.log=1", "every.eval=0", "every.sample=0", "every.save=0"]
STAGES = [Stage("open", 1), Stage("closed", 3), Stage("critic", 2), Stage("adversarial", 2, 0.5)]


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    monkeypatch.setattr("seedbed.recipes.world.emulator.Emulator.sample", lambda *given: Sample())


def fixed(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    """Let every step of a run be of this stage."""
    monkeypatch.setattr("seedbed.recipes.world.emulator.Emulator.variant", lambda self, step, num_steps: stage)


def losses(root: Path, name: str, *settings: str) -> list[tuple[float, float]]:
    settings = ("model.adversarial=0.9", *settings)
    assert start(root, name, *TINY, "steps=8", *QUIET, *settings, recipe="world/demo") == 0
    return [(row["loss"], row["loss_closed"]) for row in rows(root, name)]


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_captured_equals_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    fixed(monkeypatch, stage)
    eager = losses(tmp_path, "eager", "capture=off")
    captured = losses(tmp_path, "captured")
    assert "captured as one CUDA graph" in (tmp_path / "captured" / "console.log").read_text()
    np.testing.assert_allclose(captured, eager, rtol=2e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_compiled_equals_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    fixed(monkeypatch, stage)
    eager = losses(tmp_path, "eager", "capture=off")
    compiled = losses(tmp_path, "compiled", "compile=blocks", "model.channels_last=true")
    log = (tmp_path / "compiled" / "console.log").read_text()
    assert "compiled (blocks), captured" in log and "goes on eager" not in log, log
    np.testing.assert_allclose(compiled, eager, rtol=1e-2)


@pytest.mark.parametrize("feedback", ["denoised", "drawn"])
def test_the_denoiser_is_captured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feedback: str) -> None:
    fixed(monkeypatch, Stage("closed", 2))
    settings = ["model.kind=edm", "model.adversarial=1", f"model.feedback={feedback}"]
    found = [losses(tmp_path, name, *settings, extra) for name, extra in (("eager", "capture=off"), ("captured", "capture=auto"))]
    assert "captured as one CUDA graph" in (tmp_path / "captured" / "console.log").read_text()
    np.testing.assert_allclose(found[1], found[0], rtol=5e-3)


def test_half_precision_follows_whole_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, Stage("closed", 3))
    half, whole = losses(tmp_path, "half", "precision=bf16"), losses(tmp_path, "whole")
    np.testing.assert_allclose(half, whole, rtol=5e-2)


def test_a_step_equals_that_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, Stage("closed", 3))
    # The same bytes on both: frames drawn on a GPU may differ at the edges of checkers.
    made()
    monkeypatch.setattr("seedbed.recipes.world.recordings._drawn_on", lambda config: "cpu")
    on_cpu = losses(tmp_path, "cpu", "device=cpu", "steps=3")
    np.testing.assert_allclose(losses(tmp_path, "cuda", "steps=3"), on_cpu, rtol=2e-3)


def test_stages_change_inside_one_captured_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = [Stage("open", 1)] * 3 + [Stage("closed", 2)] * 3 + [Stage("critic", 2)] * 2 + [Stage("adversarial", 2)] * 4
    monkeypatch.setattr("seedbed.recipes.world.emulator.Emulator.variant", lambda self, step, num: order[min(step, 11)])
    found = []
    for name, extra in (("eager", "capture=off"), ("captured", "capture=auto")):
        losses(tmp_path, name, "steps=12", extra)
        found.append([[r["loss"], r["loss_critic"], r["own_frames"]] for r in Run.open(tmp_path, name).rows()])
    np.testing.assert_allclose(found[1], found[0], rtol=5e-3, atol=1e-5)
    assert "captured as one CUDA graph" in (tmp_path / "captured" / "console.log").read_text()


@torch.no_grad()
def test_the_battery_runs_on_the_device() -> None:
    system, _, _ = made()
    system.cuda()
    found = examine(system, system.data.valid, None, 4)  # type: ignore[arg-type]
    assert found["frames_per_s"] > 0 and set(found["horizons"]) >= {"1", "4"}
