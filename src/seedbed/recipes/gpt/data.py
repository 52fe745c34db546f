"""The text that a gpt trains on."""

import sys

from seedbed.config import Config
from seedbed.data.text import TextData, open_text


def open_data(config: Config) -> TextData:
    """Prepare and open `config.data`, a `TextConfig`; long work shows its progress on standard error."""
    return open_text(config.data, config.seed, say=lambda line: print(line, file=sys.stderr))
