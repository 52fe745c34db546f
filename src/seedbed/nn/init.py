"""Initialisation: storage for modules built on the meta device, and random fills that are equal on every device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seedbed.nn.groups import declaration_of


def materialize(module: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Give a module built on the meta device storage filled with NaN, so that a missing initialisation shows at once.

    Unlike `Module.to_empty`, it keeps the declarations of the parameters. Inside `shapes_only` nothing happens.
    """
    if _shapes_only:
        return module
    for child in module.modules():
        assert not list(child.buffers(recurse=False)), "buffers would be left uninitialised; compute them in forward"
        for name, old in child.named_parameters(recurse=False):
            # Not full_like: for a meta tensor it imports torch's symbolic shapes.
            new = nn.Parameter(torch.full(old.shape, float("nan"), dtype=old.dtype, device=device), old.requires_grad)
            declared = declaration_of(old)
            if declared:
                new.declaration = declared  # type: ignore[attr-defined]
            setattr(child, name, new)
    return module


@torch.no_grad()
def normal_(param: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal numbers drawn on the CPU, so that a seed gives the same model on every device; std 0 fills with zeros."""
    if param.is_meta:
        return
    if std == 0.0:
        param.zero_()
        return
    param.copy_(torch.empty(param.shape).normal_(0.0, std, generator=generator))


@torch.no_grad()
def fill_(param: Tensor, value: float) -> None:
    """Fill with a constant, for gains and gates."""
    param.fill_(value)


class _Unfilled(TorchFunctionMode):
    """Skips the random fills of torch's own layers: on the meta device they have no effect and import torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


_shapes_only = False


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Modules that are built and initialised inside stay on the meta device: a model of any size costs no memory."""
    global _shapes_only
    _shapes_only = True
    try:
        yield
    finally:
        _shapes_only = False


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Modules created inside have shapes and no storage; `materialize` or a checkpoint provides it."""
    with torch.device("meta"), _Unfilled():
        yield
