"""Your own recipe in one file, flow matching in 2-D: `seedbed train examples/my_recipe.py steps=200` grows a seedling."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from seedbed import Config, Data, Engine, Every, Optim, Probe, Request, Sample, Schedule, Source, System, number, option


@dataclass(frozen=True)
class ModelConfig:
    width: int = number(128, low=1)  # on the command line: model.width=256
    num_layers: int = number(4, low=1)


@dataclass(frozen=True)
class DataConfig:
    num_points: int = number(20_000, low=100)


def seedling() -> Config:
    """`seedbed train examples/my_recipe.py`: seconds on one core; two leaves, a stem and the soil are told apart."""
    return Config(
        model=ModelConfig(),
        data=DataConfig(),
        optim=Optim(lr=5e-3, weight_decay=0.0),
        schedule=Schedule(kind="linear", decay=0.7, floor=0.0),
        every=Every(log=20, eval=200, sample=200, save=200),
        steps=1000,
        batch=1024,
    )


class Points(Source):
    """Items gathered by number: `arrays` holds the rows, `spans` how many an item has, `locate` where they begin."""

    def __init__(self, points: np.ndarray) -> None:
        self.num_items = len(points)
        self.arrays = {"points": points}
        self.spans = {"points": 0}  # one row without a window axis

    def locate(self, epoch_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        return index_B

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": raw["points"]}


def open_data(config: Config) -> Data:
    num = config.data.num_points
    points = draw_seedling(num + num // 10)
    fingerprint = hashlib.sha256(points.tobytes()).hexdigest()[:16]  # a resume on other data is refused
    facts = {"name": "seedling", "num_train": num, "num_valid": num // 10, "fingerprint": fingerprint}
    return Data(train=Points(points[:num]), valid=Points(points[num:]), facts=facts)


def draw_seedling(num: int) -> np.ndarray:
    """Points spread over two leaves, a stem and a heap of soil."""
    rng = np.random.default_rng(1)
    u, v = rng.random(num), rng.uniform(-1, 1, num)
    part = rng.choice(4, num, p=[0.35, 0.35, 0.12, 0.18])
    bulge = v * np.sin(np.pi * u)
    x = np.choose(part, [-1.7 * u - 0.30 * bulge, 1.6 * u - 0.35 * bulge, 0.12 * np.sin(3 * u) + 0.03 * v, 1.3 * v])
    y = np.choose(part, [0.9 * u - 0.55 * bulge, 1.2 * u + 0.5 * bulge, -1.8 * u, -1.8 - 0.35 * u * np.sqrt(1 - v * v)])
    return np.stack([x, y + 0.3], axis=1).astype(np.float32)


@dataclass(frozen=True)
class SampleOptions:
    """What `seedbed sample RUN` takes; `--help` lists it."""

    seed: int = option(1, "the same seed gives the same picture", low=0)


class Seedling(System):
    """The model and its objective: predict the velocity that carries a noise point to a data point."""

    sample_options = SampleOptions

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        middle = [layer for _ in range(model.num_layers - 1) for layer in (nn.Linear(model.width, model.width), nn.SiLU())]
        self.net = nn.Sequential(nn.Linear(3, model.width), nn.SiLU(), *middle, nn.Linear(model.width, 2))

    def velocity(self, x_B2: Tensor, t_B1: Tensor) -> Tensor:
        return self.net(torch.cat([x_B2, t_B1], dim=1))

    def loss(self, batch: dict[str, Tensor], engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        drawn = self.draw(batch["x"])
        return self.error(self.guess(drawn), drawn), {}

    def draw(self, x_B2: Tensor) -> dict[str, Tensor]:
        noise_B2, t_B1 = torch.randn_like(x_B2), torch.rand_like(x_B2[:, :1])  # repeatable: the engine seeds every step
        return {"x": x_B2, "noise": noise_B2, "t": t_B1, "mixed": (1 - t_B1) * noise_B2 + t_B1 * x_B2}

    def guess(self, drawn: dict[str, Tensor]) -> Tensor:
        return self.velocity(drawn["mixed"], drawn["t"])

    def error(self, guess_B2: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        return (guess_B2 - (drawn["x"] - drawn["noise"])).square().mean()

    def probe(self, batch: dict[str, Tensor]) -> Probe:
        """Optional: what `seedbed check` may know, so that it can test the objective itself."""
        return Probe(
            batch=self.draw(batch["x"]),
            predict=self.guess,
            objective=self.error,
            inputs="mixed",
            targets="x",
            uses=("t",),
            scalars={"t": (0.0, 1.0)},
            oracle=lambda drawn: drawn["x"] - drawn["noise"],
            lower_bound=0.0,
            corrupt=lambda drawn: (drawn["x"], drawn["noise"], drawn["t"], drawn["mixed"]),
        )

    def evaluate(self, source: Source, engine: Engine) -> dict[str, float]:
        points = torch.from_numpy(source.arrays["points"]).to(engine.device)
        loss, _ = self.loss(source.batch({"points": points}), engine)
        return {"loss": loss.item()}

    def sample(self, request: Request, engine: Engine) -> Sample:
        rng = torch.Generator().manual_seed(request.read(SampleOptions).seed)
        x_B2 = torch.randn(8000, 2, generator=rng).to(engine.device)
        panels = [panel(x_B2)]
        for i in range(64):
            x_B2 = x_B2 + self.velocity(x_B2, torch.full_like(x_B2[:, :1], (i + 0.5) / 64)) / 64
            panels += [panel(x_B2)] if i % 16 == 15 else []
        request.folder.mkdir(parents=True, exist_ok=True)
        path = request.folder / "seedling.png"
        Image.fromarray(np.concatenate(panels, axis=1)).save(path)
        return Sample(text="from noise to a seedling, left to right", files=(path,))


def panel(x_B2: Tensor, size: int = 128) -> np.ndarray:
    """A square picture of the points: green above the ground, brown in it."""
    points = x_B2.float().cpu().numpy()
    counts, _, _ = np.histogram2d(-points[:, 1], points[:, 0], bins=size, range=[[-2.2, 2.2]] * 2)
    colour = np.where(np.linspace(-2.2, 2.2, size)[:, None, None] > 1.4, [120, 80, 50], [40, 140, 60])
    ink = np.minimum(counts / 3, 1)[..., None]
    return (255 * (1 - ink) + colour * ink).astype(np.uint8)


def build(config: Config, data: Data) -> System:
    return Seedling(config.model)
