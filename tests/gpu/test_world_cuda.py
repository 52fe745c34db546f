"""What only a GPU can show of the world recipe: captured and compiled steps equal eager ones in every stage."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import rows, train_once
from world_samples import TINY, made

from seedbed.recipes.world.curriculum import Stage
from seedbed.recipes.world.evaluate import free_run
from seedbed.recipes.world.examine import examine, trajectory_batch
from seedbed.track.run import Run
from seedbed.train.system import Sample

pytestmark = pytest.mark.usefixtures("no_report")
QUIET = ["device=cuda", "precision=fp32", "compile=off", "every.log=1", "every.eval=0", "every.sample=0", "every.save=0"]
STAGES = [Stage("open", 1), Stage("closed", 3), Stage("critic", 2), Stage("adversarial", 2, 0.5)]


@pytest.fixture(autouse=True)
def no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seedbed.recipes.world.emulator.Emulator.sample", lambda *given: Sample())


def fixed(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    """Let every step of a run be of this stage."""
    monkeypatch.setattr("seedbed.recipes.world.emulator.Emulator.variant", lambda self, step, num_steps: stage)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a stage: captured and compiled steps are compared with the same eager ones."""
    return tmp_path_factory.mktemp("world")


def losses(root: Path, name: str, *settings: str) -> list[tuple[float, float]]:
    train_once(root, name, *TINY, "steps=8", *QUIET, "model.adversarial=0.9", *settings, recipe="world/demo")
    return [(row["loss"], row["loss_closed"]) for row in rows(root, name)]


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_captured_equals_eager(root: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    fixed(monkeypatch, stage)
    eager = losses(root, f"eager-{stage.name}", "capture=off")
    captured = losses(root, f"captured-{stage.name}")
    assert "captured as one CUDA graph" in (root / f"captured-{stage.name}" / "console.log").read_text()
    np.testing.assert_allclose(captured, eager, rtol=2e-3)


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_compiled_equals_eager(root: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    fixed(monkeypatch, stage)
    eager = losses(root, f"eager-{stage.name}", "capture=off")
    compiled = losses(root, f"compiled-{stage.name}", "compile=blocks", "model.channels_last=true")
    log = (root / f"compiled-{stage.name}" / "console.log").read_text()
    assert "compiled (blocks), captured" in log and "goes on eager" not in log, log
    np.testing.assert_allclose(compiled, eager, rtol=1e-2)


@pytest.mark.parametrize("feedback", ["denoised", "drawn"])
def test_denoiser_is_captured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feedback: str) -> None:
    fixed(monkeypatch, Stage("closed", 2))
    settings = ["model.kind=edm", "model.adversarial=1", f"model.feedback={feedback}"]
    found = [losses(tmp_path, name, *settings, extra) for name, extra in (("eager", "capture=off"), ("captured", "capture=auto"))]
    assert "captured as one CUDA graph" in (tmp_path / "captured" / "console.log").read_text()
    np.testing.assert_allclose(found[1], found[0], rtol=5e-3)


def test_half_precision_follows_whole_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, Stage("closed", 3))
    half, whole = losses(tmp_path, "half", "precision=bf16"), losses(tmp_path, "whole")
    np.testing.assert_allclose(half, whole, rtol=5e-2)


def test_step_equals_that_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, Stage("closed", 3))
    # The same bytes on both: frames drawn on a GPU may differ at the edges of checkers.
    made()
    monkeypatch.setattr("seedbed.recipes.world.data._render_device", lambda config: "cpu")
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
def test_full_evaluation_runs_on_the_device() -> None:
    system, _, _ = made()
    system.cuda()
    found = examine(system, system.data.valid, None, 4)  # type: ignore[arg-type]
    assert found["frames_per_s"] > 0 and set(found["horizons"]) >= {"1", "4"}


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["direct", "edm"])
def test_graphed_rollouts_equal_ungraphed_ones(kind: str, compiled: bool) -> None:
    """For two numbers of rows, other controls, another noise level, and rollouts that take turns: the same kernels and shapes."""
    system, _, _ = made(f"model.kind={kind}", "model.closed=1", "model.adversarial=1")
    system.cuda()
    big, small = (trajectory_batch(system, system.data.valid, num, 6) for num in (11, 2))  # type: ignore[arg-type]
    if compiled:  # as a step of training compiles it
        system.net.compile(dynamic=False)
        system.train()
        system.trained_rows = system._chunk = 8
        system.predict_frame(big.memory(system), big.action(1), big.index_B, 1)
        system._chunk = 0
    given = [(big, None, 0.0), (small, None, 0.0), (big, [big.action(1).roll(1, 0)] * 6, 0.0), (big, None, 0.05)]

    def frames() -> list[torch.Tensor]:
        both = zip(*(free_run(system, traj, 6, actions, level) for traj, actions, level in given), strict=True)
        return [frame for shown in both for _, frame in shown]

    with system.with_compiled_graph():
        plain = frames()
    with system.long_rollouts():
        graphed, graphs = frames(), system._graphs
        assert graphs is not None and graphs.is_possible and len(graphs.recorded) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, graphed, strict=True))
