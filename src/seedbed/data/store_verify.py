"""Complete verification of a store: every chunk, every value, and the splits."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from seedbed.data import store as stores
from seedbed.data.store import Store
from seedbed.data.store_reading import chunk_problem


def problems(store: Store, progress: Callable[[int, int], None]) -> list[str]:
    """A line for everything that is wrong: hashes by chunk, splits, and values against the recorded range."""
    wrong = _check_splits(store.manifest)
    for name, sha in store.manifest["files"].items():
        if hashlib.sha256((store.path / name).read_bytes()).hexdigest() != sha:
            wrong.append(f"{name} differs from its checksum")
    total = sum(array.nbytes for array in store.arrays.values())
    done = 0
    for name, array in store.arrays.items():
        for problem in _check_array(name, array, store.manifest["arrays"][name]):
            if problem:
                wrong.append(problem)
            done += stores.CHUNK
            progress(min(done, total), total)
    return wrong


def _check_array(name: str, array: np.ndarray, info: dict[str, Any]) -> Iterator[str]:
    """One line per chunk, empty when it is intact; after the last one, what is wrong with the values."""
    flat = array.reshape(-1).view(np.uint8)
    starts = range(0, flat.size, stores.CHUNK)
    if len(starts) != len(info["chunks"]):
        yield f"{name}.bin has {len(starts)} chunks, its manifest names {len(info['chunks'])}"
    low, high = [], []
    for start, sha in zip(starts, info["chunks"], strict=False):
        yield chunk_problem(name, flat, start // stores.CHUNK, sha)
        if "max" in info:
            chunk = flat[start : start + stores.CHUNK]
            low.append(chunk.view(array.dtype).min())
            high.append(chunk.view(array.dtype).max())
    if high and [int(min(low)), int(max(high))] != [info["min"], info["max"]]:
        yield f"{name}.bin holds values {min(low)} to {max(high)}, its manifest says {info['min']} to {info['max']}"
    if high and "limit" in info and max(high) >= info["limit"]:
        yield f"{name}.bin holds {max(high)}, but values must stay below {info['limit']}"


def _check_splits(manifest: dict[str, Any]) -> list[str]:
    """Splits must follow one another and cover all rows."""
    (num_rows,) = {info["shape"][0] for info in manifest["arrays"].values()}
    wrong, end = [], 0
    for name, (start, stop) in sorted(manifest["splits"].items(), key=lambda item: item[1]):
        if start != end:
            wrong.append(
                f"split {name} starts at {start:,}, {'inside' if start < end else 'after a gap to'} the split before ({end:,})"
            )
        if stop <= start:
            wrong.append(f"split {name} is empty ({start:,} to {stop:,})")
        end = stop
    if end != num_rows:
        wrong.append(f"splits end at {end:,}, the arrays have {num_rows:,} rows")
    return wrong
