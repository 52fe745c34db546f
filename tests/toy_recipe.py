"""A recipe small enough to train in a blink, with every kind of state: dropout, a buffer, and masked targets."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from seedbed import Config, Data, Engine, Every, Optim, Request, Sample, Schedule, Source, System, number


@dataclass(frozen=True)
class ModelConfig:
    width: int = number(16, low=1)
    dropout: float = number(0.0, low=0.0, high=0.9)


@dataclass(frozen=True)
class DataConfig:
    num: int = number(96, low=1)
    poison: int = number(-1, low=-1)  # the item whose numbers are not finite
    outlier: int = number(-1, low=-1)  # the first of the items that are far from all others


def toy() -> Config:
    """Seconds on one core; learns the sum of four numbers."""
    return Config(
        model=ModelConfig(),
        data=DataConfig(),
        optim=Optim(lr=1e-2),
        schedule=Schedule(kind="cosine", warmup=0.1),
        every=Every(log=1, eval=4, sample=0, save=4),
        steps=12,
        batch=8,
    )


class Sums(Source):
    def __init__(self, x: np.ndarray) -> None:
        self.num_items, self.arrays, self.spans = len(x), {"x": x}, {"x": 0}

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        x = raw["x"]
        return {"x": x[:, :4], "y": x[:, :4].sum(1), "keep": x[:, 4], "index": raw["index"]}


def open_data(config: Config) -> Data:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(config.data.num, 4)), rng.integers(0, 2, (config.data.num, 1))], axis=1)
    x = x.astype(np.float32)
    if config.data.poison >= 0:
        x[config.data.poison, 0] = np.nan
    if config.data.outlier >= 0:
        x[config.data.outlier :, :4] *= 100
    return Data(Sums(x), Sums(x[:16] * 0.5), {"name": "sums", "fingerprint": f"sums-{config.data.num}"})


class Toy(System):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, model.width), nn.Tanh(), nn.Dropout(model.dropout), nn.Linear(model.width, 1))
        self.register_buffer("num_calls", torch.zeros(()))

    def num_targets(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["keep"].sum()

    def loss(self, batch: dict[str, Tensor], engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        self.num_calls += 1
        error = (self.net(batch["x"]).float()[:, 0] - batch["y"]) ** 2 * batch["keep"]
        return error.sum() / batch["keep"].sum().clamp_min(1), {}

    def evaluate(self, source: Source, engine: Engine) -> dict[str, float]:
        x = torch.from_numpy(source.arrays["x"]).to(engine.device)
        torch.rand(3)
        return {"error": (self.net(x[:, :4])[:, 0] - x[:, :4].sum(1)).square().mean().item()}

    def sample(self, request: Request, engine: Engine) -> Sample:
        return Sample(text=f"{self.net(torch.ones(1, 4, device=engine.device)).item():.3f}")


def build(config: Config, data: Data) -> System:
    return Toy(config.model)
