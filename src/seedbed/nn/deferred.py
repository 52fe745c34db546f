"""Models that are built without storage: for their shapes alone, or to be filled once they are sharded."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from seedbed.nn import init


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Modules that are built and initialised inside stay on the meta device: a model of any size costs no memory."""
    init.keeps_meta = True
    try:
        yield
    finally:
        init.keeps_meta = False


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Models that may wait stay on the meta device inside: `init_deferred` fills them once their shards have storage."""
    init.defers = True
    try:
        yield
    finally:
        init.defers = False


def init_deferred(module: nn.Module) -> None:
    """Fill the models in `module` that were built inside `deferred_init`: the numbers that `initialised` would have drawn."""
    for model in module.modules():
        if "deferred_seed" in vars(model):
            model.init_weights(torch.Generator().manual_seed(model.deferred_seed))  # type: ignore[operator]
            del model.deferred_seed
