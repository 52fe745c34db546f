"""Weights from nothing: real storage for modules built on the meta device, and fills that agree on every device."""

import torch
from torch import Tensor, nn

from seedbed.nn.groups import declaration_of


def materialize(module: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Give a module built on the meta device storage full of NaN, so that a forgotten initialisation shows at once.

    Unlike `Module.to_empty`, what the parameters declared travels along.
    """
    for child in module.modules():
        assert not list(child.buffers(recurse=False)), "buffers would be left uninitialised; compute them in forward"
        for name, old in child.named_parameters(recurse=False):
            new = nn.Parameter(torch.full_like(old, float("nan"), device=device), old.requires_grad)
            declared = declaration_of(old)
            if declared:
                new.declaration = declared  # type: ignore[attr-defined]
            setattr(child, name, new)
    return module


@torch.no_grad()
def normal_(param: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal numbers drawn on the CPU, so that one seed gives one model whatever the device; std 0 fills with zeros."""
    if std == 0.0:
        param.zero_()
        return
    param.copy_(torch.empty(param.shape).normal_(0.0, std, generator=generator))


@torch.no_grad()
def fill_(param: Tensor, value: float) -> None:
    """A constant, for gains and gates."""
    param.fill_(value)
