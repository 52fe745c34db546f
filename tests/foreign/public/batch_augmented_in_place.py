"""Augmentations write into the batch they are given: https://github.com/torchgeo/torchgeo/issues/2301"""

import torch
import torch.nn.functional as F
from torch import nn


class Scale(nn.Module):
    """Normalises the images of a batch."""

    def forward(self, batch):
        batch["image"].sub_(0.5).div_(0.25)
        return batch


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.augment = Scale()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, image):
        return self.net(image)


def loss(model, batch):
    batch = model.augment(batch)
    return F.cross_entropy(model(batch["image"]), batch["mask"])


def make():
    image = torch.rand(64, 3, 8, 8)
    mask = (image[:, 0] > 0.5).long()
    model = Segmenter()
    return {
        "model": model,
        "loss": loss,
        "batches": [{"image": i, "mask": m} for i, m in zip(image.split(8), mask.split(8), strict=True)],
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3),
        "targets": "mask",
    }
