"""Training data of ebt: images, or blocks of tokens with their sample counters, which decide the initial predictions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from seedbed.config import Config
from seedbed.data import image_source, shapes, text
from seedbed.data.image_source import ImageData, ImageSource, given_images, subset_images
from seedbed.data.images import ImageConfig
from seedbed.data.text import TextData, TextSource
from seedbed.data.text_facts import given_text, subset_text

# Held-out images of an evaluation, and how many of them are kept for samples.
NUM_EVALUATED, NUM_SHOWN = 1024, 64


class CountedText(TextSource):
    """Blocks that know their global sample counter."""

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**super().batch(raw), "index": raw["index"]}


def open_data(config: Config) -> TextData | ImageData:
    """Prepare and open `config.data`, a text or images; long work shows its progress on standard error."""
    if isinstance(config.data, ImageConfig):
        return open_images(config)
    return _counted(text.open_data(config))


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


def check_data(config: Config, data: TextData | ImageData) -> TextData | ImageData:
    """The data of the checks; shapes are drawn again, which is fast and exact."""
    if isinstance(data, TextData):
        return subset_text(data, config.data.block)
    return open_images(config) if config.data.images == "shapes" else subset_images(data, config.data)


def save_inference_data(data: TextData | ImageData, folder: Path) -> None:
    """Text: the tokenizer and held-out tokens. Images: those of samples; drawn ones are drawn again."""
    if isinstance(data, TextData):
        text.save_for_inference(data, folder)
    elif "store" in data.facts:
        image_source.save_for_inference(data, folder, data.valid.spread(NUM_EVALUATED)[:NUM_SHOWN])


def open_inference_data(config: Config, folder: Path) -> TextData | ImageData:
    if isinstance(config.data, ImageConfig):
        return image_source.open_for_inference(config, folder)
    return _counted(text.open_for_inference(config, folder))


def evaluation_source(config: Config, data: TextData | ImageData, given: Any) -> Any:
    """A text, or images of any class."""
    return given_text(config, data, given) if isinstance(data, TextData) else given_images(config, data, given, by_class=False)


def _counted(data: TextData) -> TextData:
    """The same text with blocks that know their counter."""
    parts = (data.train, data.valid)
    train, valid = (CountedText(part.tokens, part.block, part.mode, part.seed, part.token_bytes) for part in parts)
    return replace(data, train=train, valid=valid)
