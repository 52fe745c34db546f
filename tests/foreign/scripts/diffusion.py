"""Denoising diffusion of points on a ring: the network predicts the noise at a random level."""

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU())
        self.enter = nn.Linear(2, width)
        self.middle = nn.Linear(width, width)
        self.leave = nn.Linear(width, 2)

    def forward(self, x, t):
        h = nn.functional.silu(self.enter(x) + self.time(t[:, None].float() / 100))
        return self.leave(nn.functional.silu(self.middle(h)))


def signal(t):
    return torch.cos(t.double() / 100 * torch.pi / 2).square()[:, None]


def loss(model, batch):
    (x,) = batch
    t = torch.randint(1, 100, (len(x),))
    noise = torch.randn_like(x)
    a = signal(t).to(x.dtype)
    noisy = a.sqrt() * x + (1 - a).sqrt() * noise
    return (model(noisy, t) - noise).square().mean()


@torch.no_grad()
def sample(model):
    x = torch.randn(8, 2)
    for step in range(99, 0, -9):
        t = torch.full((8,), step)
        a, b = signal(t).float(), signal(t - 9).float()
        noise = model(x, t)
        x = b.sqrt() * (x - (1 - a).sqrt() * noise) / a.sqrt() + (1 - b).sqrt() * noise
    return x


def make(seed=0):
    torch.manual_seed(seed)
    angle = torch.rand(256) * 2 * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(256, 2)
    model = Denoiser()
    return {
        "model": model,
        "loss": loss,
        "batches": ((part,) for part in points.split(64)),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=2e-3),
        "sample": sample,
    }
