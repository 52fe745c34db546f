"""ebt/demo, number by number: the statistics of its first step and the losses of its first twenty.

These numbers may change only in a commit that means to change the numerics of the model, the data order, the optimizer or
the schedule, and says so; a refactoring, a faster kernel or a new option must leave them alone. To write them anew:
`python tests/golden/test_golden_ebt.py`. They belong to one corpus (Python's reference differs between versions of Python),
whose fingerprint is kept with them; on another corpus the test is skipped.
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

PATH = Path(__file__).with_name("ebt-demo.json")
SETTINGS = ["device=cpu", "steps=20", "every.log=1", "every.eval=0", "every.sample=0", "every.save=0"]
SETTINGS += ["model.control=false", "limit.valid=2"]


def first_step() -> dict[str, Any]:
    """Loss, gradient norm and the size of every weight at birth, on the first batch."""
    recipe, preset = find("ebt/demo")
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
        "fingerprint": data.facts["fingerprint"],
        "first_tokens": batch["tokens"][0, :8].tolist(),
        "loss": measured["loss"].item(),
        "walk": {name: measured[name].item() for name in ("loss_1", "loss_2", "gap", "move_rms", "entropy", "alpha")},
        "grad_norm": measured["grad_norm"].item(),
        "births": births,
        "after": {name: p.detach().norm().item() for name, p in system.named_parameters()},
    }


def twenty_losses(root: Path) -> list[float]:
    assert local.train("ebt/demo", SETTINGS, root=root, run_name="golden", dirty=True) == 0
    return [row["loss"] for row in Run.open(root, "golden").rows()]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    wanted = json.loads(PATH.read_text())
    recipe, preset = find("ebt/demo")
    have = recipe.open_data(recipe.preset(preset)).facts["fingerprint"]
    if have != wanted["first_step"]["fingerprint"]:
        pytest.skip(f"Python's reference is another text here ({have}) than where the numbers were made")
    return wanted


def test_first_step(golden: dict[str, Any]) -> None:
    have, wanted = first_step(), golden["first_step"]
    assert have["first_tokens"] == wanted["first_tokens"], "the data order has changed"
    for key in ("births", "after"):
        assert have[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    assert have["walk"] == pytest.approx(wanted["walk"], rel=1e-3)
    assert have["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert have["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)


def test_twenty_losses(golden: dict[str, Any], tmp_path: Path) -> None:
    assert twenty_losses(tmp_path) == pytest.approx(golden["losses"], rel=2e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        numbers = {"first_step": first_step(), "losses": twenty_losses(Path(folder))}
    PATH.write_text(json.dumps(numbers, indent=1) + "\n")
