"""Garbage lies while steps are taken, so that collecting never makes one late, and is swept up where time is not counted."""

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def left_lying() -> Iterator[None]:
    """Nothing is collected inside but by `sweep`; what exists already is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def sweep() -> None:
    """After an evaluation, a sample or a save: what refers to itself would stay for the rest of the run.

    What was freed goes back to the system: left in pieces, it would look like a leak.
    """
    gc.collect()
    _give_back()(0)


@functools.cache
def _give_back() -> Callable[[int], int]:
    """glibc's own way; other C libraries have none and need none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda keep: 0
