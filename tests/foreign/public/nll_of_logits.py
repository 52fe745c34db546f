"""nll_loss of values that are no log-probabilities: https://github.com/yanx27/Pointnet_Pointnet2_pytorch/issues/30"""

import torch
import torch.nn.functional as F
from torch import nn


class PointNet(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.points = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, num_classes)

    def forward(self, points):
        return self.head(self.points(points).amax(1))


def loss(model, batch):
    return F.nll_loss(model(batch["points"]), batch["label"])


def make():
    label = torch.randint(0, 3, (96,))
    points = torch.randn(96, 16, 2) * (1.0 + label[:, None, None])
    model = PointNet()
    return {
        "model": model,
        "loss": loss,
        "batches": [{"points": points[i : i + 16], "label": label[i : i + 16]} for i in range(0, 96, 16)],
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3),
    }
