"""thinker/demo, number by number: the statistics of its first step and the losses of its first twenty.

These numbers may change only in a commit that means to change the numerics of the model, the task, the optimizer or the
schedule, and says so. To write them anew: `python tests/golden/test_golden_thinker.py`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from seedbed import config as configs
from seedbed.data.feed import Feed
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.track.run import Run

PATH = Path(__file__).with_name("thinker-demo.json")
SETTINGS = ["device=cpu", "steps=20", "every.log=1", "every.eval=0", "every.sample=0", "every.save=0", "data.test=0"]


def first_step() -> dict[str, Any]:
    """The first sample, loss and gradient norm on the first batch, and the size of every weight before and after."""
    recipe, preset = find("thinker/demo")
    config = configs.override(recipe.preset(preset), SETTINGS)
    data = recipe.open_data(config)
    engine, system = local._build(recipe, config, data)
    births = {name: p.detach().norm().item() for name, p in system.named_parameters()}
    feed = Feed(data.train, batch=config.batch, parts=1, seed=config.seed, device=engine.device)
    feed.load(0)
    batch = feed.part(0)
    engine.variant = system.variant(0, config.steps)
    engine.begin(0, 1 / config.steps)
    measured = engine.step(feed.part)
    return {
        "x": batch["x"][0].tolist(),
        "y": batch["y"][0].tolist(),
        "loss": measured["loss"].item(),
        "grad_norm": measured["grad_norm"].item(),
        "births": births,
        "after": {name: p.detach().norm().item() for name, p in system.named_parameters()},
    }


def twenty_losses(root: Path) -> list[float]:
    assert local.train("thinker/demo", SETTINGS, root=root, run_name="golden", dirty=True) == 0
    return [row["loss"] for row in Run.open(root, "golden").rows()]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(PATH.read_text())


def test_first_step(golden: dict[str, Any]) -> None:
    have, wanted = first_step(), golden["first_step"]
    assert (have["x"], have["y"]) == (wanted["x"], wanted["y"]), "the samples have changed"
    for key in ("births", "after"):
        assert have[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    assert have["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert have["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)


def test_twenty_losses(golden: dict[str, Any], tmp_path: Path) -> None:
    assert twenty_losses(tmp_path) == pytest.approx(golden["losses"], rel=2e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        numbers = {"first_step": first_step(), "losses": twenty_losses(Path(folder))}
    PATH.write_text(json.dumps(numbers, indent=1) + "\n")
