"""Shapes and presets of the ebt recipe. Nothing here needs torch, so listing them costs nothing."""

from dataclasses import dataclass, replace
from typing import Literal

from seedbed.config import Config, Every, Limit, Optim, Schedule, number
from seedbed.data.corpus import TextConfig
from seedbed.errors import UserError

# Layers, heads and width of each size, with the learning rate that goes with it.
SIZES = {
    "5xs": (2, 2, 64, 3e-3),
    "4xs": (2, 2, 128, 2.4e-3),
    "3xs": (4, 4, 256, 1.8e-3),
    "xxs": (6, 6, 384, 1.2e-3),
    "xs": (12, 6, 384, 9e-4),
    "small": (12, 12, 768, 6e-4),
    "medium": (24, 16, 1024, 3e-4),
    "large": (24, 16, 1536, 2.5e-4),
    "xl": (24, 32, 2048, 2e-4),
}
Size = Literal["5xs", "4xs", "3xs", "xxs", "xs", "small", "medium", "large", "xl"]


@dataclass(frozen=True)
class WalkConfig:
    """How a candidate walks downhill: `steps` as trained and evaluated, or from `fewest` to `steps` drawn for every batch.

    `alpha` is the step size, uniform between alpha/spread and alpha*spread where `spread` is above 1. `space` is what moves:
    the probabilities, the logits, or the logits by the probabilities' gradient. `loss` asks each step or the last one for an
    answer; gradients reach back `through` one step or all. `langevin` is noise added before each step of training.
    """

    steps: int = number(2, low=1, high=1000)
    fewest: int = number(0, low=0, high=1000)
    landscapes: int = number(2, low=1, high=64)
    alpha: float = number(500.0, low=1e-4, high=1e9)
    learn_alpha: bool = True
    spread: float = number(1.0, low=1.0, high=100.0)
    space: Literal["prob", "logit", "mirror"] = "prob"
    start: Literal["normal", "zeros"] = "normal"
    loss: Literal["each", "last"] = "each"
    through: Literal["one", "all"] = "one"
    langevin: float = number(0.0, low=0.0, high=1000.0)

    def counts(self) -> tuple[int, ...]:
        """The numbers of steps that a batch may be trained with."""
        return tuple(range(self.fewest or self.steps, self.steps + 1))

    def check(self) -> None:
        if self.fewest > self.steps:
            raise UserError(f"model.walk.fewest={self.fewest} is above model.walk.steps={self.steps}; draw from few to many")


@dataclass(frozen=True)
class ModelConfig:
    """An energy model, or the `plain` transformer of the same size that it is held against.

    `size` names layers, heads and width; a number other than 0 overrides it. `step_embed` tells the candidate which of the
    walk's landscapes it is in (`pred`), or the context too, as a first token (`prefix`). `head_init=calibrated` scales the
    energy so that the first step moves logits by about 1. `decay_all` decays norms and embeddings as well.
    """

    kind: Literal["energy", "plain"] = "energy"
    size: Size = "xxs"
    depth: int = number(0, low=0, high=1000)
    heads: int = number(0, low=0, high=1024)
    width: int = number(0, low=0, high=65536)
    rope_base: float = number(1e4, low=2.0)
    step_embed: Literal["pred", "prefix", "none"] = "pred"
    head_init: Literal["calibrated", "xavier"] = "calibrated"
    decay_all: bool = False
    walk: WalkConfig = WalkConfig()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, heads, width."""
        depth, heads, width, _ = SIZES[self.size]
        return self.depth or depth, self.heads or heads, self.width or width

    def check(self) -> None:
        """What the fields must satisfy together."""
        _, heads, width = self.shape
        if width % heads or (width // heads) % 2:
            raise UserError(f"a width of {width} does not divide into {heads} heads of even width; set model.width, model.heads")
        self.walk.check()
        if self.kind == "energy" and self.walk.landscapes > 1 and self.step_embed == "none":
            raise UserError(
                f"model.walk.landscapes={self.walk.landscapes} differ only by their embedding, and model.step_embed=none; "
                "use pred, or one landscape"
            )


S1 = WalkConfig()


def demo() -> Config:
    """A small energy-based transformer learns bytes of Python's reference, and shows what more steps buy.

    `seedbed train ebt/demo`: less than two minutes on two CPU cores, about 90 k parameters. An evaluation tells nats per byte
    after one step and after both.
    """
    return Config(
        model=ModelConfig(size="5xs", walk=replace(S1, alpha=5.0)),
        data=TextConfig(text="reference", tokenizer="bpe", vocab=257, block=32),
        optim=_adam("5xs"),
        schedule=Schedule(kind="gpt3", warmup=0.05, floor=0.1),
        every=Every(log=20, eval=200, sample=0, save=200),
        limit=Limit(valid=256),
        steps=600,
        batch=16,
        device="cpu",
    )


def _adam(size: str) -> Optim:
    return Optim(lr=SIZES[size][3], beta2=0.999, weight_decay=0.01, clip=1.0)
