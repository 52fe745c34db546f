"""Parts of flow written a second time for the checks, as plainly as their formulas. B items, T times, C channels, H W pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from torch import Tensor

from seedbed.nn.patchify import raster, sincos_table
from seedbed.recipes.flow import data, objective
from seedbed.recipes.flow.model import axial_table
from seedbed.recipes.flow.sampling import time_grid

if TYPE_CHECKING:
    from seedbed.recipes.flow.system import Flow

NUM = 64


def loss(system: Flow) -> Iterator[tuple]:
    """Errors at all times, inputs on the line from noise to image, and times that cover every step."""
    predict, time_B = system.config.model.predict, torch.linspace(0.0, 1.0, NUM)
    field, x, velocity = (torch.randn(NUM, 3, 4, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))
    t = time_B[:, None, None, None]
    gap, floor = 1.0 - t, (1.0 - t).clamp_min(objective.MIN_GAP)
    wanted = field - velocity if predict == "v" else (field - x - gap * velocity) / floor  # x + gap * velocity is the image
    found = objective.errors(field, x, time_B, velocity, predict)
    yield "squared error at each time", objective.errors, found, wanted.square().mean((1, 2, 3))
    size = system.times.strata or NUM
    index_B, image = torch.arange(size * 3), torch.randn(size * 3, 1, 2, 2, generator=torch.Generator().manual_seed(4))
    seen = data.flow_batch(image, index_B, index_B, 7, system.times)
    t, noise = seen["time"][:, None, None, None], image - seen["velocity"]
    yield "input between noise and image", data.flow_batch, seen["input"], (1.0 - t) * noise + t * image
    yield "mean square of the noise", data.draw_noise, noise.square().mean(), 1.0, 8.0 / size**0.5
    share_B = seen["time"].double()
    if system.times.kind == "logit-normal":
        share_B = (torch.logit(share_B) - system.times.mean).div(system.times.std).mul(0.5**0.5).erf().add(1.0).div(2.0)
    yield "mean quantile of the times", data.draw_time, share_B.mean(), 0.5, 3.0 / size**0.5
    place_B = (share_B * size).long().clamp(0, size - 1)
    for one in place_B.split(size) if system.times.strata else ():
        yield "strata in which a step has a time", data.draw_time, len(one.unique()), size, 0.05
    if system.times.strata:
        yield "steps whose times have one order", data.draw_time, torch.equal(place_B[:size], place_B[size : 2 * size]), False


def model(system: Flow) -> Iterator[tuple]:
    """Patches count along rows, then columns; each axis has its own features."""
    at = [[row, column] for row in range(2) for column in range(3)]
    yield "rows and columns of patches", raster, raster(2, 3, torch.device("cpu")), at
    for code, table in {
        axial_table: lambda at: axial_table(at, 16, 100.0)[1][:, 0],
        sincos_table: lambda at: sincos_table(at, 16),
    }.items():
        one, other = (table(torch.tensor(places)).chunk(2, dim=1) for places in (at, [place[::-1] for place in at]))
        yield "features of rows and columns, exchanged", code, torch.cat(one, 1), torch.cat(other[::-1], 1)


def metrics(system: Flow) -> Iterator[tuple]:
    """Errors that equal the number of their time: each mean is reported by its own name."""
    from seedbed.recipes.flow.system import NUM_TIMES, Flow
    from seedbed.train.engine import EvalEngine

    engine, noises = EvalEngine(system, system.config, torch.device("cpu")), []

    def errors(field: Tensor, seen: dict[str, Tensor]) -> Tensor:
        noises.append((seen["input"] - seen["time"][:, None, None, None] * seen["velocity"]).flatten(1)[:, 0])
        return (seen["time"] * NUM_TIMES).floor()

    with patch.object(system, "errors", errors):
        found = system.evaluate(system.data.valid, engine)
    noise_B = torch.cat(noises)
    yield "noises of evaluation that differ", Flow.evaluate, len((noise_B * 1e4).round().unique()), len(noise_B), 0.1
    low, high = (NUM_TIMES / 2 - 1) / 2, (NUM_TIMES / 2 - 1) / 2 + NUM_TIMES / 2
    yield "early, late and mean loss", Flow.evaluate, list(found.values()), [low, high, (low + high) / 2]


def samples(system: Flow) -> Iterator[tuple]:
    """The grid of times."""
    for shift in (1.0, 3.0):
        even = torch.linspace(0.0, 1.0, 9)
        yield f"times with shift {shift:g}", time_grid, time_grid(8, shift), even / (even + shift * (1.0 - even))
