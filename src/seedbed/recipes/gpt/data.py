"""Text data of the gpt recipe."""

from typing import Any

from seedbed.config import Config
from seedbed.data.text import TextData, open_data
from seedbed.data.text import open_for_inference as open_inference_data
from seedbed.data.text import save_for_inference as save_inference_data

__all__ = ["check_data", "evaluation_source", "open_data", "open_inference_data", "save_inference_data"]


def evaluation_source(config: Config, data: TextData, given: Any) -> Any:
    from seedbed.data.text_facts import given_text

    return given_text(config, data, given)


def check_data(config: Config, data: TextData) -> TextData:
    """The data of the checks, in the blocks of their small config."""
    from seedbed.data.text_facts import subset_text

    return subset_text(data, config.data.block)
