"""The demos, number by number: what their first batch holds, the statistics of the first step and the losses of twenty.

These numbers may change only in a commit that means to change the numerics of the model, the data, its order, the noise, the
optimizer or the schedule, and says so; a refactoring, a faster kernel or a new option must leave them alone. To write them anew:
`python tests/golden/test_golden.py gpt` (or another recipe). They hold on every processor: no number here is compared by its
last bits. Python's reference is another text in other versions of Python; there a text that is made here stands in for it.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seedbed import config as configs
from seedbed.data.feed import Feed
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.track.run import Run
from seedbed.train.stepper import build
from seedbed.train.system import Batch

SETTINGS = ["device=cpu", "steps=20", "every.log=1", "every.eval=0", "every.sample=0", "every.save=0"]


def _tokens(system: Any, batch: Batch) -> dict[str, list]:
    return {"first_tokens": batch["tokens"][0, :8].tolist()}


def _task(system: Any, batch: Batch) -> dict[str, list]:
    return {name: batch[name][0].tolist() for name in ("x", "y")}


def _noisy_batch(system: Any, batch: Batch) -> dict[str, list]:
    seen = system.add_noise(batch)
    whole = {"first_classes": seen["class"][:12].tolist()}
    return {**whole, "first_times": seen["time"][:6].tolist(), "first_pixels": seen["input"][0, 0, 0, :6].tolist()}


def _window(system: Any, batch: Batch) -> dict[str, list]:
    opened = system.probe(batch).batch
    pixels = {"first_pixels": opened["m1"][:6, -3, 0, 0].tolist(), "first_target": opened["target"][0, 0, 0, :6].tolist()}
    return {**pixels, "first_controls": opened["action"][0].tolist(), "first_levels": opened["level"][:6].tolist()}


@dataclass(frozen=True)
class Demo:
    """What is kept of a recipe's demo beside its loss: what the model sees first, and measurements of its own.

    `first` and `loose` are relative tolerances of the first loss and of twenty.
    """

    seen: Callable[[Any, Batch], dict[str, list]]
    settings: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    first: float = 1e-5
    loose: float = 2e-3


DEMOS = {
    "gpt": Demo(_tokens),
    "thinker": Demo(_task, ("data.test=0",)),
    "flow": Demo(_noisy_batch, loose=5e-3),
    "ebt": Demo(
        _tokens,
        ("model.control=false", "limit.valid=2"),
        ("loss_1", "loss_2", "gap", "move_rms", "entropy", "alpha"),
    ),
    # A pixel on an edge that falls otherwise moves the first loss by 4e-5: 3 of 32 x 3,072 values by 0.25, of a loss of 0.18.
    "world": Demo(_window, ("data.frames=600", "data.examined=0"), ("copy_last",), first=2e-4, loose=5e-3),
}
# Pixels on edges that may fall otherwise in a tenth of a recording: the last bits of rays are the processor's.
EDGE_PIXELS = 8


def path_of(name: str) -> Path:
    return Path(__file__).with_name(f"{name}-demo.json")


def made_text(folder: Path) -> str:
    """A setting for a text that is the same everywhere: sentences of made-up words, the frequent ones short."""
    draw = random.Random(1).random  # the one method of which Python promises equal numbers in every version
    words = ["".join(chr(97 + int(26 * draw() ** 1.5)) for _ in range(2 + n // 60)) for n in range(400)]
    lines = [" ".join(words[int(400 * draw() ** 3)] for _ in range(4 + int(12 * draw()))) for _ in range(6000)]
    path = folder / "made.txt"
    path.write_text("".join(f"{line.capitalize()}.\n" for line in lines))
    return f"data.text={path}"


def _identity(data: Any) -> dict[str, Any]:
    """What tells data from other data: a fingerprint; of drawn pictures the mean colours of every tenth."""
    if (recording := getattr(data, "recording", None)) is None:
        return {"fingerprint": data.facts["fingerprint"]}
    tenths = np.array_split(recording.frames_THWC, 10)
    return {"colours": [part.mean((0, 1, 2)).tolist() for part in tenths]}


def _assert_same_data(have: dict[str, Any], wanted: dict[str, Any]) -> None:
    if "colours" not in wanted:
        assert have["fingerprint"] == wanted["fingerprint"], "the data has changed"
        return
    pixels_in_a_tenth = 60 * 32 * 32
    limit = 255 * EDGE_PIXELS / pixels_in_a_tenth
    np.testing.assert_allclose(have["colours"], wanted["colours"], rtol=0, atol=limit, err_msg="the pictures have changed")


def first_step(name: str, *settings: str) -> dict[str, Any]:
    """The first batch, the measurements on it, and the size of every weight at birth and after."""
    demo = DEMOS[name]
    recipe, preset = find(f"{name}/demo")
    config = configs.override(recipe.preset(preset), [*SETTINGS, *demo.settings, *settings])
    data = recipe.open_data(config)
    engine = build(recipe, config, data)
    system = engine.system
    births = {name: p.detach().norm().item() for name, p in system.named_parameters()}
    feed = Feed(data.train, batch=config.batch, parts=1, seed=config.seed, device=engine.device)
    feed.load(0)
    seen = demo.seen(system, feed.part(0))
    engine.variant = system.variant(0, config.steps)
    engine.begin(0, 1 / config.steps)
    measured = engine.step(feed.part)
    return {
        **_identity(data),
        "seen": seen,
        "measured": {key: measured[key].item() for key in ("loss", "grad_norm", *demo.measures)},
        "births": births,
        "after": {name: p.detach().norm().item() for name, p in system.named_parameters()},
    }


def twenty_losses(name: str, root: Path, *settings: str) -> list[float]:
    chosen = [*SETTINGS, *DEMOS[name].settings, *settings]
    assert local.train(f"{name}/demo", chosen, root=root, run_name="golden", dirty=True) == 0
    return [row["loss"] for row in Run.open(root, "golden").rows()]


@dataclass(frozen=True)
class Golden:
    """A demo, the text that stands in for another if one does, and the numbers that are expected."""

    name: str
    settings: tuple[str, ...]
    first_step: dict[str, Any]
    losses: list[float]


@pytest.fixture(params=DEMOS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    name = request.param
    wanted = json.loads(path_of(name).read_text())
    if "made_text" not in wanted or _reference_of(name) == wanted["first_step"]["fingerprint"]:
        return Golden(name, (), wanted["first_step"], wanted["losses"])
    return Golden(name, (made_text(tmp_path_factory.mktemp("text")),), **wanted["made_text"])


def _reference_of(name: str) -> str:
    recipe, preset = find(f"{name}/demo")
    return recipe.open_data(configs.override(recipe.preset(preset), DEMOS[name].settings)).facts["fingerprint"]


def test_first_step(golden: Golden) -> None:
    have, wanted = first_step(golden.name, *golden.settings), golden.first_step
    _assert_same_data(have, wanted)
    assert have["seen"].keys() == wanted["seen"].keys()
    for key, values in have["seen"].items():
        assert values == pytest.approx(wanted["seen"][key], rel=1e-4, abs=1e-5), f"{key}: data, order or noise has changed"
    for key in ("births", "after"):
        assert have[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    assert have["measured"] == pytest.approx(wanted["measured"], rel=1e-3)
    assert have["measured"]["loss"] == pytest.approx(wanted["measured"]["loss"], rel=DEMOS[golden.name].first)


def test_twenty_losses(golden: Golden, tmp_path: Path) -> None:
    losses = twenty_losses(golden.name, tmp_path, *golden.settings)
    assert losses == pytest.approx(golden.losses, rel=DEMOS[golden.name].loose)


def _measure(name: str, folder: Path, *settings: str) -> dict[str, Any]:
    return {"first_step": first_step(name, *settings), "losses": twenty_losses(name, folder, *settings)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or DEMOS:
        with tempfile.TemporaryDirectory() as folder:
            found = _measure(chosen, Path(folder, "runs"))
            if DEMOS[chosen].seen is _tokens:
                found["made_text"] = _measure(chosen, Path(folder, "made"), made_text(Path(folder)))
        path_of(chosen).write_text(json.dumps(found, indent=1) + "\n")
