"""Where tokens stand: learned or sinusoidal vectors, at 0, 1, 2... or at places drawn anew for every batch.

Shape suffixes: B batch, L positions, F frequencies, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from seedbed.errors import UserError
from seedbed.nn import dice
from seedbed.nn.groups import declare
from seedbed.nn.init import normal_
from seedbed.recipes.thinker.draws import PLACES, Setting
from seedbed.recipes.thinker.presets import ModelConfig

LONGEST_WAVE = 10_000.0
# A random scale lies between one over this and this.
MAX_SCALE = 2.0
# Of places counted from both ends: with 16 wavelengths to an end, every second is twice as long.
LONGEST_OF_ENDS = 256.0


def sinusoids(places_L: Tensor, width: int, longest: float = LONGEST_WAVE) -> Tensor:
    """Sines and cosines of places at width / 2 wavelengths, from 2 pi up to `longest` times as long."""
    rate_F = torch.exp(torch.arange(width // 2, device=places_L.device) * (-2.0 * math.log(longest) / width))
    angle_LF = places_L[..., None].to(torch.float32) * rate_F
    return torch.cat((angle_LF.sin(), angle_LF.cos()), -1)


class Places(nn.Module):
    """A vector for every position. Inputs and outputs share them, so that a place means the same on both tapes."""

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

    def forward(self, num_in: int, num_out: int, index_B: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
        """Vectors of both tapes: the same for all samples (L, D), or drawn for each (B, L, D)."""
        num = max(num_in, num_out)
        if self.table is None:
            both_LD = sinusoids(self.drawn(num, index_B, setting), self.width)
        elif num > len(self.table):
            raise UserError(f"{num} positions asked, {len(self.table)} learned; longer inputs need model.positions.kind=sin")
        else:
            both_LD = self.table
        return both_LD[..., :num_in, :], both_LD[..., :num_out, :]

    def from_ends(self, is_in_BN: Tensor, is_out_BM: Tensor, index_B: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
        """Vectors of both tapes, for each sample (B, L, D): half of each counts from the first token, half from the last."""
        tapes = self.counted(is_in_BN, is_out_BM, index_B, setting)
        found = [sinusoids(count_BL2, self.width // 2, LONGEST_OF_ENDS).flatten(-2) for count_BL2 in tapes]
        return found[0], found[1]

    def counted(self, is_in_BN: Tensor, is_out_BM: Tensor, index_B: Tensor, setting: Setting) -> list[Tensor]:
        """How far each token of both tapes is from the first and from the last one (B, L, 2).

        Strides are drawn so that the longer tape ends between its own length and `max`: what training shows of places, of
        distances and of their sums is then what longer samples need. A match of two counts holds at every length.
        """
        most_B1 = torch.maximum(is_in_BN.sum(-1), is_out_BM.sum(-1)).clamp_min(1)[:, None]
        u_B2 = dice.uniform(dice.keys(setting.seed, index_B, PLACES + setting.stream), 2)
        stride_B1 = (self.max / most_B1).clamp_min(1.0) ** u_B2[:, :1]
        first_B1 = (self.max - most_B1 * stride_B1).clamp_min(0.0) * u_B2[:, 1:] * (self.kind == "ends_shifted")
        found = []
        for is_used_BL in (is_in_BN, is_out_BM):
            ahead_BL = torch.arange(1, is_used_BL.shape[-1] + 1, device=index_B.device).expand(is_used_BL.shape)
            back_BL = is_used_BL.sum(-1, keepdim=True) + 1 - ahead_BL
            found.append(first_B1[..., None] + stride_B1[..., None] * torch.stack((ahead_BL, back_BL), -1))
        return found

    def drawn(self, num: int, index_B: Tensor, setting: Setting) -> Tensor:
        """Where the positions are, rising. Random ones follow from the sample's counter, and a training batch shares them."""
        count_L = torch.arange(num, device=index_B.device)
        if self.kind == "sin":
            return count_L
        key_B = dice.keys(setting.seed, index_B // setting.group, PLACES + setting.stream)
        if self.kind == "random_affine":
            u_B2 = dice.uniform(key_B, 2)
            return count_L * MAX_SCALE ** (2.0 * u_B2[..., :1] - 1.0) + u_B2[..., 1:] * self.max
        if num > self.max:
            raise UserError(f"{num} positions cannot be drawn from model.positions.max={self.max}; raise it")
        # The places with the smallest random numbers: a draw without replacement.
        return dice.bits(key_B, self.max).argsort(-1)[..., :num].sort(-1).values
