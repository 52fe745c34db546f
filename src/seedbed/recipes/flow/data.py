"""The model's inputs: images with noise at a random time, and class dropout.

Random numbers follow from (seed, sample counter), so they are the same at any batch size, world size or restart.
Shape suffixes: B items, C channels, H W pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from seedbed.config import Config
from seedbed.data.image_source import ImageData, open_data, save_for_inference, subset_images
from seedbed.data.image_source import given_images as evaluation_source  # noqa: F401 (part of a recipe)
from seedbed.data.image_source import open_for_inference as open_inference_data  # noqa: F401 (part of a recipe)
from seedbed.nn import rng

# Streams of random numbers; 301 and 302 belong to the images themselves.
_NOISE, _TIME, _STRATUM, _DROP = range(303, 307)
# Keeps the inverse of the normal distribution finite in float32.
_EDGE = 2.0**-23


@dataclass(frozen=True)
class TimeDistribution:
    """The distribution of time. With `strata`, the number of items of a whole step, every step covers [0, 1] evenly."""

    kind: Literal["uniform", "logit-normal"] = "uniform"
    mean: float = 0.0
    std: float = 1.0
    strata: int = 0


def flow_batch(
    image_BCHW: Tensor, class_B: Tensor, index_B: Tensor, seed: Tensor | int, times: TimeDistribution
) -> dict[str, Tensor]:
    """The model's inputs, with `input` on the straight line from noise (time 0) to image (time 1), and the `velocity`."""
    time_B = draw_time(index_B, seed, times)
    noise_BCHW = draw_noise(index_B, seed, image_BCHW.shape[1:])
    velocity_BCHW = image_BCHW - noise_BCHW
    input_BCHW = torch.addcmul(noise_BCHW, velocity_BCHW, time_B[:, None, None, None])
    return {"input": input_BCHW, "time": time_B, "class": class_B, "velocity": velocity_BCHW}


def draw_noise(index_B: Tensor, seed: Tensor | int, shape: Sequence[int]) -> Tensor:
    """Standard normal noise of this shape for every sample counter: a sample has the same noise in any batch and on any rank."""
    return rng.normal(rng.keys(seed, index_B, _NOISE), prod(shape)).unflatten(-1, tuple(shape))


def draw_time(index_B: Tensor, seed: Tensor | int, times: TimeDistribution) -> Tensor:
    """A time in [0, 1] for every sample counter, in float32."""
    u_B = rng.uniform(rng.keys(seed, index_B, _TIME), 1)[:, 0]
    if times.strata:
        u_B = (_stratum(index_B, seed, times.strata) + u_B) / times.strata
    if times.kind == "uniform":
        return u_B
    normal_B = math.sqrt(2.0) * torch.erfinv(2.0 * u_B.clamp(_EDGE, 1 - _EDGE) - 1.0)
    return torch.sigmoid(times.mean + times.std * normal_B)


def _stratum(index_B: Tensor, seed: Tensor | int, strata: int) -> Tensor:
    """The stratum of [0, 1] of each item of a step: a permutation of the step's items.

    A stride near the golden section spreads neighbouring items, so that no rank and no micro-batch has its own range of times;
    the offset is random at every step.
    """
    stride = next(s for s in range(round(strata * 0.618), 2 * strata + 2) if math.gcd(s, strata) == 1)
    start_B = rng.integers(rng.keys(seed, index_B // strata, _STRATUM), 1, strata)[:, 0]
    return (index_B % strata * stride + start_B) % strata


def drop_class(class_B: Tensor, index_B: Tensor, seed: Tensor | int, share: float, null: int) -> Tensor:
    """Class dropout: each class becomes `null` with probability `share`; for training only."""
    dropped_B = rng.uniform(rng.keys(seed, index_B, _DROP), 1)[:, 0] < share
    return class_B.masked_fill(dropped_B, null)


def save_inference_data(data: ImageData, folder: Path) -> None:
    """Images of a store; those that are drawn are drawn again."""
    if "store" in data.facts:
        save_for_inference(data, folder)


def check_data(config: Config, data: ImageData) -> ImageData:
    """The data of the checks; shapes are drawn again, which is fast and exact."""
    return open_data(config) if config.data.images == "shapes" else subset_images(data, config.data)
