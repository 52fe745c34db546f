"""Procedural images of coloured shapes. All possible images can be listed, so samples are scored exactly.

Shape suffixes: N images, H W pixels, M renderings (shape, size, position) without colour, P pixels of an image.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SHAPES = ("disc", "frame", "triangle", "cross")
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 240),
    "yellow": (240, 220, 40),
    "magenta": (220, 50, 210),
    "cyan": (40, 210, 220),
}
BACKGROUND = (24, 24, 32)
CLASS_NAMES = tuple(f"{colour} {shape}" for shape in SHAPES for colour in COLOURS)
NUM_CLASSES = len(CLASS_NAMES)
# In units of a sixteenth of the image.
RADII, CENTRES = (3.0, 4.0), (4.0, 6.0, 8.0, 10.0, 12.0)
POSITIONS = tuple((radius, y, x) for radius in RADII for y in CENTRES for x in CENTRES)


class ShapeReading(NamedTuple):
    """The content of an image: shape and colour as indices (-1: empty), and the IoU of the best mask."""

    shape: Tensor
    colour: Tensor
    iou: Tensor


def render_shapes(height: int, width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Every possible image, sorted by class: (N, H, W, 3) and (N,), both uint8; square unless a width is given."""
    width = width or height
    masks_SMHW = masks(height, width).reshape(len(SHAPES), 1, len(POSITIONS), height, width, 1)
    paint = np.array(list(COLOURS.values()), np.uint8).reshape(1, -1, 1, 1, 1, 3)
    images = np.where(masks_SMHW, paint, np.array(BACKGROUND, np.uint8))
    return images.reshape(-1, height, width, 3), np.repeat(np.arange(NUM_CLASSES, dtype=np.uint8), len(POSITIONS))


@functools.lru_cache(maxsize=4)
def masks(height: int, width: int = 0) -> np.ndarray:
    """(M, H, W) bool: every shape in every size and position, without colour; stretched where images are not square."""
    at_H, at_W = ((np.arange(side) + 0.5) * 16 / side for side in (height, width or height))
    found = [
        _mask(shape, (at_H[:, None] - y) / radius, (at_W[None, :] - x) / radius) for shape in SHAPES for radius, y, x in POSITIONS
    ]
    return np.stack(found)


def _mask(shape: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One shape within the square [-1, 1] x [-1, 1]."""
    edge = np.maximum(abs(y), abs(x))
    if shape == "disc":
        return y**2 + x**2 <= 1.0
    if shape == "frame":
        return (edge <= 1.0) & (edge > 0.55)
    if shape == "triangle":
        return (abs(y) <= 1.0) & (abs(x) <= (y + 1.0) / 2)
    return (edge <= 1.0) & (np.minimum(abs(y - x), abs(y + x)) <= 0.4)


def read_shapes(images_NCHW: Tensor) -> ShapeReading:
    """The exact check of images in [-1, 1]: foreground by distance from the background, shape by IoU, colour by its mean."""
    images_NCHW = images_NCHW.float()
    device = images_NCHW.device
    background_C, palette_KC = _normal([BACKGROUND], device)[0], _normal(list(COLOURS.values()), device)
    threshold = (palette_KC - background_C).norm(dim=1).min() / 2
    front_NP = ((images_NCHW - background_C[:, None, None]).norm(dim=1) > threshold).flatten(1).float()
    masks_MP = torch.from_numpy(masks(*images_NCHW.shape[-2:])).to(device).flatten(1).float()
    both_NM = front_NP @ masks_MP.T
    area_N1 = front_NP.sum(1, keepdim=True)
    iou_N, best_N = (both_NM / (area_N1 + masks_MP.sum(1) - both_NM)).max(1)
    mean_NC = torch.einsum("ncp,np->nc", images_NCHW.flatten(2), front_NP) / area_N1.clamp_min(1)
    colour_N = torch.cdist(mean_NC, palette_KC).argmin(1)
    empty_N = area_N1[:, 0] == 0
    shape_N = (best_N // len(POSITIONS)).masked_fill(empty_N, -1)
    return ShapeReading(shape_N, colour_N.masked_fill(empty_N, -1), iou_N)


def score_shapes(images_NCHW: Tensor, classes_N: Tensor) -> dict[str, float]:
    """Shares of images with the right shape, colour, both, and with an IoU of at least 0.8; and the mean IoU."""
    seen = read_shapes(images_NCHW)
    wanted_N = classes_N.to(seen.shape.device)
    shape_N, colour_N = seen.shape == wanted_N // len(COLOURS), seen.colour == wanted_N % len(COLOURS)
    both_N = shape_N & colour_N
    rows = {"right": both_N, "shape": shape_N, "colour": colour_N, "iou80": seen.iou >= 0.8, "iou": seen.iou}
    return {name: value.double().mean().item() for name, value in rows.items()}


def _normal(colours: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    return torch.tensor(colours, dtype=torch.float32, device=device) / 127.5 - 1.0
