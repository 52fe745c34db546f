"""The generator's step of a small GAN: the discriminator is frozen in it."""

import torch
import torch.nn.functional as F
from torch import nn


class Generator(nn.Module):
    def __init__(self, latent=6, width=32, size=12):
        super().__init__()
        self.up = nn.Linear(latent, width)
        self.out = nn.Linear(width, size)

    def forward(self, z):
        return torch.tanh(self.out(F.leaky_relu(self.up(z), 0.2)))


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = Generator()
        self.discriminator = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.discriminator.requires_grad_(False)


def loss(model, batch):
    fake = model.generator(batch["z"])
    score = model.discriminator(fake)
    return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))


def make(seed=0):
    torch.manual_seed(seed)
    model = GAN()
    noise = torch.randn(192, 6)
    return {
        "model": model,
        "loss": loss,
        "batches": [{"z": part} for part in noise.split(32)],
        "optimizer": torch.optim.Adam(model.generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
    }
