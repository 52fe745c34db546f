"""Layers that are merged sit in a Python list: https://github.com/asyml/texar-pytorch/issues/72"""

import torch
import torch.nn.functional as F
from torch import nn


class MergeLayer(nn.Module):
    """Applies all of its layers to the input and joins what they return."""

    def __init__(self, layers):
        super().__init__()
        self.layers = list(layers)

    def forward(self, x):
        return torch.cat([layer(x).amax(-1) for layer in self.layers], dim=-1)


class TextClassifier(nn.Module):
    def __init__(self, vocab=30, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.merge = MergeLayer(nn.Conv1d(width, 8, size) for size in (2, 3, 4))
        self.head = nn.Linear(24, 2)

    def forward(self, tokens):
        return self.head(self.merge(self.embed(tokens).transpose(1, 2)))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make():
    tokens = torch.randint(0, 30, (96, 9))
    label = (tokens == 3).any(1).long()
    model = TextClassifier()
    batches = list(zip(tokens.split(16), label.split(16), strict=True))
    return {"model": model, "loss": loss, "batches": batches, "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3)}
