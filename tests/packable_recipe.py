"""A recipe small enough to pack in a blink: a padded axis, a buffer, settings as tensors, and several groups of the optimizer.

Shape suffixes: B items, X inputs, D width, K prototypes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from seedbed import Config, Data, Engine, Every, Optim, Request, Sample, Schedule, Source, System, number
from seedbed.nn import rng
from seedbed.nn.init import declare

NUM_INPUTS, NUM_VALID = 4, 32


@dataclass(frozen=True)
class ModelConfig:
    width: int = number(8, low=1)
    prototypes: int = number(3, low=1)  # replicas of a pack may differ in it: the smaller ones are padded
    noise: float = number(0.0, low=0.0)


@dataclass(frozen=True)
class DataConfig:
    poison: int = number(-1, low=-1)  # the item whose numbers are not finite


def packable() -> Config:
    """Seconds on one core; learns the sum of four numbers by a soft choice among prototypes."""
    return Config(
        model=ModelConfig(),
        data=DataConfig(),
        optim=Optim(lr=1e-2, weight_decay=0.2, clip=0.3),
        schedule=Schedule(kind="cosine", warmup=0.1),
        every=Every(log=1, eval=6, sample=0, save=6),
        steps=24,
        batch=8,
        ema=0.9,
    )


class Sums(Source):
    def __init__(self, seed: int, poison: int) -> None:
        self.seed, self.poison = seed, poison

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        return make(raw["index"], self.seed, self.poison)


def make(index_B: Tensor, seed: Tensor | int, poison: Tensor | int) -> dict[str, Tensor]:
    """Items from their counters alone."""
    x_BX = rng.normal(rng.keys(seed, index_B, 1), NUM_INPUTS)
    x_BX = torch.where((index_B == poison)[:, None], float("nan"), x_BX)
    return {"x": x_BX, "y": x_BX.sum(-1), "index": index_B}


def open_data(config: Config) -> Data:
    return Data(Sums(config.seed, config.data.poison), Sums(7, -1), {"name": "sums", "fingerprint": "sums"})


class Packable(System):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, model = config, config.model
        self.inner = nn.Linear(NUM_INPUTS, model.width)
        self.choose_DK = declare(nn.Parameter(torch.randn(model.width, model.prototypes)), "matrix", lr_scale=0.7)
        self.value_K = nn.Parameter(torch.randn(model.prototypes))
        self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("table", torch.linspace(0.9, 1.1, NUM_INPUTS), persistent=False)

    def objective(self, batch: dict[str, Tensor], settings: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Loss, measurements and the new level; prototypes that a run does not have are never chosen."""
        dtype = self.value_K.dtype
        draws_BX = rng.normal(rng.keys(settings["seed"], batch["index"], 2), NUM_INPUTS).to(dtype)
        x_BX = batch["x"].to(dtype) * self.table.to(dtype) + settings["noise"].to(dtype) * draws_BX
        scores_BK = torch.tanh(self.inner(x_BX)) @ self.choose_DK
        scores_BK = scores_BK.masked_fill(settings["on_K"] == 0, -torch.inf)
        error_B = (scores_BK.softmax(-1) @ self.value_K + self.fixed - batch["y"].to(dtype)) ** 2
        loss = error_B.mean()
        return loss, {"worst": error_B.detach().amax()}, 0.9 * self.level + 0.1 * loss.detach()

    def loss(self, batch: dict[str, Tensor], engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        loss, measured, level = self.objective(batch, self.settings_tensors())
        self.level.copy_(level)
        return loss, measured

    def evaluate(self, source: Source, engine: Engine) -> dict[str, float]:
        index_B = torch.arange(NUM_VALID, device=engine.device)
        return {"error": self.objective(source.batch({"index": index_B}), self.settings_tensors())[0].item()}

    def sample(self, request: Request, engine: Engine) -> Sample:
        return Sample(text=f"{self.value_K.sum().item():.3f}")

    def packable_keys(self) -> frozenset[str]:
        return frozenset({"model.prototypes", "model.noise", "data.poison"})

    def padded_config(self, configs: Sequence[Config]) -> Config:
        most = max(config.model.prototypes for config in configs)
        return replace(configs[0], model=replace(configs[0].model, prototypes=most))

    def settings_tensors(self) -> dict[str, Tensor]:
        config, device = self.config, self.value_K.device
        numbers = {"seed": config.seed, "poison": config.data.poison, "noise": config.model.noise}
        settings = {name: torch.tensor(value, device=device) for name, value in numbers.items()}
        return settings | {"on_K": torch.ones(config.model.prototypes, dtype=torch.int64, device=device)}

    def packed_loss(self, index_B: Tensor, settings: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        loss, measured, level = self.objective(make(index_B, settings["seed"], settings["poison"]), settings)
        return loss, measured, {"level": level}


def build(config: Config, data: Data) -> System:
    return Packable(config)
