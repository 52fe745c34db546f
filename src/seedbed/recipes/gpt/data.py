"""Text data of the gpt recipe."""

import sys
from typing import Any

from seedbed.config import Config
from seedbed.data.text import TextData, open_text
from seedbed.data.text import open_for_inference as open_inference_data
from seedbed.data.text import save_for_inference as save_inference_data

__all__ = ["check_data", "evaluation_source", "open_data", "open_inference_data", "save_inference_data"]


def open_data(config: Config) -> TextData:
    """Prepare and open `config.data`, a `TextConfig`; long work shows its progress on standard error."""
    return open_text(config.data, config.seed, say=lambda line: print(line, file=sys.stderr))


def evaluation_source(config: Config, data: TextData, given: Any) -> Any:
    from seedbed.data.text_facts import given_text

    return given_text(config, data, given)


def check_data(config: Config, data: TextData) -> TextData:
    """The data of the checks, in the blocks of their small config."""
    from seedbed.data.text_facts import subset_text

    return subset_text(data, config.data.block)
