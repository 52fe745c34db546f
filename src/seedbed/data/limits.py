"""Limits on what is parsed: a file that claims to be huge, or leads elsewhere, is refused before anything reads it."""

import json
import re
from pathlib import Path
from typing import Any

# A thousand tensors need about 100 kB of header; readers allocate what a header claims.
MAX_HEADER = 8 << 20
MAX_JSON = 64 << 20

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def is_plain_name(name: object) -> bool:
    """Whether this names a file right inside a folder: no separators, no dots to climb by, nothing hidden."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


def header_problem(start: bytes) -> str:
    """What is wrong with the first bytes of a safetensors file; nothing when its header has a sane size."""
    size = int.from_bytes(start[:8], "little")
    if len(start) < 8:
        return "it is too short for safetensors"
    return f"its header claims {size:,} bytes, more than {MAX_HEADER >> 20} MiB" if size > MAX_HEADER else ""


def require_header(path: Path) -> None:
    """Refuse a safetensors file by its first bytes, as a ValueError."""
    with open(path, "rb") as file:
        if problem := header_problem(file.read(8)):
            raise ValueError(problem)


def read_json(path: Path) -> Any:
    """Values of a JSON file of bearable size; OSError or ValueError otherwise."""
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"{path.name} is larger than {MAX_JSON >> 20} MiB")
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
