"""Oversized headers of safetensors files are refused before they are read."""

from pathlib import Path

from seedbed.track import files

# A thousand tensors need about 100 kB of header; readers allocate what a header claims.
MAX_HEADER = 8 << 20


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
