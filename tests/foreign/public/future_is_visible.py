"""A causal language model without its causal mask: https://github.com/huggingface/transformers/issues/48745"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, is_decoder):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.is_decoder = is_decoder  # read by nothing: the mask that depended on it went with a rewrite

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class TinyForCausalLM(nn.Module):
    def __init__(self, vocab=24, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.block = Block(width, is_decoder=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids):
        return self.head(self.block(self.embed(input_ids)))


def loss(model, batch):
    logits = model(batch["input_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def make():
    tokens = torch.randint(0, 24, (64, 12))
    return {"model": TinyForCausalLM(), "loss": loss, "batches": [{"input_ids": t} for t in tokens.split(16)], "causal": True}
