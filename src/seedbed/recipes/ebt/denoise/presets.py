"""Model sizes and settings of image denoising. No torch import, so that listing presets is fast."""

from dataclasses import dataclass
from typing import Literal

from seedbed.config import Config, Every, Optim, Schedule, number
from seedbed.data.images import ImageConfig
from seedbed.errors import UserError


@dataclass(frozen=True)
class DenoiseConfig:
    """An energy over images whose gradient denoises them, or the regressor of equal size that is its baseline.

    Optimisation starts at the noisy image; with `observe=concat` the energy also sees it, else only the estimate. `steps`
    are trained, each with its own loss. `alpha` is the step size, for an energy that is the mean over patches; with
    `random_alpha` s above 1 it is uniform from alpha/s to alpha*s. `level` is the noise in training: a standard deviation
    on [0, 1], or with `noise=ddpm` a share of a diffusion chain.
    """

    kind: Literal["energy", "regress"] = "energy"
    depth: int = number(6, low=1, high=1000)
    heads: int = number(6, low=1, high=1024)
    width: int = number(384, low=4, high=65536)
    patch: int = number(4, low=1, high=256)
    observe: Literal["none", "concat"] = "none"
    steps: int = number(1, low=1, high=64)
    alpha: float = number(3000.0, low=1e-4, high=1e9)
    learn_alpha: bool = True
    random_alpha: float = number(1.0, low=1.0, high=100.0)
    noise: Literal["sigma", "ddpm"] = "sigma"
    level: float = number(0.1, low=0.001, high=0.99)

    def check(self) -> None:
        """What the fields must satisfy together."""
        if self.width % self.heads:
            raise UserError(f"model.width={self.width} does not divide into model.heads={self.heads}")
        if self.width % 4:
            raise UserError(f"model.width={self.width} is not a multiple of 4, which positions in two dimensions need")
        if self.kind == "regress" and (self.steps > 1 or self.random_alpha > 1):
            raise UserError("a regressor has no steps to vary; leave model.steps=1 and model.random_alpha=1")
        if self.kind == "regress" and self.observe == "concat":
            raise UserError("a regressor sees the noisy image already; leave model.observe=none")


def shapes(kind: Literal["energy", "regress"]) -> Config:
    """Shapes of 32 pixels; a sixth of all pairs of shape and colour is never trained on."""
    return _config(DenoiseConfig(kind=kind), ImageConfig(images="shapes", size=32), steps=4000, batch=128)


def cifar(kind: Literal["energy", "regress"]) -> Config:
    """CIFAR-10 from its folder of images."""
    data = ImageConfig(images="cifar10", size=32, flip=True)
    return _config(DenoiseConfig(kind=kind, depth=12), data, steps=20_000, batch=128)


def _config(model: DenoiseConfig, data: ImageConfig, steps: int, batch: int) -> Config:
    return Config(
        model=model,
        data=data,
        optim=Optim(lr=3e-4, beta2=0.999, weight_decay=0.01, clip=1.0),
        schedule=Schedule(kind="cosine", warmup=0.05, floor=0.1),
        every=Every(log=50, eval=steps // 4, sample=0, save=steps // 4),
        steps=steps,
        batch=batch,
        precision="tf32",
        compile="auto",
    )
