"""The replay buffer: contexts with partly optimised predictions, which later batches optimise further.

Shape suffixes: R entries, B rows of a batch, h rows from the buffer, L tokens of a block, T time, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from seedbed.nn import rng
from seedbed.recipes.ebt.optimize import REPLAY

# Added to the counters of replayed rows, so that their noise differs from that of any sample.
REPLAY_OFFSET = 1 << 60


class ReplayBatch(NamedTuple):
    """A batch with replayed rows after its own, and the buffer entries that those came from."""

    tokens_BL: Tensor
    z_BTV: Tensor
    counter_BT: Tensor
    slot_h: Tensor
    known_h: Tensor


class ReplayBuffer(nn.Module):
    """Adds half a batch from the buffer to each batch, chosen by counter, each row from its own part of the buffer."""

    tokens_RL: Tensor
    z_RTV: Tensor
    known_R: Tensor

    def __init__(self, size: int, block: int, vocab: int, seed: int, write_back: bool) -> None:
        super().__init__()
        self.seed, self.write_back = seed, write_back
        self.register_buffer("tokens_RL", torch.zeros(size, block + 1, dtype=torch.int64))
        self.register_buffer("z_RTV", torch.zeros(size, block, vocab))
        self.register_buffer("known_R", torch.zeros(size, dtype=torch.bool))

    def sample(self, tokens_BL: Tensor, z_BTV: Tensor, counter_BT: Tensor, index_B: Tensor) -> ReplayBatch:
        """A batch with replayed rows; while the buffer fills, some rows of the batch are repeated instead."""
        size, num = len(self.known_R), max(1, len(tokens_BL) // 2)
        edges = torch.arange(num + 1, device=index_B.device) * size // num
        drawn_h = rng.uniform(rng.keys(self.seed, index_B[:num], REPLAY), 1)[:, 0]
        # Parts of the buffer do not overlap, so no entry is written twice in one step.
        slot_h = edges[:-1] + (drawn_h * (edges[1:] - edges[:-1])).long()
        known_h = self.known_R[slot_h]
        tokens_hL = torch.where(known_h[:, None], self.tokens_RL[slot_h], tokens_BL[:num])
        z_hTV = torch.where(known_h[:, None, None], self.z_RTV[slot_h].to(z_BTV.dtype), z_BTV[:num])
        counters = torch.cat((counter_BT, counter_BT[:num] + REPLAY_OFFSET))
        return ReplayBatch(torch.cat((tokens_BL, tokens_hL)), torch.cat((z_BTV, z_hTV)), counters, slot_h, known_h)

    @torch.no_grad()
    def store(self, batch: ReplayBatch, end_BTV: Tensor, index_B: Tensor) -> None:
        """Store the final predictions of the batch's own rows over the oldest entries, and update the replayed ones."""
        num = len(index_B)
        if self.write_back:
            z_hTV = end_BTV[num:].to(self.z_RTV.dtype)
            self.z_RTV[batch.slot_h] = torch.where(batch.known_h[:, None, None], z_hTV, self.z_RTV[batch.slot_h])
        slot_B = index_B % len(self.known_R)
        self.tokens_RL[slot_B] = batch.tokens_BL[:num]
        self.z_RTV[slot_B] = end_BTV[:num].to(self.z_RTV.dtype)
        self.known_R.index_fill_(0, slot_B, True)  # [slot_B] = True would fetch its value from the host: no capture
