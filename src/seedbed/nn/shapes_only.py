"""Models of any size without memory, to look at their shapes."""

import contextlib
from collections.abc import Iterator

from seedbed.nn import init


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Modules that are built and initialised inside stay on the meta device: a model of any size costs no memory."""
    init.keeps_meta = True
    try:
        yield
    finally:
        init.keeps_meta = False
