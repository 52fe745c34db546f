"""The demos as they are typed: on a machine with a GPU they train there, captured, and their sweeps as one stacked model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import rows, start
from world_samples import TINY

from seedbed.cli import main
from seedbed.track.run import Run
from seedbed.train.system import Sample

pytestmark = pytest.mark.usefixtures("no_report")
QUIET = ("steps=6", "every.log=1", "every.eval=0", "every.sample=0", "every.save=0", "limit.valid=4")
SMALL = {
    "gpt": ("data.text=reference",),
    "flow": ("model.depth=1",),
    "thinker": (),
    "ebt": ("model.control=false",),
    "world": tuple(TINY),
}


@pytest.fixture(autouse=True)
def no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sample of some recipes is an examination that takes minutes."""
    for name in ("ebt.system.EnergySystem", "world.emulator.Emulator", "flow.system.Flow", "thinker.system.ThinkerSystem"):
        monkeypatch.setattr(f"seedbed.recipes.{name}.sample", lambda *given: Sample())


@pytest.mark.parametrize("recipe", SMALL)
def test_demo_trains_on_the_gpu_as_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    # The same bytes on both: frames drawn on a GPU may differ at the edges of checkers.
    monkeypatch.setattr("seedbed.recipes.world.data._render_device", lambda config: "cpu")
    assert start(tmp_path, "auto", *SMALL[recipe], *QUIET, recipe=f"{recipe}/demo") == 0
    log = (tmp_path / "auto" / "console.log").read_text()
    assert "captured as one CUDA graph" in log and torch.cuda.get_device_name() in log, log
    assert start(tmp_path, "cpu", *SMALL[recipe], *QUIET, "device=cpu", recipe=f"{recipe}/demo") == 0
    assert rows(tmp_path, "auto")[0]["loss"] == pytest.approx(rows(tmp_path, "cpu")[0]["loss"], rel=2e-3)


def test_sweep_is_packed_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    grid = ("optim.lr=1e-3,3e-3,6e-3", "steps=8", "every.log=1", "every.eval=0")
    asked = ["sweep", "thinker/demo", *grid, "--seeds", "2", "--no-check", "--dirty"]
    assert main([*asked, "--name", "together"]) == 0
    assert "packed: 6 trials train as one stacked model on cuda" in capsys.readouterr().out
    assert main([*asked, "--name", "apart", "--no-pack"]) == 0
    assert "one by one: packs were declined (--no-pack)" in capsys.readouterr().out
    for k in range(1, 7):
        one, other = (rows(tmp_path / "runs", f"{name}-{k:04d}") for name in ("together", "apart"))
        np.testing.assert_allclose([r["loss"] for r in one], [r["loss"] for r in other], rtol=1e-3)
        events = Run.open(tmp_path / "runs", f"together-{k:04d}").events()
        assert any("captured as one CUDA graph" in e["step_runs"] for e in events if e["kind"] == "pack")


def test_typed_inputs_are_checked_beside_a_curriculum_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2 of a gated curriculum: its stage is on the GPU, the batch that is typed on the CPU."""
    monkeypatch.undo()  # the check looks at what a real sample reads
    monkeypatch.chdir(tmp_path)
    assert main(["check", "thinker/prefix", "--only", "I2", "--dirty"]) == 0
