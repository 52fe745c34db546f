"""Regression of one number with a warm-up and a cosine schedule, called per step."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Regressor(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(-1)


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def schedule(optimizer, warm_up, total):
    def factor(step):
        if step < warm_up:
            return step / warm_up
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (total - warm_up))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make(seed=0):
    torch.manual_seed(seed)
    x = torch.randn(256, 6)
    y = x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2]) + 0.1 * torch.randn(256)
    model = Regressor()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=3e-3)

    def evaluate(model):
        with torch.no_grad():
            return {"rmse": math.sqrt(F.mse_loss(model(x[:64]), y[:64]).item())}

    return {
        "model": model,
        "loss": loss,
        "batches": [{"x": x[i : i + 32], "y": y[i : i + 32]} for i in range(0, 256, 32)],
        "optimizer": optimizer,
        "scheduler": schedule(optimizer, 50, 1000),
        "evaluate": evaluate,
        "targets": "y",
    }
