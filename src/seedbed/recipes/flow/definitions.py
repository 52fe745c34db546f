"""Parts of flow written a second time, as plainly as their formulas. B items, T times, C channels, H W pixels, D width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from seedbed.nn.patchify import raster, sincos_table
from seedbed.recipes.flow import data, objective, system
from seedbed.recipes.flow.model import axial_table, time_features
from seedbed.recipes.flow.sampling import time_grid
from seedbed.train.engine import EvalEngine

if TYPE_CHECKING:
    from seedbed.recipes.flow.system import Flow

NUM = 64


def of(system: Flow) -> dict[str, Callable[[], Iterator[tuple]]]:
    parts = {"objective": loss, "model": model, "evaluation": metrics, "inference": samples}
    return {place: lambda part=part: part(system) for place, part in parts.items()}


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
    many_B = torch.arange(4096 // size * size)
    time_B, noise_B2 = data.draw_time(many_B, 7, system.times), data.draw_noise(many_B, 7, (2,))
    share_B = time_B.double()
    if system.times.kind == "logit-normal":
        share_B = (torch.logit(share_B) - system.times.mean).div(system.times.std).mul(0.5**0.5).erf().add(1.0).div(2.0)
    within_B, size_B = share_B * system.times.strata % 1.0 if system.times.strata else share_B, noise_B2.square().sum(1).double()
    found = [size_B.mean() / 2, 1.0 + torch.corrcoef(torch.stack((within_B, size_B)))[0, 1]]
    yield "mean square of the noise, and what it shares with the time", (data.draw_noise, data.draw_time), found, [1.0, 1.0], 0.1
    moments = [2 * share_B.mean(), 3 * share_B.square().mean()]
    yield "moments of the times' quantiles", data.draw_time, moments, [1.0, 1.0], 0.1
    one, other = (share_B[: 2 * size] * size).long().clamp(0, size - 1).split(size)
    gap_T = torch.linspace(0.0, 1.0, NUM)
    wanted = torch.stack(((gap_T / gap_T.clamp_min(objective.MIN_GAP)).square(), gap_T.clamp_min(objective.MIN_GAP) ** -2))
    yield "weights of errors in the loss", objective.weights, torch.stack(objective.weights(1.0 - gap_T, "x")), wanted
    gauss = 0.5 * torch.randn(4096, 1, 4, 4, generator=torch.Generator().manual_seed(5))
    seen = data.flow_batch(gauss, many := torch.arange(4096), many, 7, replace(system.times, strata=4096))
    t = seen["time"][:, None, None, None]
    best = seen["input"] * (0.25 * t - (1.0 - t)) / ((1.0 - t).square() + 0.25 * t.square())  # the mean velocity, given the input
    field = best if predict == "v" else seen["input"] + best * (1.0 - t)
    found = objective.errors(field, seen["input"], seen["time"], seen["velocity"], predict).mean()
    known = objective.gaussian_baseline(torch.full((1,), 0.25), objective.quantiles(system.times), predict)
    yield "loss of the best predictor of normal values", (objective.gaussian_baseline, objective.weights), known, found, 0.05
    if system.times.strata:
        yield "strata in which a step has a time", data.draw_time, len(one.unique()), size, 0.05
        yield "steps whose times have one order", data.draw_time, torch.equal(one, other), False


@torch.no_grad()
def model(system: Flow) -> Iterator[tuple]:
    """Patches count along rows, then columns; each axis has its own features, and so has the time."""
    at, turned = torch.tensor([[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]), torch.tensor([1, 0])
    yield "rows and columns of patches", raster, raster(2, 3, torch.device("cpu")), at
    falls = 100.0 ** (-torch.arange(4) / 4)
    wanted = torch.cat((at[:, :1] * falls, at[:, 1:] * falls), 1).sin()
    yield "sines of the angles of rows and columns", axial_table, axial_table(at, 16, 100.0)[1][:, 0], wanted
    one, other = sincos_table(at, 16).chunk(2, dim=1), sincos_table(at[:, turned], 16).chunk(2, dim=1)
    yield "features of rows and columns, exchanged", sincos_table, torch.cat(one, 1), torch.cat(other[::-1], 1)
    time_B = torch.tensor([0.1, 0.6, 0.9])
    angle_BF = 30.0 * time_B[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    yield "features of the time", time_features, time_features(time_B, 8, 30.0), torch.cat((angle_BF.cos(), angle_BF.sin()), 1)


def metrics(of: Flow) -> Iterator[tuple]:
    """Errors that equal the number of their time, 0 to 7: each mean is reported by its own name. Items are those held out."""
    engine, noises, images = EvalEngine(of, of.config, torch.device("cpu")), [], []
    source: Any = of.data.valid.first(20)

    def errors(field: Tensor, seen: dict[str, Tensor]) -> Tensor:
        t = seen["time"][:, None, None, None]
        noises.append((seen["input"] - t * seen["velocity"]).flatten(1))
        images.append((seen["input"] + (1.0 - t) * seen["velocity"]).flatten(1)[:: system.NUM_TIMES])
        return seen["time"] * system.NUM_TIMES - 0.5

    small = patch.dict(system.EVAL_BATCH, cpu=2 * system.NUM_TIMES)
    with small, patch.object(of, "errors", errors):
        found = of.evaluate(source, engine)
    noise, code = torch.cat(noises), system.Flow.evaluate
    yield "noises of evaluation that differ", code, len(noise[:, 0].unique()), len(noise), 0.1
    yield "mean square of the noise of evaluation", code, noise.square().mean(), 1.0, 0.1
    yield "images of evaluation", code, torch.cat(images), source.pick(source.spread(source.num_items))[0].flatten(1)
    yield "early, late and mean loss", code, list(found.values()), [1.5, 5.5, 3.5]


def samples(system: Flow) -> Iterator[tuple]:
    """The grid of times."""
    for shift in (1.0, 3.0):
        even = torch.linspace(0.0, 1.0, 9)
        yield f"times with shift {shift:g}", time_grid, time_grid(8, shift), even / (even + shift * (1.0 - even))
