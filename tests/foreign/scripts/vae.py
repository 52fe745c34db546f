"""A variational autoencoder on binary pictures; its loader also gives labels, which it does not use."""

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self, size=36, width=48, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, width), nn.Tanh())
        self.mean, self.log_var = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.Tanh(), nn.Linear(width, size))

    def forward(self, x):
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def loss(model, batch):
    pictures, _ = batch
    x = pictures.flatten(1)
    logits, mean, log_var = model(x)
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum() / len(x)
    return reconstruction + divergence


@torch.no_grad()
def sample(model):
    return model.decoder(torch.randn(4, 4)).sigmoid()


def make(seed=0):
    torch.manual_seed(seed)
    labels = torch.randint(0, 6, (128,))
    pictures = torch.zeros(128, 6, 6)
    pictures[torch.arange(128), labels] = 1.0
    pictures = torch.where(torch.rand(128, 6, 6) < 0.05, 1.0 - pictures, pictures)
    model = VAE()
    return {
        "model": model,
        "loss": loss,
        "batches": lambda: zip(pictures.split(32), labels.split(32), strict=True),
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3),
        "sample": sample,
    }
