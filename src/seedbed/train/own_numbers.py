"""Measurements that a recipe gives as Python numbers."""

from typing import Any

import torch
from torch import Tensor

from seedbed.errors import UserError


def as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    if not isinstance(value, int | float):
        raise UserError(f"the metric `{name}` is of type {type(value).__name__}; return a number, or a tensor of one element")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # The graph would repeat the number of this step in all others.
        raise UserError(f"the metric `{name}` is a Python number, which a captured step cannot measure; set capture=off")
    return torch.full((), float(value), device=device)
