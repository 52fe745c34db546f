"""Image batches: normalised, flipped and cropped on the device; and how images are opened.

Random numbers follow from (seed, sample counter), so they are the same at any batch size, world size or restart.
Shape suffixes: B items, N images, C channels, H W pixels, K taps of a blur.
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
from seedbed.data import inference_data, shapes
from seedbed.data.feed import Data, Source
from seedbed.data.image_store import partition, prepare_images, shuffled_split
from seedbed.data.images import ImageConfig, random_images
from seedbed.data.prepare import Say
from seedbed.data.store import digest
from seedbed.errors import UserError
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
        self.shape, self.flip = config.shape, config.flip and train
        self.margins = [stored - side for stored, side in zip(config.stored_shape, config.shape, strict=True)]

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        image, index_B = raw["image"], raw["index"]
        if image.dtype == torch.uint8:
            image = to_float(self._augment(image, index_B))
        return {"image": image.float(), "class": raw["class"].long(), "index": index_B}

    def _augment(self, image_BHWC: Tensor, index_B: Tensor) -> Tensor:
        """Flip and crop by selecting rows and columns: one gather of bytes."""
        if not self.flip and not any(self.margins):
            return image_BHWC
        device = image_BHWC.device
        row_BH, column_BW = (torch.arange(side, device=device).expand(len(index_B), side) for side in self.shape)
        if self.flip:
            flip_B1 = rng.integers(rng.keys(self.seed, index_B, _FLIP), 1, 2)
            column_BW = torch.where(flip_B1 == 1, self.shape[1] - 1 - column_BW, column_BW)
        if any(self.margins):
            row_B1, column_B1 = self._corners(index_B)
            row_BH, column_BW = row_BH + row_B1, column_BW + column_B1
        item_B = torch.arange(len(index_B), device=device)
        return image_BHWC[item_B[:, None, None], row_BH[:, :, None], column_BW[:, None, :]]

    def _corners(self, index_B: Tensor) -> list[Tensor]:
        """The first row and the first column of each crop: random in training, else that of the centre."""
        if not self.train:
            return [torch.full_like(index_B[:, None], margin // 2) for margin in self.margins]
        keys = rng.keys(self.seed, index_B, _CROP)
        return [rng.integers(keys, 2, margin + 1)[:, axis : axis + 1] for axis, margin in enumerate(self.margins)]

    def spread(self, num: int) -> np.ndarray:
        """The indices of `num` images, or of all, evenly spaced: a store may be sorted by class."""
        num = min(num, self.num_items)
        return np.arange(num) * self.num_items // num

    def pick(self, rows_N: np.ndarray) -> tuple[Tensor, Tensor]:
        """The images with these indices, without augmentation."""
        image = torch.from_numpy(self.arrays["image"][rows_N])
        if image.dtype == torch.uint8:
            rows, columns = (slice(m // 2, m // 2 + side) for m, side in zip(self.margins, self.shape, strict=True))
            image = to_float(image[:, rows, columns])
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


def blur(image_BCHW: Tensor, width: float) -> Tensor:
    """A Gaussian of this standard deviation in pixels, edges continued."""
    reach, channels = max(1, round(3 * width)), image_BCHW.shape[1]
    at_K = torch.arange(-reach, reach + 1, device=image_BCHW.device, dtype=image_BCHW.dtype)
    taps_K = torch.exp(-0.5 * (at_K / width).square())
    taps_C1K = (taps_K / taps_K.sum()).expand(channels, 1, -1)
    x = torch.nn.functional.pad(image_BCHW, (reach,) * 4, mode="replicate")
    return torch.conv2d(torch.conv2d(x, taps_C1K[..., None, :], groups=channels), taps_C1K[..., None], groups=channels)


def subset_images(data: ImageData, config: ImageConfig, num_images: int = 2048) -> ImageData:
    """Some of the images of both parts, evenly spaced, with every n-th of their pixels: as small as `config` says."""

    def subset(source: ImageSource) -> ImageSource:
        rows_N = source.spread(num_images)
        image = source.arrays["image"][rows_N]
        if image.dtype == np.uint8:
            height, width = config.stored_shape
            steps = max(1, image.shape[1] // height), max(1, image.shape[2] // width)
            image = np.ascontiguousarray(image[:, :: steps[0], :: steps[1]][:, :height, :width])
        return ImageSource(image, source.arrays["class"][rows_N], config, source.seed, source.train)

    train, valid = subset(data.train), subset(data.valid)
    return replace(data, train=train, valid=valid, shape=tuple(train.pick(np.zeros(1, np.int64))[0].shape[1:]))


def open_data(config: Config) -> ImageData:
    """The images that `config.data`, an `ImageConfig`, names; long work shows its progress on standard error."""
    name = config.data.images
    if name == "shapes":
        # Every possible image, with a share of each class held out; the same ones for any seed.
        images_NHWC, classes_N = shapes.render_shapes(*config.data.shape)
        rows = shuffled_split(partition(classes_N, config.data.valid))
        return _data(config.data, config.seed, [(images_NHWC[r], classes_N[r]) for r in rows], shapes.CLASS_NAMES, {})
    if name.startswith("random:"):
        return _open_random(config.data, config.seed)
    return open_images(config.data, config.seed, say=lambda line: print(line, file=sys.stderr))


def open_images(config: ImageConfig, seed: int, say: Say = lambda line: None) -> ImageData:
    store = prepare_images(config, say=say)
    parts = [(store.split(name, "image"), store.split(name, "class")) for name in ("train", "valid")]
    facts = {"fingerprint": store.fingerprint, "num_bad": store.manifest["counts"]["num_bad"], "store": str(store.path)}
    return _data(config, seed, parts, store.manifest["class_names"], facts)


def given_images(config: Config, data: ImageData, given: Any, by_class: bool = True) -> Any:
    """All images of a folder, prepared like the run's and with its class numbers; with `by_class`, it must know their classes."""
    if not isinstance(given, str | Path):
        return given
    wanted = replace(config.data, images=str(Path(given).expanduser().absolute()))
    store = prepare_images(wanted, say=lambda line: print(line, file=sys.stderr))
    numbers = {name: n for n, name in enumerate(data.class_names)}
    names = store.manifest["class_names"]
    if by_class and (strange := [name for name in names if name not in numbers]):
        known = ", ".join(data.class_names[:8]) + (" ..." if data.num_classes > 8 else "")
        raise UserError(f"{given} has the class {strange[0]}, which the run does not know; its classes are {known}")
    class_N = np.array([numbers.get(name, 0) for name in names])[store.arrays["class"]]
    return ImageSource(store.arrays["image"], class_N, config.data, config.seed, train=False)


