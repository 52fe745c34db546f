"""Sampling from noise to images: time grid, ODE solver, classifier-free guidance. B batch, N images, C channels, H W pixels."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seedbed.errors import UserError
from seedbed.nn import eagerly
from seedbed.recipes.flow.data import draw_noise
from seedbed.recipes.flow.model import FlowTransformer
from seedbed.recipes.flow.objective import velocity

SAMPLERS = ("euler", "heun", "midpoint")
# Counters of samples start above those of any training run, so that no noise is repeated.
FIRST_SAMPLE = 1 << 40
MAX_BATCH = {"cuda": 512, "mps": 128, "cpu": 128}

Field = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Guidance 1 is the model as trained; it acts at times within `interval`. `shift` above 1 puts more
    steps near the noise."""

    sampler: str = "heun"
    steps: int = 24
    guidance: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    shift: float = 1.0

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise UserError(f"there is no sampler {self.sampler!r}; there are: {', '.join(SAMPLERS)}")
        if self.steps < 1:
            raise UserError(f"steps={self.steps} is out of range: it must be at least 1")
        if not 0.0 <= self.guidance < math.inf:
            raise UserError(f"guidance={self.guidance} is out of range: 1 is the model as trained, 2 pulls towards the class")
        low, high = self.interval
        if not 0.0 <= low < high <= 1.0:
            raise UserError(f"interval={low},{high} is out of range: guidance acts between two times from 0 (noise) to 1 (image)")
        if not 0.0 < self.shift < math.inf:
            raise UserError(f"shift={self.shift} is out of range: it must be above 0; 1 is an even grid")

    def __str__(self) -> str:
        where = "" if self.interval == (0.0, 1.0) else f" at times {self.interval[0]:g} to {self.interval[1]:g}"
        shifted = "" if self.shift == 1.0 else f", shift {self.shift:g}"
        return f"{self.sampler}, {self.steps} steps, guidance {self.guidance:g}{where}{shifted}"


def time_grid(steps: int, shift: float = 1.0) -> list[float]:
    """steps + 1 times from 0 to 1, even unless shifted."""
    even = [i / steps for i in range(steps + 1)]
    return [t / (t + shift * (1.0 - t)) for t in even]


def integrate(field: Field, x: Tensor, times: Sequence[float], sampler: str) -> Tensor:
    """Follow dx/dt = field(x, t) along the grid. Heun's last step is Euler's: at time 1 a field may have no value."""
    for i, (t, following) in enumerate(itertools.pairwise(times)):
        dt, slope = following - t, field(x, t)
        if sampler == "midpoint":
            slope = field(x + 0.5 * dt * slope, t + 0.5 * dt)
        elif sampler == "heun" and i < len(times) - 2:
            slope = 0.5 * (slope + field(x + dt * slope, following))
        x = x + dt * slope
    return x


def guided(model: FlowTransformer, class_B: Tensor, sampling: Sampling) -> Field:
    """The velocity at (x, t) with classifier-free guidance; conditional and unconditional in one doubled batch."""
    tables, predict = model.position_tables(), model.config.predict
    if sampling.guidance != 1.0 and not model.config.drop:
        raise UserError("this model was trained without class dropout (model.drop=0), so it cannot be guided; use --guidance 1")
    classes_2B = torch.cat((class_B, torch.full_like(class_B, model.null_class))) if model.config.drop else class_B

    def velocity_at(x_BCHW: Tensor, t: float, classes: Tensor) -> Tensor:
        time = torch.full((len(x_BCHW),), t, device=x_BCHW.device)
        return velocity(model(x_BCHW, time, classes, tables), x_BCHW, time, predict)

    def field(x_BCHW: Tensor, t: float) -> Tensor:
        if sampling.guidance == 1.0 or not sampling.interval[0] <= t <= sampling.interval[1]:
            return velocity_at(x_BCHW, t, class_B)
        conditional, unconditional = velocity_at(torch.cat((x_BCHW, x_BCHW)), t, classes_2B).chunk(2)
        return unconditional + sampling.guidance * (conditional - unconditional)

    return field


@torch.no_grad()
def generate(model: FlowTransformer, class_N: Tensor, sampling: Sampling, seed: int, batch: int = 0) -> Tensor:
    """Images (N, C, H, W) of these classes, on the model's device. Image n is the same in any batch, up to rounding."""
    assert not model.training, "sampling needs evaluation mode"
    device = model.enter.weight.device
    class_N = class_N.to(device)
    index_N = torch.arange(len(class_N), device=device) + FIRST_SAMPLE
    parts, times = [], time_grid(sampling.steps, sampling.shift)
    size = batch or MAX_BATCH[device.type]
    with eagerly():  # a shape that is used a few times is not worth compiling
        for class_B, index_B in zip(class_N.split(size), index_N.split(size), strict=True):
            noise_BCHW = draw_noise(index_B, seed, model.shape)
            parts.append(integrate(guided(model, class_B, sampling), noise_BCHW, times, sampling.sampler))
    return torch.cat(parts)
