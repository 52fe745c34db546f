"""flow/demo, number by number: the statistics of its first step and the losses of its first twenty.

As for gpt/demo, these numbers may change only in a commit that means to change the numerics of the model, the data, its
order, the noise, the optimizer or the schedule, and says so. To write them anew: `python tests/golden/test_golden_flow.py`.
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
from seedbed.recipes.flow.system import Flow
from seedbed.track.run import Run

PATH = Path(__file__).with_name("flow-demo.json")
SETTINGS = ["device=cpu", "steps=20", "every.log=1", "every.eval=0", "every.sample=0", "every.save=0"]


def first_step() -> dict[str, Any]:
    """The first batch as it is noised, loss, gradient norm and the size of every weight at birth and after."""
    recipe, preset = find("flow/demo")
    config = configs.override(recipe.preset(preset), SETTINGS)
    data = recipe.open_data(config)
    engine, system = local._build(recipe, config, data)
    assert isinstance(system, Flow)
    births = {name: p.detach().norm().item() for name, p in system.named_parameters()}
    feed = Feed(data.train, batch=config.batch, parts=1, seed=config.seed, device=engine.device)
    feed.load(0)
    seen = system.noised(feed.part(0))
    engine.begin(0, config.batch / (config.steps * config.batch))
    measured = engine.step(feed.part)
    return {
        "fingerprint": data.facts["fingerprint"],
        "first_classes": seen["class"][:12].tolist(),
        "first_times": seen["time"][:6].tolist(),
        "first_pixels": seen["input"][0, 0, 0, :6].tolist(),
        "loss": measured["loss"].item(),
        "grad_norm": measured["grad_norm"].item(),
        "births": births,
        "after": {name: p.detach().norm().item() for name, p in system.named_parameters()},
    }


def twenty_losses(root: Path) -> list[float]:
    assert local.train("flow/demo", SETTINGS, root=root, run_name="golden", dirty=True) == 0
    return [row["loss"] for row in Run.open(root, "golden").rows()]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(PATH.read_text())


def test_first_step(golden: dict[str, Any]) -> None:
    have, wanted = first_step(), golden["first_step"]
    assert have["fingerprint"] == wanted["fingerprint"], "the images have changed"
    assert have["first_classes"] == wanted["first_classes"], "the data order or the hidden classes have changed"
    for key in ("first_times", "first_pixels"):
        assert have[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    for key in ("births", "after"):
        assert have[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    assert have["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert have["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)


def test_twenty_losses(golden: dict[str, Any], tmp_path: Path) -> None:
    assert twenty_losses(tmp_path) == pytest.approx(golden["losses"], rel=5e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        numbers = {"first_step": first_step(), "losses": twenty_losses(Path(folder))}
    PATH.write_text(json.dumps(numbers, indent=1) + "\n")
