"""Position encodings: learned or sinusoidal vectors, at 0, 1, 2... or at positions drawn for every batch.

Shape suffixes: B batch, L positions, F frequencies, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from seedbed.errors import UserError
from seedbed.nn import rng
from seedbed.nn.init import declare, normal_
from seedbed.recipes.thinker.batch_settings import POSITIONS, BatchSettings
from seedbed.recipes.thinker.presets import ModelConfig

LONGEST_WAVE = 10_000.0
# A random scale lies between one over this and this.
MAX_SCALE = 2.0
# For positions counted from both ends: with 16 wavelengths per end, every second is twice as long.
LONGEST_OF_ENDS = 256.0


def sinusoids(position_L: Tensor, width: int, longest: float = LONGEST_WAVE) -> Tensor:
    """Sines and cosines of positions at width / 2 wavelengths, from 2 pi up to `longest` times as long."""
    rate_F = torch.exp(torch.arange(width // 2, device=position_L.device) * (-2.0 * math.log(longest) / width))
    angle_LF = position_L[..., None].to(torch.float32) * rate_F
    return torch.cat((angle_LF.sin(), angle_LF.cos()), -1)


class PositionEncoding(nn.Module):
    """A vector for every position, shared by input and output sequences."""

    def __init__(self, config: ModelConfig, num_needed: int) -> None:
        super().__init__()
        shape = config.positions
        self.kind, self.width, self.max = shape.kind, config.width, shape.max
        if shape.kind in ("learned", "random_sorted") and shape.max and shape.max < num_needed:
            raise UserError(f"model.positions.max={shape.max} is below the {num_needed} positions that the task needs")
        size = shape.max or num_needed
        self.table = declare(nn.Parameter(torch.empty(size, config.width)), "embed") if shape.kind == "learned" else None

    def init_weights(self, generator: torch.Generator) -> None:
        if self.table is not None:
            normal_(self.table, 1.0, generator)

    def forward(self, num_in: int, num_out: int, index_B: Tensor, setting: BatchSettings) -> tuple[Tensor, Tensor]:
        """Vectors of input and output positions: the same for all samples (L, D), or drawn for each (B, L, D)."""
        num = max(num_in, num_out)
        if self.table is None:
            both_LD = sinusoids(self.drawn(num, index_B, setting), self.width)
        elif num > len(self.table):
            raise UserError(f"{num} positions, {len(self.table)} learned; longer inputs need model.positions.kind=sin")
        else:
            both_LD = self.table
        return both_LD[..., :num_in, :], both_LD[..., :num_out, :]

    def from_ends(self, is_in_BN: Tensor, is_out_BM: Tensor, index_B: Tensor, setting: BatchSettings) -> tuple[Tensor, Tensor]:
        """Vectors of input and output positions of each sample (B, L, D): halves count from the first and from the last token."""
        counts = self.counted(is_in_BN, is_out_BM, index_B, setting)
        found = [sinusoids(count_BL2, self.width // 2, LONGEST_OF_ENDS).flatten(-2) for count_BL2 in counts]
        return found[0], found[1]

    def counted(self, is_in_BN: Tensor, is_out_BM: Tensor, index_B: Tensor, setting: BatchSettings) -> list[Tensor]:
        """The distance of each token from the first and from the last one (B, L, 2), for inputs and outputs.

        Strides are drawn so that the longer sequence ends between its own length and `max`: training then covers the positions,
        distances and sums that longer samples need. A match of two counts holds at every length.
        """
        most_B1 = torch.maximum(is_in_BN.sum(-1), is_out_BM.sum(-1)).clamp_min(1)[:, None]
        u_B2 = rng.uniform(rng.keys(setting.seed, index_B, POSITIONS + setting.stream), 2)
        stride_B1 = (self.max / most_B1).clamp_min(1.0) ** u_B2[:, :1]
        first_B1 = (self.max - most_B1 * stride_B1).clamp_min(0.0) * u_B2[:, 1:] * (self.kind == "ends_shifted")
        found = []
        for is_used_BL in (is_in_BN, is_out_BM):
            ahead_BL = torch.arange(1, is_used_BL.shape[-1] + 1, device=index_B.device).expand(is_used_BL.shape)
            back_BL = is_used_BL.sum(-1, keepdim=True) + 1 - ahead_BL
            found.append(first_B1[..., None] + stride_B1[..., None] * torch.stack((ahead_BL, back_BL), -1))
        return found

    def drawn(self, num: int, index_B: Tensor, setting: BatchSettings) -> Tensor:
        """The positions, increasing. Random ones follow from the sample's counter, and a training batch shares them."""
        count_L = torch.arange(num, device=index_B.device)
        if self.kind == "sin":
            return count_L
        key_B = rng.keys(setting.seed, index_B // setting.group, POSITIONS + setting.stream)
        if self.kind == "random_affine":
            u_B2 = rng.uniform(key_B, 2)
            return count_L * MAX_SCALE ** (2.0 * u_B2[..., :1] - 1.0) + u_B2[..., 1:] * self.max
        if num > self.max:
            raise UserError(f"{num} positions cannot be drawn from model.positions.max={self.max}; raise it")
        # The positions with the smallest random numbers: a draw without replacement.
        return rng.bits(key_B, self.max).argsort(-1)[..., :num].sort(-1).values
