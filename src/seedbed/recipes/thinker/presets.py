"""Shapes and presets of the thinker recipe. Nothing here needs torch, so listing them costs nothing."""

from dataclasses import dataclass
from typing import Literal

from seedbed.config import Config, Every, Optim, Schedule, number
from seedbed.errors import UserError
from seedbed.recipes.thinker.plan import OUTPUT, Plan, Range, parse_plan, parse_range


@dataclass(frozen=True)
class CurriculumConfig:
    """How the lengths of samples are drawn: all at once, by stages that accuracy opens, or mostly by stages."""

    kind: Literal["uniform", "gated", "mixed", "fixed"] = "uniform"
    start: int = number(1, low=1)
    threshold: float = number(0.95, low=0.0, high=1.0)
    window: int = number(100, low=1)
    min_steps: int = number(100, low=0)
    share: float = number(0.2, low=0.0, high=1.0)


@dataclass(frozen=True)
class DataConfig:
    """A task and its sizes. `test` fresh samples are judged when training ends (0: none), also at `test_lengths`."""

    task: str = "flip"
    length: int = number(10, low=1, high=100_000)
    vocab: int = number(16, low=2, high=65536)
    base: int = number(16, low=2, high=16)
    max_value: int = number(1000, low=2, high=1 << 20)
    held: float = number(0.0, low=0.0, high=0.9)
    curriculum: CurriculumConfig = CurriculumConfig()
    test: int = number(65_536, low=0)
    test_lengths: tuple[int, ...] = ()

    def check(self) -> None:
        """What the fields must satisfy together."""
        if any(length < 1 for length in self.test_lengths):
            raise UserError(f"data.test_lengths={self.test_lengths} holds a length below 1")


@dataclass(frozen=True)
class OutputConfig:
    """How position queries read the latents: layers, whether queries see each other, and a head tied to the embedding."""

    layers: int = number(1, low=1, high=8)
    self_attn: bool = False
    tied: bool = False


@dataclass(frozen=True)
class PositionConfig:
    """Where tokens stand: a learned table, sinusoids, or sinusoids at places drawn anew for every batch from 0 to `max`."""

    kind: Literal["learned", "sin", "random_sorted", "random_affine"] = "learned"
    max: int = number(0, low=0, high=1 << 20)


@dataclass(frozen=True)
class LossConfig:
    """Which steps answer for the loss, weighted by base^t; `backprop_steps` bounds how far back gradients reach (0: all)."""

    steps: Literal["all", "random", "last", "progressive"] = "all"
    base: float = number(1.0, low=0.1, high=10.0)
    backprop_steps: int = number(0, low=0)


@dataclass(frozen=True)
class ModelConfig:
    """A thinker: latents that read, one block applied step after step, and queries that answer.

    `n_latent` and `n_step` are a number or a range such as 4:16 or 4:16:2. `noise` is the spread of the latents' random
    start, `perturb` the share of latents replaced by chance in every training step. `plan` says what each step sees.
    `flow` adds a causal stream of the targets beside the queries, or puts it in their place.
    """

    width: int = number(32, low=2, high=65536)
    heads: int = number(4, low=1, high=1024)
    blocks: int = number(1, low=1, high=64)
    n_latent: str = "8"
    n_step: str = "1:4"
    latent_init: Literal["indexed", "shared"] = "indexed"
    noise: float = number(1.0, low=0.0, high=100.0)
    perturb: float = number(0.0, low=0.0, high=1.0)
    state_norm: bool = True
    plan: str = "ro*"
    n_memory: int = number(4, low=0, high=4096)
    static_memory: int = number(0, low=0, high=65536)
    flow: Literal["off", "beside", "only"] = "off"
    output: OutputConfig = OutputConfig()
    positions: PositionConfig = PositionConfig()
    loss: LossConfig = LossConfig()

    @property
    def latents(self) -> Range:
        return parse_range(self.n_latent, "model.n_latent")

    @property
    def steps(self) -> Range:
        return parse_range(self.n_step, "model.n_step")

    def parsed_plan(self) -> Plan | None:
        """The plan, checked; None stands for plans drawn at random."""
        return parse_plan(self.plan, self.steps.high, self.n_memory, self.static_memory)

    def check(self) -> None:
        """What the fields must satisfy together."""
        if self.width % self.heads:
            raise UserError(f"model.width={self.width} does not divide into model.heads={self.heads}; choose a multiple")
        if self.width % 2 and self.positions.kind != "learned":
            raise UserError(f"model.width={self.width} is odd, and sinusoids come in pairs; choose an even number")
        if self.positions.kind.startswith("random") and not self.positions.max:
            raise UserError(f"model.positions.kind={self.positions.kind} needs model.positions.max, such as 2048")
        low, high = self.latents.low, self.steps.high
        if low > 4096 or high > 4096:
            raise UserError(f"model.n_latent={self.n_latent}, model.n_step={self.n_step}: more than 4096 is not supported")
        plan = self.parsed_plan()
        if plan is not None and self.loss.steps != "last":
            self._check_outputs(plan)

    def _check_outputs(self, plan: Plan) -> None:
        """Steps that training may end at must answer."""
        rows, wanted = plan.rows(self.steps.high), self.steps.values()
        if self.loss.steps == "all":
            return  # the last row always answers
        low = 1 if self.loss.steps == "progressive" else wanted[0]
        for step in range(low, self.steps.high + 1):
            if not rows[step - 1][OUTPUT]:
                raise UserError(
                    f"row {step} of model.plan does not output, and model.loss.steps={self.loss.steps} may end there; use "
                    "model.loss.steps=all or last"
                )


def demo() -> Config:
    """A thinker of 20 k parameters learns to say ten symbols backwards on a laptop.

    `seedbed train thinker/demo`: about a minute on one CPU core.
    """
    return Config(
        model=ModelConfig(),
        data=DataConfig(task="flip", length=10, curriculum=CurriculumConfig(kind="fixed"), test=4096),
        optim=_adam(3e-3),
        schedule=Schedule(kind="gpt3", warmup=0.07, floor=0.05),
        every=Every(log=50, eval=250, sample=0, save=500),
        steps=1500,
        batch=32,
        ema=0.99,
        device="cpu",
    )


def _adam(lr: float) -> Optim:
    return Optim(lr=lr, beta2=0.99, weight_decay=0.0, clip=1.0)
