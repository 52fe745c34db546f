"""The flow system opened up for the checks, by the code that trains it. B batch, N patches, K numbers of a patch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from seedbed.nn.patchify import depatchify, patchify
from seedbed.train.probe import Batch, Probe

if TYPE_CHECKING:
    from seedbed.recipes.flow.system import Flow


def open_up(system: Flow, batch: Batch) -> Probe:
    """What the model is, what it is fed by `loss`, and what to expect of it: images as rows of patches, time along axis 1."""
    seen = system.noised(batch)
    patch = system.config.model.patch

    def rows(x_BCHW: Tensor) -> Tensor:
        return patchify(x_BCHW, patch)

    opened = {"patches": rows(seen["input"]), "direction": rows(seen["direction"]), "time": seen["time"], "class": seen["class"]}
    return Probe(
        batch=opened,
        predict=lambda b: rows(system.run(_image(system, b["patches"]), b["time"], b["class"])),
        objective=lambda y_BNK, b: _score(system, y_BNK, b),
        inputs="patches",
        targets="direction",
        ranges={"image": (-1.0, 1.0), "class": (0, system.data.num_classes - 1), "time": (0.0, 1.0)},
        oracle=lambda b: _perfect(system, b),
        lower_bound=0.0,
        order="full",
        positions="relative" if system.config.model.positions == "1d" else "absolute",
        at_positions=lambda b, places_N: _at(system, b, places_N),
        uses=("class", "time"),
        scalars={"time": (0.0, 1.0)},
        corrupt=_corrupt,
        at_init=lambda b: _at_birth(system, b),
        baselines=lambda b: _baselines(system),
    )


def _baselines(system: Flow) -> dict[str, float]:
    """The levels to pass; none for random images, where pixel by pixel is nearly the best there is."""
    if system.data.facts["name"].startswith("random:"):
        return {}
    return {name: value for name, value in system.levels().items() if name != "all zeros"}


def _image(system: Flow, x_BNK: Tensor) -> Tensor:
    _, height, width = system.data.shape
    return depatchify(x_BNK, system.config.model.patch, height, width)


def _score(system: Flow, y_BNK: Tensor, b: Batch) -> Tensor:
    names = {"input": b["patches"], "direction": b["direction"]}
    seen = {name: _image(system, x) for name, x in names.items()}
    return system.errors(_image(system, y_BNK), {**seen, "time": b["time"]}).mean()


def _perfect(system: Flow, b: Batch) -> Tensor:
    """The direction, or the image at its end."""
    if system.config.model.predict == "v":
        return b["direction"]
    return b["patches"] + (1.0 - b["time"])[:, None, None] * b["direction"]


def _at(system: Flow, b: Batch, places_N: Tensor) -> Tensor:
    """The prediction with patch n standing where patch `places[n]` of the raster does."""
    model = system.model
    columns = model.grid[1]
    setting = model.setting(torch.stack((places_N // columns, places_N % columns), dim=1))
    return model.tokens(b["patches"], b["time"], b["class"], setting)


def _corrupt(b: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    time_B11 = b["time"][:, None, None]
    clean = b["patches"] + (1.0 - time_B11) * b["direction"]
    return clean, b["patches"] - time_B11 * b["direction"], b["time"], b["patches"]


def _at_birth(system: Flow, b: Batch) -> float:
    """The loss of zeros on these very images and times."""
    zeros = torch.zeros_like(b["patches"])
    return _score(system, zeros, b).item()
