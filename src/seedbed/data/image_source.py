"""Image batches: normalised, flipped and cropped on the device; and how images are opened.

Random numbers follow from (seed, sample counter), so they are the same at any batch size, world size or restart.
Shape suffixes: B items, N images, C channels, H W pixels.
"""

import hashlib
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seedbed.config import Config
from seedbed.data import inference_data, inference_reading, shapes
from seedbed.data.feed import Data, Source
from seedbed.data.image_store import partition, prepare_images, shuffled_split
from seedbed.data.images import ImageConfig, random_images
from seedbed.data.prepare import Say
from seedbed.data.store import digest
from seedbed.nn import rng

# Streams of random numbers.
_FLIP, _CROP = 301, 302
# Validation images per class, and in total, that are saved to compare with.
NUM_PER_CLASS, NUM_IMAGES = 64, 512


class ImageSource(Source):
    """Images with their classes. `batch` gives floats in [-1, 1]; images stored as floats (latents) are not changed."""

    def __init__(self, images_NHWC: np.ndarray, classes_N: np.ndarray, config: ImageConfig, seed: int, train: bool):
        self.num_items, self.seed, self.train = len(images_NHWC), seed, train
        self.arrays, self.spans = {"image": images_NHWC, "class": classes_N}, {"image": 0, "class": 0}
        self.size, self.flip, self.margin = config.size, config.flip and train, config.stored_size - config.size

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        image, index_B = raw["image"], raw["index"]
        if image.dtype == torch.uint8:
            image = to_float(self._augment(image, index_B))
        return {"image": image.float(), "class": raw["class"].long(), "index": index_B}

    def _augment(self, image_BHWC: Tensor, index_B: Tensor) -> Tensor:
        """Flip and crop by selecting rows and columns: one gather of bytes."""
        if not self.flip and not self.margin:
            return image_BHWC
        device, size = image_BHWC.device, self.size
        step_S = torch.arange(size, device=device)
        column_BS, row_BS = step_S.expand(len(index_B), size), step_S.expand(len(index_B), size)
        if self.flip:
            flip_B1 = rng.integers(rng.keys(self.seed, index_B, _FLIP), 1, 2)
            column_BS = torch.where(flip_B1 == 1, size - 1 - step_S, step_S)
        if self.margin:
            corner_B2 = torch.full((len(index_B), 2), self.margin // 2, device=device)
            if self.train:
                corner_B2 = rng.integers(rng.keys(self.seed, index_B, _CROP), 2, self.margin + 1)
            row_BS, column_BS = row_BS + corner_B2[:, :1], column_BS + corner_B2[:, 1:]
        item_B = torch.arange(len(index_B), device=device)
        return image_BHWC[item_B[:, None, None], row_BS[:, :, None], column_BS[:, None, :]]

    def spread(self, num: int) -> np.ndarray:
        """The indices of `num` images, or of all, evenly spaced: a store may be sorted by class."""
        num = min(num, self.num_items)
        return np.arange(num) * self.num_items // num

    def pick(self, rows_N: np.ndarray) -> tuple[Tensor, Tensor]:
        """The images with these indices, without augmentation."""
        image = torch.from_numpy(self.arrays["image"][rows_N])
        if image.dtype == torch.uint8:
            low = self.margin // 2
            image = to_float(image[:, low : low + self.size, low : low + self.size])
        return image.float(), torch.from_numpy(self.arrays["class"][rows_N].astype(np.int64))


@dataclass
class ImageData(Data):
    """Images for training and evaluation, and the names of their classes."""

    train: ImageSource
    valid: ImageSource
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


def to_float(image_BHWC: Tensor) -> Tensor:
    """(B, C, H, W) floats in [-1, 1] from (B, H, W, C) bytes."""
    # Bytes are permuted before they are converted: a quarter of the traffic.
    return image_BHWC.permute(0, 3, 1, 2).contiguous().float().mul_(1 / 127.5).sub_(1.0)


def to_bytes(image_BCHW: Tensor) -> Tensor:
    """(B, H, W, C) bytes from (B, C, H, W) floats in [-1, 1]; the inverse of `to_float`."""
    return image_BCHW.float().add(1.0).mul(127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def subset_images(data: ImageData, config: ImageConfig, num_images: int = 2048) -> ImageData:
    """Some of the images of both parts, evenly spaced, with every n-th of their pixels: as small as `config` says."""

    def subset(source: ImageSource) -> ImageSource:
        rows_N = source.spread(num_images)
        image = source.arrays["image"][rows_N]
        if image.dtype == np.uint8:
            side = config.stored_size
            step = max(1, image.shape[1] // side)
            image = np.ascontiguousarray(image[:, ::step, ::step][:, :side, :side])
        return ImageSource(image, source.arrays["class"][rows_N], config, source.seed, source.train)

    train, valid = subset(data.train), subset(data.valid)
    return replace(data, train=train, valid=valid, shape=tuple(train.pick(np.zeros(1, np.int64))[0].shape[1:]))


# ---- opening -------------------------------------------------------------------------------------------------------------


def open_data(config: Config) -> ImageData:
    """The images that `config.data`, an `ImageConfig`, names; long work shows its progress on standard error."""
    name = config.data.images
    if name == "shapes":
        return _open_shapes(config.data, config.seed)
    if name.startswith("random:"):
        return _open_random(config.data, config.seed)
    return open_images(config.data, config.seed, say=lambda line: print(line, file=sys.stderr))


def open_images(config: ImageConfig, seed: int, say: Say = lambda line: None) -> ImageData:
    """The images of a folder, a file or a dataset: prepared if missing, opened, checked."""
    store = prepare_images(config, say=say)
    parts = [(store.split(name, "image"), store.split(name, "class")) for name in ("train", "valid")]
    facts = {
        "fingerprint": store.fingerprint,
        "num_bad": store.manifest["counts"]["num_bad"],
        "store": str(store.path),
    }
    return _data(config, seed, parts, store.manifest["class_names"], facts)


def _open_shapes(config: ImageConfig, seed: int) -> ImageData:
    """Every possible image, with a share of each class held out; the same ones for any seed."""
    images_NHWC, classes_N = shapes.render_shapes(config.size)
    parts = [(images_NHWC[rows_N], classes_N[rows_N]) for rows_N in shuffled_split(partition(classes_N, config.valid))]
    return _data(config, seed, parts, shapes.CLASS_NAMES, {})


def _open_random(config: ImageConfig, seed: int) -> ImageData:
    """Noise with random classes, for speed runs; the last images are for validation."""
    num, num_classes = random_images(config.images)
    rng = np.random.Generator(np.random.PCG64(1))
    images_NHWC = rng.integers(0, 256, (num, config.stored_size, config.stored_size, 3), np.uint8)
    classes_N = rng.integers(0, num_classes, num, np.uint16)
    border = num - min(max(1, math.floor(num * config.valid)), num - 1)
    parts = [(images_NHWC[part], classes_N[part]) for part in (slice(0, border), slice(border, num))]
    return _data(config, seed, parts, tuple(f"class {n}" for n in range(num_classes)), {})


def _data(
    config: ImageConfig, seed: int, parts: list[tuple[np.ndarray, np.ndarray]], names: tuple[str, ...], facts: dict[str, Any]
) -> ImageData:
    train, valid = (ImageSource(*part, config, seed, train=n == 0) for n, part in enumerate(parts))
    content = [hashlib.sha256(np.ascontiguousarray(a).data).hexdigest() for part in parts for a in part] if not facts else []
    given = {
        "name": config.images,
        "fingerprint": digest(content)[:16],
        "num_images": train.num_items,
        "num_valid_images": valid.num_items,
        "num_classes": len(names),
        "size": config.size,
    }
    channels, height, width = train.pick(np.zeros(1, np.int64))[0].shape[1:]
    return ImageData(train, valid, given | facts, tuple(names), (channels, height, width))


def save_for_inference(data: ImageData, folder: Path) -> None:
    """Save class names and the first validation images of every class."""
    class_N, image = np.asarray(data.valid.arrays["class"]), data.valid.arrays["image"]
    most = max(1, min(NUM_PER_CLASS, NUM_IMAGES // max(1, data.num_classes)))
    rows_N = np.sort(np.concatenate([np.flatnonzero(class_N == c)[:most] for c in range(data.num_classes)]))
    rows_N = rows_N if len(rows_N) else np.zeros(1, np.int64)
    arrays = {"image": np.ascontiguousarray(image[rows_N]), "class": np.ascontiguousarray(class_N[rows_N])}
    inference_data.write(folder, {"facts": data.facts, "class_names": list(data.class_names), "shape": list(data.shape)}, arrays)


def open_for_inference(config: Config, folder: Path) -> ImageData:
    """Data whose splits are both the validation images that `save_for_inference` saved."""
    about, arrays = inference_reading.read(folder)
    train, valid = (ImageSource(arrays["image"], arrays["class"], config.data, config.seed, train=part) for part in (True, False))
    channels, height, width = about["shape"]
    return ImageData(train, valid, about["facts"], tuple(about["class_names"]), (channels, height, width))
