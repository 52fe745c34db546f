"""The demos, number by number: what their first batch holds, the statistics of the first step and the losses of twenty.

These numbers may change only in a commit that means to change the numerics of the model, the data, its order, the noise, the
optimizer or the schedule, and says so; a refactoring, a faster kernel or a new option must leave them alone. To write them anew:
`python tests/golden/test_golden.py gpt` (or another recipe). Some belong to one corpus (Python's reference differs between
versions of Python), whose fingerprint is kept with them; on another corpus the test is skipped.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from seedbed import config as configs
from seedbed.data.feed import Feed
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.track.run import Run
from seedbed.train.system import Batch

SETTINGS = ["device=cpu", "steps=20", "every.log=1", "every.eval=0", "every.sample=0", "every.save=0"]


def _tokens(system: Any, batch: Batch) -> dict[str, list]:
    return {"first_tokens": batch["tokens"][0, :8].tolist()}


def _task(system: Any, batch: Batch) -> dict[str, list]:
    return {name: batch[name][0].tolist() for name in ("x", "y")}


def _noised(system: Any, batch: Batch) -> dict[str, list]:
    seen = system.noised(batch)
    whole = {"first_classes": seen["class"][:12].tolist()}
    return {**whole, "first_times": seen["time"][:6].tolist(), "first_pixels": seen["input"][0, 0, 0, :6].tolist()}


def _window(system: Any, batch: Batch) -> dict[str, list]:
    opened = system.probe(batch).batch
    pixels = {"first_pixels": opened["m1"][0, -3, 0, :6].tolist(), "first_target": opened["target"][0, 0, 0, :6].tolist()}
    return {**pixels, "first_controls": opened["action"][0].tolist(), "first_levels": opened["level"][:6].tolist()}


@dataclass(frozen=True)
class Demo:
    """What is kept of a recipe's demo beside its loss: what the model sees first, and measurements of its own."""

    seen: Callable[[Any, Batch], dict[str, list]]
    settings: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    loose: float = 2e-3


DEMOS = {
    "gpt": Demo(_tokens),
    "thinker": Demo(_task, ("data.test=0",)),
    "flow": Demo(_noised, loose=5e-3),
    "ebt": Demo(
        _tokens,
        ("model.control=false", "limit.valid=2"),
        ("loss_1", "loss_2", "gap", "move_rms", "entropy", "alpha"),
    ),
    "world": Demo(_window, ("data.frames=600", "data.examined=0"), ("copy_last",), loose=5e-3),
}


def path_of(name: str) -> Path:
    return Path(__file__).with_name(f"{name}-demo.json")


def first_step(name: str) -> dict[str, Any]:
    """The first batch, the measurements on it, and the size of every weight at birth and after."""
    demo = DEMOS[name]
    recipe, preset = find(f"{name}/demo")
    config = configs.override(recipe.preset(preset), [*SETTINGS, *demo.settings])
    data = recipe.open_data(config)
    engine, system = local._build(recipe, config, data)
    births = {name: p.detach().norm().item() for name, p in system.named_parameters()}
    feed = Feed(data.train, batch=config.batch, parts=1, seed=config.seed, device=engine.device)
    feed.load(0)
    seen = demo.seen(system, feed.part(0))
    engine.variant = system.variant(0, config.steps)
    engine.begin(0, 1 / config.steps)
    measured = engine.step(feed.part)
    return {
        "fingerprint": data.facts["fingerprint"],
        "seen": seen,
        "measured": {key: measured[key].item() for key in ("loss", "grad_norm", *demo.measures)},
        "births": births,
        "after": {name: p.detach().norm().item() for name, p in system.named_parameters()},
    }


def twenty_losses(name: str, root: Path) -> list[float]:
    settings = [*SETTINGS, *DEMOS[name].settings]
    assert local.train(f"{name}/demo", settings, root=root, run_name="golden", dirty=True) == 0
    return [row["loss"] for row in Run.open(root, "golden").rows()]


@pytest.fixture(params=DEMOS)
def golden(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    name = request.param
    wanted = json.loads(path_of(name).read_text())
    recipe, preset = find(f"{name}/demo")
    config = configs.override(recipe.preset(preset), DEMOS[name].settings)
    have = recipe.open_data(config).facts["fingerprint"]
    if getattr(config.data, "recording", "") == "box" and have != wanted["first_step"]["fingerprint"]:
        pytest.skip(f"pixels on edges of the box world fell otherwise here ({have}): the last bits of rays are the processor's")
    if getattr(config.data, "text", "") == "reference" and have != wanted["first_step"]["fingerprint"]:
        pytest.skip(f"Python's reference is another text here ({have}) than where the numbers were made")
    return name, wanted


def test_first_step(golden: tuple[str, dict[str, Any]]) -> None:
    name, numbers = golden
    have, wanted = first_step(name), numbers["first_step"]
    assert have["fingerprint"] == wanted["fingerprint"], "the data has changed"
    assert have["seen"].keys() == wanted["seen"].keys()
    for key, values in have["seen"].items():
        assert values == pytest.approx(wanted["seen"][key], rel=1e-4, abs=1e-5), f"{key}: data, order or noise has changed"
    for key in ("births", "after"):
        assert have[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    assert have["measured"] == pytest.approx(wanted["measured"], rel=1e-3)
    assert have["measured"]["loss"] == pytest.approx(wanted["measured"]["loss"], rel=1e-5)


def test_twenty_losses(golden: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    name, wanted = golden
    assert twenty_losses(name, tmp_path) == pytest.approx(wanted["losses"], rel=DEMOS[name].loose)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or DEMOS:
        with tempfile.TemporaryDirectory() as folder:
            found = {"first_step": first_step(chosen), "losses": twenty_losses(chosen, Path(folder))}
        path_of(chosen).write_text(json.dumps(found, indent=1) + "\n")
