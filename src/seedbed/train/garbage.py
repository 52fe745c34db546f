"""Garbage lies while steps are taken, so that collecting never makes one late, and is swept up where time is not counted."""

import contextlib
import gc
from collections.abc import Iterator


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
    """After an evaluation, a sample or a save: what refers to itself would stay for the rest of the run."""
    gc.collect()
