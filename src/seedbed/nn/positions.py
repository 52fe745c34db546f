"""Positional encodings, and rotary angles at arbitrary positions. B batch, T time, H heads, C width, D head width.

A new encoding is a class like those here, a line of `ENCODINGS`, and its name in the config of the model that uses it.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from seedbed.nn.init import normal_
from seedbed.nn.layers import widen

Rope = tuple[Tensor, Tensor]


class Sizes(NamedTuple):
    """The longest context, the widths of the stream and of a head, and the base of rotary angles."""

    length: int
    width: int
    head_dim: int
    rope_base: float


class NoPositions:
    """A causal model without an encoding: it can only count the tokens that it sees."""

    # How positions act on predictions; None where they do not.
    effect: Literal["absolute", "relative"] | None = None

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        """Fill the parameters, if there are any."""

    def vectors(self, positions: Tensor) -> Tensor | None:
        """What is added to the embeddings of tokens: (T, C) or (B, T, C)."""
        return None

    def rope(self, positions: Tensor) -> Rope | None:
        """By what attention turns queries and keys."""
        return None


class RotaryPositions(NoPositions):
    """Queries and keys turned by angles that grow with the position: scores depend on distances."""

    effect = "relative"

    def rope(self, positions: Tensor) -> Rope:
        return rope_table(positions, self.sizes.head_dim, self.sizes.rope_base)


class LearnedPositions(nn.Embedding):
    """A learned vector per position."""

    effect: Literal["absolute", "relative"] | None = "absolute"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.length, sizes.width)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        normal_(self.weight, std, generator)

    def vectors(self, positions: Tensor) -> Tensor:
        return self(positions)

    def rope(self, positions: Tensor) -> None:
        return None


PositionalEncoding = NoPositions | LearnedPositions
ENCODINGS: dict[str, type[PositionalEncoding]] = {"rope": RotaryPositions, "learned": LearnedPositions, "none": NoPositions}


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
    """Rotate each pair (i, i + D/2) by its position's angle, in float32: scores depend only on relative positions."""
    cos, sin = rope
    left, right = widen(x_BTHD).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x_BTHD.dtype)
