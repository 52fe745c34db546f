"""The part of the data that a run saves for inference: facts and a few validation items; text.py and image_source.py use it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from seedbed.errors import UserError
from seedbed.track import files

FACTS, ARRAYS = "data.json", "valid.safetensors"


def write(folder: Path, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Make the folder, with the facts as JSON beside the arrays."""
    folder.mkdir(exist_ok=True)
    files.write_atomic(folder / ARRAYS, safetensors.numpy.save(arrays))
    files.write_atomic(folder / FACTS, json.dumps(about, indent=1))


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from seedbed.data import limits

    try:
        about = files.read_json(folder / FACTS)
        limits.require_header(folder / ARRAYS)
        arrays = safetensors.numpy.load_file(folder / ARRAYS)
        if not isinstance(about, dict) or not isinstance(about.get("facts"), dict):
            raise ValueError(f"{FACTS} does not describe data")
        return about, arrays
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise damaged(folder, error) from None


def damaged(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder} is damaged ({error}); copy it again, or move it away, and the training data is opened instead")
