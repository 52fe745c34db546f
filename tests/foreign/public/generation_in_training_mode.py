"""Text is generated with dropout on: https://github.com/pytorch/examples/pull/114"""

import torch
import torch.nn.functional as F
from torch import nn


class WordModel(nn.Module):
    def __init__(self, vocab=20, width=32):
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.encoder = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, words):
        hidden, _ = self.rnn(self.drop(self.encoder(words)))
        return self.decoder(self.drop(hidden))


def loss(model, words):
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def generate(model):
    words = torch.randint(0, 20, (1, 1))
    with torch.no_grad():
        for _ in range(10):
            weights = model(words)[:, -1].exp()
            words = torch.cat([words, torch.multinomial(weights, 1)], dim=1)
    return words


def make():
    words = (torch.randint(0, 20, (64, 1)) + 3 * torch.arange(13)) % 20
    return {"model": WordModel(), "loss": loss, "batches": words.split(16), "sample": generate, "causal": True}
