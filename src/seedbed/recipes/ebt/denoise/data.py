"""Images to be denoised: the training and test parts, and the noise on them, all from counters.

Shape suffixes: B items, N images, C channels, H W pixels.
"""

import functools
import math

import numpy as np
from torch import Tensor

from seedbed.config import Config
from seedbed.data import image_source, shapes
from seedbed.data.image_source import ImageData, ImageSource
from seedbed.nn import rng

# What each stream of random numbers is for; the images' own have 301 and 302.
_NOISE, _EVALUATION = 311, 312
# Held-out images of an evaluation, and how many of them are kept for samples.
NUM_EVALUATED, NUM_SHOWN = 1024, 64
CHAIN, FIRST_BETA, LAST_BETA = 1000, 1e-4, 0.02


def open_images(config: Config) -> ImageData:
    """The images of `config.data`; of shapes, some pairs of shape and colour are in the test part only."""
    data = image_source.open_data(config)
    if config.data.images != "shapes":
        return data
    held = held_out()
    train, valid = (_only(source, config, held, False) for source in (data.train, data.valid))
    parts = [_only(source, config, held, True) for source in (data.train, data.valid)]
    both = [np.concatenate([part.arrays[name] for part in parts]) for name in ("image", "class")]
    facts = {**data.facts, "num_images": train.num_items, "num_valid_images": valid.num_items, "num_test_images": len(both[0])}
    facts["never trained on"] = ", ".join(data.class_names[c] for c in held)
    test = ImageSource(both[0], both[1], config.data, config.seed, train=False)
    return ImageData(train, valid, facts, data.class_names, data.shape, test=test)


def held_out() -> list[int]:
    """One colour of every shape, so that every shape and every colour but two is known from other pairs."""
    return [s * len(shapes.COLOURS) + s for s in range(len(shapes.SHAPES))]


def _only(source: ImageSource, config: Config, classes: list[int], wanted: bool) -> ImageSource:
    class_N = np.asarray(source.arrays["class"])
    rows_N = np.flatnonzero(np.isin(class_N, classes) == wanted)
    return ImageSource(source.arrays["image"][rows_N], class_N[rows_N], config.data, config.seed, source.train)


@functools.cache
def noise_scales(noise: str, level: float) -> tuple[float, float]:
    """The factors of the image and of the normal noise, for images in [-1, 1]."""
    if noise == "sigma":
        return 1.0, 2.0 * level
    betas = (FIRST_BETA + (LAST_BETA - FIRST_BETA) * n / (CHAIN - 1) for n in range(round(CHAIN * level)))
    kept = math.prod(1.0 - beta for beta in betas)
    return math.sqrt(kept), math.sqrt(1.0 - kept)


def add_noise(image_BCHW: Tensor, index_B: Tensor, seed: int, noise: str, level: float, evaluation: bool = False) -> Tensor:
    """The image with the noise of its sample counter; evaluation has its own noise, the same at every level."""
    keys = rng.keys(seed, index_B, _EVALUATION if evaluation else _NOISE)
    normal_BCHW = rng.normal(keys, image_BCHW[0].numel()).view_as(image_BCHW)
    signal, spread = noise_scales(noise, level)
    return signal * image_BCHW + spread * normal_BCHW
