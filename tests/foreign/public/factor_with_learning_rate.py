"""LambdaLR multiplies the learning rate by itself: https://github.com/lhoyer/MIC/issues/60"""

import torch
import torch.nn.functional as F
from torch import nn

LR, GAMMA, DECAY = 0.01, 0.001, 0.75


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def make():
    x = torch.randn(128, 10)
    y = x[:, :3].argmax(1)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: LR * (1.0 + GAMMA * step) ** (-DECAY))
    batches = list(zip(x.split(16), y.split(16), strict=True))
    return {"model": model, "loss": loss, "batches": batches, "optimizer": optimizer, "scheduler": scheduler}
