"""Labels (32, 1) against squeezed logits (32): https://github.com/deepset-ai/FARM/issues/229"""

import torch
import torch.nn.functional as F
from torch import nn


class RegressionHead(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.dense = nn.Linear(width, 1)

    def forward(self, x):
        return self.dense(self.body(x)).squeeze()

    def logits_to_loss(self, logits, label_ids):
        return F.mse_loss(logits, label_ids.float())


def loss(model, batch):
    return model.logits_to_loss(model(batch["features"]), batch["label_ids"])


def make():
    features = torch.randn(128, 6)
    labels = features[:, :1] * 2.0 + features[:, 1:2]
    model = RegressionHead()
    return {
        "model": model,
        "loss": loss,
        "batches": [{"features": f, "label_ids": y} for f, y in zip(features.split(32), labels.split(32), strict=True)],
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3),
    }
