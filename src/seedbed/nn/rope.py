"""Rotary position embedding at arbitrary positions. T time, H heads, D head width."""

import torch
from torch import Tensor

from seedbed.nn.norms import widen

Rope = tuple[Tensor, Tensor]


def rope_table(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype = torch.float32) -> Rope:
    """Cosines and sines for positions of shape (T) or (B, T), ready to broadcast over heads.

    Computed on the fly rather than kept: a buffer would need its own initialisation on the meta device.
    """
    assert head_dim % 2 == 0, f"rotary embedding needs an even head width, not {head_dim}"
    half = head_dim // 2
    powers = torch.arange(half, device=positions.device, dtype=dtype) / half
    angles = positions[..., None, None].to(dtype) * base**-powers
    return angles.cos(), angles.sin()


def apply_rope(x_BTHD: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (i, i + D/2) by its position's angle, in float32; lengths are kept, so scores see only distances."""
    cos, sin = rope
    left, right = widen(x_BTHD).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x_BTHD.dtype)