def _open_random(config: ImageConfig, seed: int) -> ImageData:
    num, num_classes = random_images(config.images)
    rng = np.random.Generator(np.random.PCG64(1))
    images_NHWC = rng.integers(0, 256, (num, *config.stored_shape, 3), np.uint8)
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
        **({"width": config.width} if config.width else {}),
    }
    channels, height, width = train.pick(np.zeros(1, np.int64))[0].shape[1:]
    return ImageData(train, valid, given | facts, tuple(names), (channels, height, width))


def save_for_inference(data: ImageData, folder: Path, rows_N: np.ndarray | None = None) -> None:
    """Save class names and these validation images, or the first of every class."""
    class_N, image = np.asarray(data.valid.arrays["class"]), data.valid.arrays["image"]
    if rows_N is None:
        most = max(1, min(NUM_PER_CLASS, NUM_IMAGES // max(1, data.num_classes)))
        rows_N = np.sort(np.concatenate([np.flatnonzero(class_N == c)[:most] for c in range(data.num_classes)]))
    rows_N = rows_N if len(rows_N) else np.zeros(1, np.int64)
    arrays = {"image": np.ascontiguousarray(image[rows_N]), "class": np.ascontiguousarray(class_N[rows_N])}
    inference_data.write(folder, {"facts": data.facts, "class_names": list(data.class_names), "shape": list(data.shape)}, arrays)


def open_for_inference(config: Config, folder: Path) -> ImageData:
    """Data whose splits are both the validation images that `save_for_inference` saved."""
    about, arrays = inference_data.read(folder)
    train, valid = (ImageSource(arrays["image"], arrays["class"], config.data, config.seed, train=part) for part in (True, False))
    channels, height, width = about["shape"]
    return ImageData(train, valid, about["facts"], tuple(about["class_names"]), (channels, height, width))
