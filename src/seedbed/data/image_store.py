"""Preparation of image stores: decoded once at one size, cached by content, resumed after an interruption."""

import contextlib
import hashlib
import importlib
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from seedbed.data.image_dataset import ImageDataset, open_image_dataset
from seedbed.data.images import ImageConfig
from seedbed.data.order import draw
from seedbed.data.prepare import Say, cache_folder, find_or_build
from seedbed.data.store import Progress, Store, Writer, digest, is_store
from seedbed.errors import UserError

# Bump when the same image gives other bytes than before.
FORMAT = 1
# Images decoded in parallel, and how many of them by one thread.
DECODE_BATCH, PER_THREAD = 512, 16
# A killed preparation loses at most this time of work.
SAVE_SECONDS = 5.0
# Bad images that the manifest names; the others are counted.
MAX_LISTED = 100
WHITE = (255, 255, 255)


def prepare_images(config: ImageConfig, *, out: Path | None = None, rebuild: bool = False, say: Say = lambda line: None) -> Store:
    """The store of these images at this size: the one that exists, or a new one. `rebuild` replaces a damaged one.

    An interrupted preparation continues where it stopped, and gives the same store as an uninterrupted one.
    """
    if is_store(Path(config.images).expanduser()):
        store = Store.open(Path(config.images).expanduser())
        made = store.manifest.get("images")
        if made is None:
            raise UserError(f"store {store.path} holds no images; name a folder of images, or a store made from one")
        for name, wanted in _settings(config).items():
            if made[name] != wanted:
                raise UserError(f"store {store.path} was made with {name}={made[name]}, not {wanted}; name its images instead")
        return store
    job = _Job(config, say)
    path = out.absolute() if out else cache_folder(config.cache) / f"{job.label}-{job.key[:12]}"
    return find_or_build(path, job.key, job.build, rebuild=rebuild, say=say)


def _settings(config: ImageConfig) -> dict[str, Any]:
    """The settings that a store depends on; of square images as ever, so that older stores still serve."""
    height, width = config.stored_shape
    return {"stored_size": height if height == width else [height, width], "valid": config.valid, "encode": config.encode}


def partition(classes_N: np.ndarray, share: float) -> np.ndarray:
    """True for the rows that are held out: `share` of every class, the same ones always.

    At least one image of a class is held out and one kept; a class with a single image keeps it for training.
    """
    held_N = np.zeros(len(classes_N), bool)
    order_N = np.lexsort((draw(0, np.arange(len(classes_N))), classes_N))
    starts = np.flatnonzero(np.diff(classes_N[order_N], prepend=-1))
    for rows in np.split(order_N, starts[1:]):
        held_N[rows[: min(max(1, math.floor(len(rows) * share)), len(rows) - 1)]] = True
    return held_N


