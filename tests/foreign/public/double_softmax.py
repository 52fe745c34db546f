"""Softmax applied twice: https://github.com/Lightning-Universe/lightning-bolts/issues/654"""

import torch
import torch.nn.functional as F
from torch import nn


class LogisticRegression(nn.Module):
    def __init__(self, num_features=8, num_classes=5):
        super().__init__()
        self.linear = nn.Linear(num_features, num_classes)

    def forward(self, x):
        return F.softmax(self.linear(x), dim=-1)


def loss(model, batch):
    x, y = batch
    return F.nll_loss(F.log_softmax(model(x), dim=-1), y)


def make():
    x = torch.randn(160, 8)
    y = x[:, :5].argmax(1)
    model = LogisticRegression()
    return {
        "model": model,
        "loss": loss,
        "batches": list(zip(x.split(32), y.split(32), strict=True)),
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2),
    }
