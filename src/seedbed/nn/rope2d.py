"""Positions in two dimensions: axial rotary angles and fixed sine-cosine features. N patches, D head width, C width.

The rotary table has the form of `nn.positions.rope_table`, so that the same code turns queries and keys by it.
"""

import torch
from torch import Tensor

from seedbed.nn.layers import Rope, rope_table

SINCOS_PERIOD = 10_000.0


def raster(rows: int, columns: int, device: torch.device) -> Tensor:
    """(N, 2): row and column of every patch, in the order of `patchify`."""
    at = torch.arange(rows * columns, device=device)
    return torch.stack((at // columns, at % columns), dim=1)


def axial_table(places_N2: Tensor, head_dim: int, base: float) -> Rope:
    """Cosines and sines of shape (N, 1, D/2): the first half of the angles follows the row, the second the column."""
    assert head_dim % 4 == 0, f"two axes of pairs need a head width that is a multiple of 4, not {head_dim}"
    parts = [rope_table(place_N, head_dim // 2, base) for place_N in places_N2.unbind(1)]
    cos, sin = (torch.cat(pair, dim=-1) for pair in zip(*parts, strict=True))
    return cos, sin


def with_unrotated(rope: Rope, num: int) -> Rope:
    """The table with `num` further tokens that have no position and are not rotated."""
    cos, sin = rope
    shape = (num, *cos.shape[1:])
    return torch.cat((cos, cos.new_ones(shape))), torch.cat((sin, sin.new_zeros(shape)))


def sincos_table(places_N2: Tensor, width: int) -> Tensor:
    """(N, C) fixed features: sines and cosines of the row, then of the column."""
    assert width % 4 == 0, f"sines and cosines of two axes need a width that is a multiple of 4, not {width}"
    quarter = width // 4
    rates = SINCOS_PERIOD ** (-torch.arange(quarter, device=places_N2.device, dtype=torch.float32) / quarter)
    angles = [place_N[:, None].float() * rates for place_N in places_N2.unbind(1)]
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1)