def shuffled_split(held_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and for validation, each in a fixed random order: the first of them hold every class."""
    shuffled_N = np.argsort(draw(1, np.arange(len(held_N))), kind="stable")
    return shuffled_N[~held_N[shuffled_N]], shuffled_N[held_N[shuffled_N]]


class DecodedImage(NamedTuple):
    """One image at the size of the store, and the changes that were made; or None and why it cannot be used."""

    pixels: np.ndarray | None
    done: tuple[str, ...]
    problem: str = ""


def decode(image: Image.Image, shape: tuple[int, int]) -> DecodedImage:
    """The centre in RGB at this height and width: first frame, EXIF orientation applied, transparent parts on white."""
    done = ["with several frames: the first used"] if getattr(image, "n_frames", 1) > 1 else []
    if image.format == "JPEG":
        # libjpeg decodes a large photograph at a fraction of its size for a fraction of the time.
        image.draft("RGB", (2 * max(shape), 2 * max(shape)))  # its orientation is not known yet
    image = ImageOps.exif_transpose(image)
    image, changed = _to_rgb(image)
    done += changed
    height, width = shape
    if image.width < width or image.height < height:
        done.append("smaller than asked for: enlarged")
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    return DecodedImage(np.asarray(image, np.uint8), tuple(done))


def _to_rgb(image: Image.Image) -> tuple[Image.Image, list[str]]:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image, []
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (*WHITE, 255))
        return Image.alpha_composite(white, image).convert("RGB"), ["with alpha: put on white"]
    if image.mode.startswith("I;16"):
        # A plain conversion would clip everything above 255.
        image = Image.fromarray((np.asarray(image, np.uint32) >> 8).astype(np.uint8))
        return image.convert("RGB"), ["grey: made RGB"]
    kinds = {"L": "grey", "1": "grey", "I": "grey", "F": "grey", "P": "palette", "CMYK": "CMYK"}
    return image.convert("RGB"), [f"{kinds.get(image.mode, image.mode)}: made RGB"]


class _Job:
    """Writes a dataset to a store: training images first, then those held out."""

    def __init__(self, config: ImageConfig, say: Say):
        self.config, self.say = config, say
        self.dataset = open_image_dataset(config.images)
        for note in self.dataset.notes:
            say(note)
        self.rows, self.num_train = _rows(self.dataset, config.valid, say)
        self.identity = self.dataset.identity()
        self.encoder = load_encoder(config.encode) if config.encode else None
        made_by = self.encoder.identity if self.encoder else ""
        self.key = digest([FORMAT, self.identity, self.dataset.class_names, _settings(config), made_by])
        size = "x".join(map(str, dict.fromkeys(config.stored_shape)))
        self.label = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', self.dataset.name)[:40]}-{size}px"

    def build(self, writer: Writer) -> Store:
        state = dict(writer.state) or {"next": 0, "train": 0, "num_bad": 0, "bad": [], "changed": {}}
        dtype = np.dtype(np.uint8 if len(self.dataset.class_names) <= 256 else "<u2")
        writer.array("class", dtype)
        shape, kind = (*self.config.stored_shape, 3), np.dtype(np.uint8)
        if self.encoder:
            shape, kind = self.encoder(np.zeros((1, *shape), np.uint8)).shape[1:], np.dtype("<f2")
        writer.array("image", kind, shape)
        self._write(writer, state, dtype)
        if self.dataset.identity() != self.identity:
            writer.discard()
            raise UserError(f"{self.config.images} changed while it was read; run again when nothing writes to it")
        return self._commit(writer, state)

    def _write(self, writer: Writer, state: dict[str, Any], dtype: np.dtype) -> None:
        progress, saved_at = Progress("decoding", "images"), time.monotonic()
        for rows, pictures in self._decoded(state["next"]):
            good = [(n, p.pixels) for n, p in zip(rows, pictures, strict=True) if p.pixels is not None]
            if good:
                pixels = np.stack([pixels for _, pixels in good])
                writer.append("image", self.encoder(pixels) if self.encoder else pixels)
                writer.append("class", self.dataset.classes_N[[n for n, _ in good]].astype(dtype))
            self._account(state, rows, pictures)
            state["next"] += len(rows)
            state["train"] += len(good) if state["next"] <= self.num_train else 0
            if time.monotonic() - saved_at > SAVE_SECONDS:
                writer.save(**state)
                saved_at = time.monotonic()
            progress(state["next"], len(self.rows))
        progress.close()
        writer.save(**state)

    def _decoded(self, start: int) -> Iterator[tuple[list[int], list[DecodedImage]]]:
        """The images from an index on, in groups that do not cross the border between the splits."""
        borders = [(start, self.num_train), (max(start, self.num_train), len(self.rows))]
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for first, last in borders:
                for begin in range(first, last, DECODE_BATCH):
                    rows = self.rows[begin : min(begin + DECODE_BATCH, last)].tolist()
                    # Decoding a small image takes less time than submitting it to a thread.
                    shares = [rows[k : k + PER_THREAD] for k in range(0, len(rows), PER_THREAD)]
                    yield rows, [p for pictures in pool.map(lambda some: [self._read(n) for n in some], shares) for p in pictures]

    def _read(self, n: int) -> DecodedImage:
        try:
            with contextlib.closing(self.dataset.image(n)) as image:
                return decode(image, self.config.stored_shape)
        except Exception as error:
            # Whatever a damaged file makes the decoder raise, the other images are still good.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return DecodedImage(None, (), reason.replace(str(getattr(self.dataset, "root", "\0")) + os.sep, ""))

    def _account(self, state: dict[str, Any], rows: list[int], pictures: list[DecodedImage]) -> None:
        for n, picture in zip(rows, pictures, strict=True):
            for done in picture.done:
                state["changed"][done] = state["changed"].get(done, 0) + 1
            if picture.pixels is None:
                state["num_bad"] += 1
                if len(state["bad"]) < MAX_LISTED:
                    state["bad"].append({"image": self.dataset.label(n), "why": picture.problem})

    def _commit(self, writer: Writer, state: dict[str, Any]) -> Store:
        num, num_bad = writer.arrays["class"].num_rows, state["num_bad"]
        first = "".join(f"{bad['image']}: {bad['why']}" for bad in state["bad"][:1])
        if not 0 < state["train"] < num:
            part = "training" if not state["train"] else "validation"
            writer.discard()
            why = f"all {num_bad:,} are bad, the first is {first}" if num_bad else "none"
            raise UserError(f"{self.config.images} has no image left for {part}: {why}")
        if num_bad:
            self.say(f"{num_bad:,} of {len(self.rows):,} images are bad and left out, such as {first}")
        for what, count in state["changed"].items():
            self.say(f"{count:,} {what}")
        return writer.commit(
            splits={"train": (0, state["train"]), "valid": (state["train"], num)},
            limits={"class": len(self.dataset.class_names)},
            extra=[],
            images={"key": self.key, **_settings(self.config), "size": self.config.size},
            class_names=list(self.dataset.class_names),
            source={"name": self.config.images, "identity": self.identity},
            counts={"num_images": num, "num_bad": num_bad, "changed": state["changed"]},
            bad=state["bad"],
            rebuild=f"{shlex.join(['rm', '-r', str(writer.path)])}  (the next run prepares it again)",
        )


def _rows(dataset: ImageDataset, share: float, say: Say) -> tuple[np.ndarray, int]:
    """All images, those for training first, and how many these are."""
    held_N = dataset.held_N
    if held_N is None:
        counts = np.bincount(dataset.classes_N, minlength=len(dataset.class_names))
        alone = [dataset.class_names[n] for n in np.flatnonzero(counts == 1)]
        if len(alone) == len(dataset.class_names):
            raise UserError(f"{dataset.name}: every class has only one image, such as {alone[0]}; a split needs two of a class")
        if alone:
            say(f"{len(alone):,} classes have only one image, such as {alone[0]}: it is trained on, and none is held out")
        held_N = partition(dataset.classes_N, share)
    train_N, valid_N = shuffled_split(held_N)
    return np.concatenate((train_N, valid_N)), len(train_N)


class Encoder(NamedTuple):
    """A function of the user's from images (B, 3, H, W) in [-1, 1] to latents (B, C, h, w), and the hash of its file."""

    function: Callable[..., Any]
    identity: str

    def __call__(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        import torch

        image_BCHW = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        with torch.no_grad():
            latents = self.function(image_BCHW)
        if not isinstance(latents, torch.Tensor) or latents.ndim != 4 or len(latents) != len(image_BCHW):
            raise UserError("data.encode must give a tensor (B, C, h, w) for a batch (B, 3, H, W)")
        return latents.float().cpu().numpy().astype("<f2")


def load_encoder(name: str) -> Encoder:
    place, _, title = name.partition(":")
    # The name may come from the config of another person's run, so functions that can do more than compute are refused.
    if place.partition(".")[0] in sys.stdlib_module_names:
        raise UserError(f"data.encode={name} is not an encoder of images; name a function in a package or file of your own")
    try:
        module = importlib.import_module(place)
        function = getattr(module, title)
    except (ImportError, AttributeError) as error:
        raise UserError(f"data.encode={name} cannot be loaded: {error}") from None
    file = getattr(module, "__file__", None)
    return Encoder(function, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else name)
