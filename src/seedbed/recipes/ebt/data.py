"""Training data of ebt: images, or blocks of tokens with their sample counters, which decide the initial predictions."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from seedbed.config import Config
from seedbed.data import image_source, text
from seedbed.data.image_source import ImageData, given_images, subset_images
from seedbed.data.images import ImageConfig
from seedbed.data.text import TextData, TextSource, open_text
from seedbed.data.text_facts import given_text, subset_text
from seedbed.recipes.ebt.denoise.data import NUM_EVALUATED, NUM_SHOWN, open_images


class CountedText(TextSource):
    """Blocks that know their global sample counter."""

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**super().batch(raw), "index": raw["index"]}


def open_data(config: Config) -> TextData | ImageData:
    """Prepare and open `config.data`, a text or images; long work shows its progress on standard error."""
    if isinstance(config.data, ImageConfig):
        return open_images(config)
    return _counted(open_text(config.data, config.seed, say=lambda line: print(line, file=sys.stderr)))


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
