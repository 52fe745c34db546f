"""The part of the data that a run saves for inference: facts and a few validation items; text.py and image_source.py use it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from seedbed.track import files

FACTS, ARRAYS = "data.json", "valid.safetensors"


def write(folder: Path, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Make the folder, with the facts as JSON beside the arrays."""
    folder.mkdir(exist_ok=True)
    files.write_atomic(folder / ARRAYS, safetensors.numpy.save(arrays))
    files.write_atomic(folder / FACTS, json.dumps(about, indent=1))
