"""Reads what inference_data.py wrote."""

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from seedbed.data import limits
from seedbed.data.inference_data import ARRAYS, FACTS
from seedbed.errors import UserError


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        about = limits.read_json(folder / FACTS)
        limits.require_header(folder / ARRAYS)
        arrays = safetensors.numpy.load_file(folder / ARRAYS)
        if not isinstance(about, dict) or not isinstance(about.get("facts"), dict):
            raise ValueError(f"{FACTS} does not describe data")
        return about, arrays
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise damaged(folder, error) from None


def damaged(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder} is damaged ({error}); copy it again, or move it away, and the training data is opened instead")
