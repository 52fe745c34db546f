"""What an ebt trains on: images, or blocks of tokens with the number of each sample, which decides its first candidates."""

import sys
from dataclasses import replace

from torch import Tensor

from seedbed.config import Config
from seedbed.data.image_source import ImageData
from seedbed.data.images import ImageConfig
from seedbed.data.text import TextData, TextSource, open_text
from seedbed.recipes.ebt.images import open_images


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


def _counted(source: TextSource) -> CountedText:
    return CountedText(source.tokens, source.block, source.mode, source.seed, source.token_bytes)
