"""Unfinished walks that later batches go on with: the context, and where its candidates have come to.

Shape suffixes: R entries, B rows of a batch, h rows taken up again, L tokens of a block, T time, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from seedbed.nn import dice
from seedbed.recipes.ebt.walk import REPLAY

# Places of walks that go on: far from those of any sample, so that their noise is their own.
ELSEWHERE = 1 << 60


class Taken(NamedTuple):
    """A batch with walks taken up again behind its own rows, and where those came from."""

    tokens_BL: Tensor
    z_BTV: Tensor
    place_BT: Tensor
    slot_h: Tensor
    known_h: Tensor


class Replay(nn.Module):
    """The buffer. Half a batch is taken from it and added, chosen by counter, each row from its own part of the buffer."""

    tokens_RL: Tensor
    z_RTV: Tensor
    known_R: Tensor

    def __init__(self, size: int, block: int, vocab: int, seed: int, write_back: bool) -> None:
        super().__init__()
        self.seed, self.write_back = seed, write_back
        self.register_buffer("tokens_RL", torch.zeros(size, block + 1, dtype=torch.int64))
        self.register_buffer("z_RTV", torch.zeros(size, block, vocab))
        self.register_buffer("known_R", torch.zeros(size, dtype=torch.bool))

    def take(self, tokens_BL: Tensor, z_BTV: Tensor, place_BT: Tensor, index_B: Tensor) -> Taken:
        """Add walks to a batch; while the buffer fills, some rows of the batch walk twice instead."""
        size, num = len(self.known_R), max(1, len(tokens_BL) // 2)
        edges = torch.arange(num + 1, device=index_B.device) * size // num
        drawn_h = dice.uniform(dice.keys(self.seed, index_B[:num], REPLAY), 1)[:, 0]
        # Parts of the buffer do not overlap, so no entry is written twice in one step.
        slot_h = edges[:-1] + (drawn_h * (edges[1:] - edges[:-1])).long()
        known_h = self.known_R[slot_h]
        tokens_hL = torch.where(known_h[:, None], self.tokens_RL[slot_h], tokens_BL[:num])
        z_hTV = torch.where(known_h[:, None, None], self.z_RTV[slot_h].to(z_BTV.dtype), z_BTV[:num])
        places = torch.cat((place_BT, place_BT[:num] + ELSEWHERE))
        return Taken(torch.cat((tokens_BL, tokens_hL)), torch.cat((z_BTV, z_hTV)), places, slot_h, known_h)

    @torch.no_grad()
    def put(self, taken: Taken, end_BTV: Tensor, index_B: Tensor) -> None:
        """Keep where the batch's own walks ended, the oldest entries making room, and where continued ones did."""
        num = len(index_B)
        if self.write_back:
            z_hTV = end_BTV[num:].to(self.z_RTV.dtype)
            self.z_RTV[taken.slot_h] = torch.where(taken.known_h[:, None, None], z_hTV, self.z_RTV[taken.slot_h])
        slot_B = index_B % len(self.known_R)
        self.tokens_RL[slot_B] = taken.tokens_BL[:num]
        self.z_RTV[slot_B] = end_BTV[:num].to(self.z_RTV.dtype)
        self.known_R.index_fill_(0, slot_B, True)  # [slot_B] = True would fetch its value from the host: no capture
