"""A recipe with two optimizers: a generator, a critic with a gradient penalty (double backward), and masked targets."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_recipe import Sums, open_data

from seedbed import Config, Data, Engine, Every, Optim, Schedule, Source, System, number

__all__ = ["build", "open_data", "rivals"]


@dataclass(frozen=True)
class ModelConfig:
    width: int = number(16, low=1)


@dataclass(frozen=True)
class DataConfig:
    num: int = number(96, low=1)
    poison: int = number(-1, low=-1)
    outlier: int = number(-1, low=-1)


def rivals() -> Config:
    """Seconds on one core; a GAN on rows of four numbers."""
    return Config(
        model=ModelConfig(),
        data=DataConfig(),
        optim=Optim(lr=1e-3),
        schedule=Schedule(kind="constant"),
        every=Every(log=1, eval=4, sample=0, save=4),
        steps=12,
        batch=8,
    )


class Rivals(System):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def named_optimizers(self) -> dict[str, nn.Module]:
        return {"main": self.made, "critic": self.critic}

    def num_targets(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["keep"].sum()

    def update(self, batch: dict[str, Tensor], engine: Engine) -> dict[str, Tensor]:
        keep_B, x_BN = batch["keep"], batch["x"].clone().requires_grad_()
        num = keep_B.sum().clamp_min(1)
        fake_BN = self.made(batch["x"].flip(1))
        real_B, fake_B = self.critic(x_BN)[:, 0], self.critic(fake_BN.detach())[:, 0]
        (slope_BN,) = torch.autograd.grad((real_B * keep_B).sum(), x_BN, create_graph=True)
        penalty = (slope_BN.square().sum(1) * keep_B).sum() / num
        engine.minimize((F.softplus(fake_B - real_B) * keep_B).sum() / num + penalty, "critic")
        loss = (F.softplus(-self.critic(fake_BN)[:, 0]) * keep_B).sum() / num
        engine.minimize(loss)
        return {"loss": loss.detach(), "penalty": penalty.detach()}

    def evaluate(self, source: Source, engine: Engine) -> dict[str, float]:
        assert isinstance(source, Sums)
        return {"error": self.critic(torch.from_numpy(source.arrays["x"])[:, :4]).square().mean().item()}


def build(config: Config, data: Data) -> System:
    return Rivals(config.model.width)
