"""A GRU language model over characters that count up; the batch is one tensor, inputs and targets are slices of it."""

import torch
import torch.nn.functional as F
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self, vocab=24, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens))
        return self.head(self.drop(hidden))


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def sample(model, num=12):
    model.eval()
    tokens = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(num):
        shares = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(shares, 1)], dim=1)
    model.train()
    return tokens


def make(seed=0):
    torch.manual_seed(seed)
    starts, strides = torch.randint(0, 24, (96, 1)), torch.randint(1, 4, (96, 17))
    tokens = (starts + strides.cumsum(1)) % 24
    model = LanguageModel()
    return {
        "model": model,
        "loss": loss,
        "batches": list(tokens.split(16)),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3),
        "sample": sample,
        "causal": True,
    }
