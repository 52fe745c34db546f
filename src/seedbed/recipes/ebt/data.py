"""Training data of ebt: images, or blocks of tokens with their sample counters, which decide the initial predictions."""

import sys
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from seedbed.config import Config
from seedbed.data import text
from seedbed.data.image_source import ImageData, subset_images
from seedbed.data.images import ImageConfig
from seedbed.data.text import TextData, TextSource, open_text
from seedbed.data.text_facts import subset_text
from seedbed.recipes.ebt.denoise.data import open_images


class CountedText(TextSource):
    """Blocks that know their global sample counter."""

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**super().batch(raw), "index": raw["index"]}


def open_data(config: Config) -> TextData | ImageData:
    """Prepare and open `config.data`, a text or images; long work shows its progress on standard error."""
    if isinstance(config.data, ImageConfig):
        return open_images(config)
    data = open_text(config.data, config.seed, say=lambda line: print(line, file=sys.stderr))
    return replace(data, train=_counted(data.train), valid=_counted(data.valid))


def check_data(config: Config, data: TextData | ImageData) -> TextData | ImageData:
    """The data of the checks; shapes are drawn again, which is fast and exact."""
    if isinstance(data, TextData):
        return subset_text(data, config.data.block)
    return open_images(config) if config.data.images == "shapes" else subset_images(data, config.data)


def save_inference_data(data: TextData | ImageData, folder: Path) -> None:
    """Text: the tokenizer and held-out tokens. Images are opened again."""
    if isinstance(data, TextData):
        text.save_for_inference(data, folder)


def open_inference_data(config: Config, folder: Path) -> TextData | None:
    if isinstance(config.data, ImageConfig):
        return None
    data = text.open_for_inference(config, folder)
    return replace(data, train=_counted(data.train), valid=_counted(data.valid))


def _counted(source: TextSource) -> CountedText:
    return CountedText(source.tokens, source.block, source.mode, source.seed, source.token_bytes)
