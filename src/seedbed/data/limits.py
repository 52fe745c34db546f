"""Limits on parsed files: names with path separators, and oversized headers or JSON, are refused before they are read."""

import errno
import json
from pathlib import Path
from typing import Any

from seedbed.track import files

# A thousand tensors need about 100 kB of header; readers allocate what a header claims.
MAX_HEADER = 8 << 20
MAX_JSON = 64 << 20


def header_problem(start: bytes) -> str:
    """What is wrong with the first bytes of a safetensors file; empty when its header has a valid size."""
    size = int.from_bytes(start[:8], "little")
    if len(start) < 8:
        return "it is too short for safetensors"
    return f"its header claims {size:,} bytes, more than {MAX_HEADER >> 20} MiB" if size > MAX_HEADER else ""


def require_header(path: Path) -> None:
    """Refuse a safetensors file by its first bytes, as a ValueError."""
    with open(files.open_regular(path), "rb") as file:
        if problem := header_problem(file.read(8)):
            raise ValueError(problem)


def read_json(path: Path) -> Any:
    """The values of a JSON file of limited size; OSError or ValueError otherwise."""
    try:
        return json.loads(files.read_regular(path, MAX_JSON))
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ValueError(f"{path.name} is {error.strerror}") from None
        raise
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
