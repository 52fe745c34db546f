"""What world/demo promises, on a quarter of its steps: better than holding or fading the picture, and turning the right way."""

from pathlib import Path

import pytest
import torch
from helpers import start

from seedbed import inference
from seedbed.launch import local
from seedbed.recipes.world import controls
from seedbed.recipes.world.data import WindowSource
from seedbed.recipes.world.emulator import Emulator
from seedbed.recipes.world.examine import trajectory_batch
from seedbed.track.run import Run


@pytest.mark.slow
def test_demo_beats_trivial_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    quick = ["steps=300", "every.eval=75", "every.save=0", "data.examined=0"]
    assert start(tmp_path, "demo", *quick, recipe="world/demo") == 0
    last = [event for event in Run.open(tmp_path, "demo").events() if event["kind"] == "eval"][-1]
    for horizon in (1, 4, 16):
        free, copy, fade = (last[f"{name}_{horizon}"] for name in ("free", "copy", "fade"))
        assert free > max(copy, fade), f"{horizon} frames: {free:.2f} dB, persistence {copy:.2f}, fade {fade:.2f}"
    trained = inference.load(tmp_path, "demo", all_data=True)
    system, source = trained.system, trained.data.valid
    assert isinstance(system, Emulator) and isinstance(source, WindowSource)
    with trained.engine.evaluating(), torch.no_grad():
        found = controls.responses(system, trajectory_batch(system, source, 64, 1))
    assert found["yaw"]["accuracy_1"] >= 0.95 and found["yaw"]["num_1"] >= 60, found["yaw"]
