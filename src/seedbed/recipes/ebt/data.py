"""The text that an ebt trains on: blocks of tokens, and the number of each sample, which decides its first candidates."""

import sys
from dataclasses import replace

from torch import Tensor

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource, open_text


class CountedText(TextSource):
    """Blocks that know their global sample counter."""

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**super().batch(raw), "index": raw["index"]}


def open_data(config: Config) -> TextData:
    """Prepare and open `config.data`, a `TextConfig`; long work shows its progress on standard error."""
    data = open_text(config.data, config.seed, say=lambda line: print(line, file=sys.stderr))
    return replace(data, train=_counted(data.train), valid=_counted(data.valid))


def _counted(source: TextSource) -> CountedText:
    return CountedText(source.tokens, source.block, source.mode, source.seed, source.token_bytes)
