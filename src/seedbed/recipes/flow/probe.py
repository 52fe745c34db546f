"""Probe of the flow system for the checks, made of the code that trains it. B batch, N patches, K values of a patch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from seedbed.nn.patchify import depatchify, patchify
from seedbed.train.probe import Batch, Probe

if TYPE_CHECKING:
    from seedbed.recipes.flow.system import Flow


def build_probe(system: Flow, batch: Batch) -> Probe:
    """The model, the inputs that `loss` gives it, and what to expect of it: images as rows of patches, time along axis 1."""
    seen, patch = system.add_noise(batch), system.config.model.patch
    is_random = system.data.facts["name"].startswith("random:")

    def rows(x_BCHW: Tensor) -> Tensor:
        return patchify(x_BCHW, patch)

    opened = {"patches": rows(seen["input"]), "velocity": rows(seen["velocity"]), "time": seen["time"], "class": seen["class"]}
    return Probe(
        batch=opened,
        predict=lambda b: rows(system.run(_image(system, b["patches"]), b["time"], b["class"])),
        objective=lambda y_BNK, b: _score(system, y_BNK, b),
        inputs="patches",
        targets="velocity",
        ranges={"image": (-1.0, 1.0), "class": (0, system.data.num_classes - 1), "time": (0.0, 1.0)},
        oracle=lambda b: b["velocity"] if system.config.model.predict == "v" else _clean(b),
        lower_bound=0.0,
        order="full",
        # Condition tokens are not rotated, so positions of patches are absolute relative to them.
        positions="relative" if system.config.model.positions == "1d" and not system.model.num_context else "absolute",
        at_positions=lambda b, positions_N: _at(system, b, positions_N),
        uses=("class", "time"),
        scalars={"time": (0.0, 1.0)},
        corrupt=lambda b: (_clean(b), b["patches"] - b["time"][:, None, None] * b["velocity"], b["time"], b["patches"]),
        at_init=lambda b: _score(system, torch.zeros_like(b["patches"]), b).item(),
        # Random images have none: there the per-pixel baseline is nearly optimal.
        baselines=lambda b: {} if is_random else {k: v for k, v in system.baseline_losses().items() if k != "all zeros"},
    )


def _image(system: Flow, x_BNK: Tensor) -> Tensor:
    _, height, width = system.data.shape
    return depatchify(x_BNK, system.config.model.patch, height, width)


def _score(system: Flow, y_BNK: Tensor, b: Batch) -> Tensor:
    names = {"input": b["patches"], "velocity": b["velocity"]}
    seen = {name: _image(system, x) for name, x in names.items()}
    return system.errors(_image(system, y_BNK), {**seen, "time": b["time"]}).mean()


def _clean(b: Batch) -> Tensor:
    return b["patches"] + (1.0 - b["time"])[:, None, None] * b["velocity"]


def _at(system: Flow, b: Batch, positions_N: Tensor) -> Tensor:
    """The prediction with patch n at position `positions_N[n]` of the raster."""
    model = system.model
    columns = model.grid[1]
    tables = model.position_tables(torch.stack((positions_N // columns, positions_N % columns), dim=1))
    return model.tokens(b["patches"], b["time"], b["class"], tables)
