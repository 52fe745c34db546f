"""Fused attention drops values in evaluation mode too: https://github.com/karpathy/nanoGPT/pull/240"""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width=32, num_heads=4, dropout=0.2):
        super().__init__()
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.num_heads, self.dropout = num_heads, dropout

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.joined(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, vocab=20, width=32):
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(vocab, width), Attention(width), nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(x))


def loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make():
    tokens = (torch.randint(0, 20, (64, 1)) + torch.arange(13)) % 20
    return {"model": Model(), "loss": loss, "batches": tokens.split(16), "causal": True}
