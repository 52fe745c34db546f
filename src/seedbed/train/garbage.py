"""Pauses Python's garbage collector during steps and collects between them, so that no collection falls into a timed step."""

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator

_num_collections = 0


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable automatic collection inside; `gc_collect` still collects. Objects that exist already are frozen."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def gc_collect() -> None:
    """Collect reference cycles, after an evaluation, a sample or a save.

    Freed memory is returned to the system: left fragmented, it would look like a leak.
    """
    global _num_collections
    gc.collect()
    _give_back()(0)
    _num_collections += 1


def num_collections() -> int:
    """How often this process has collected: between two collections there are only steps."""
    return _num_collections


@functools.cache
def _give_back() -> Callable[[int], int]:
    """glibc's malloc_trim; other C libraries do not have it."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda keep: 0
