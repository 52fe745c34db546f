"""A LightningModule with its loaders, schedule and validation step."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Spiral(lightning.LightningModule):
    def __init__(self, seed, width=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        rng = torch.Generator().manual_seed(seed)
        label = torch.randint(0, 2, (240,), generator=rng)
        turn = torch.rand(240, generator=rng) * 6
        angle = turn + torch.pi * label
        self.points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 3 + 0.05 * torch.randn(240, 2, generator=rng)
        self.labels = label

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.points[:192], self.labels[:192]), batch_size=24, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(self.points[192:], self.labels[192:]), batch_size=24)


def make(seed=0):
    torch.manual_seed(seed)
    return {"model": Spiral(seed)}
