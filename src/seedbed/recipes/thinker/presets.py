"""Model sizes and presets of the thinker recipe. No torch import, so that listing them is fast."""

from dataclasses import dataclass, replace
from typing import Literal

from seedbed.config import Config, Every, Optim, Schedule, Units, number
from seedbed.errors import UserError
from seedbed.recipes.thinker.program import OUTPUT, Program, Range, parse_program, parse_range


@dataclass(frozen=True)
class CurriculumConfig:
    """The distribution of sample lengths: uniform, by stages gated by accuracy (in a mixed curriculum with a `share` of all
    lengths), the full length alone, or mostly that and a `share` of all lengths."""

    kind: Literal["uniform", "gated", "mixed", "fixed", "mostly"] = "uniform"
    start: int = number(1, low=1)
    threshold: float = number(0.95, low=0.0, high=1.0)
    window: int = number(100, low=1)
    min_steps: int = number(100, low=0)
    share: float = number(0.2, low=0.0, high=1.0)


FIXED = CurriculumConfig(kind="fixed")
MOSTLY_LONG = CurriculumConfig(kind="mostly")
BY_ENDS = ("ends", "ends_shifted")  # kinds of positions


@dataclass(frozen=True)
class DataConfig:
    """A task and its sizes. `test` new samples are evaluated at the end of training (0: none), also at `test_lengths`."""

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
    """The decoder: position queries that read the latents, with self-attention or not, and a head tied to the embedding."""

    layers: int = number(1, low=1, high=8)
    self_attn: bool = False
    tied: bool = False


@dataclass(frozen=True)
class PositionConfig:
    """Position encodings: a learned table, sinusoids, or sinusoids at positions drawn for every batch from 0 to `max`.

    `ends` counts from both ends of a sample with a random stride, so that short samples reach as far as `max`; `ends_shifted`
    also starts at a random offset.
    """

    kind: Literal["learned", "sin", "random_sorted", "random_affine", "ends", "ends_shifted"] = "learned"
    max: int = number(0, low=0, high=1 << 20)


@dataclass(frozen=True)
class LossConfig:
    """The steps that have a loss, weighted by base^t; `backprop_steps` limits how far back gradients reach (0: all)."""

    steps: Literal["all", "random", "last", "progressive"] = "all"
    base: float = number(1.0, low=0.1, high=10.0)
    backprop_steps: int = number(0, low=0)


@dataclass(frozen=True)
class ModelConfig:
    """A thinker: latents that read the input, one block applied for several steps, and position queries that decode.

    Latents start at learned vectors, one for each (`indexed`) or one for all (`shared`), or at one vector plus the position
    encodings (`positional`): with one latent per token this is a recurrent transformer.
    `n_latent` and `n_step` are a number or a range such as 4:16 or 4:16:2. `noise` is the standard deviation of the latents'
    initial noise, `perturb` the share of latents replaced at random in every training step. `program` says what each step sees.
    `target_stream` adds a causal stream of the targets to the queries, or replaces them.
    """

    width: int = number(32, low=2, high=65536)
    heads: int = number(4, low=1, high=1024)
    blocks: int = number(1, low=1, high=64)
    n_latent: str = "8"
    n_step: str = "1:4"
    latent_init: Literal["indexed", "shared", "positional"] = "indexed"
    noise: float = number(1.0, low=0.0, high=100.0)
    perturb: float = number(0.0, low=0.0, high=1.0)
    state_norm: bool = True
    program: str = "ro*"
    n_memory: int = number(4, low=0, high=4096)
    static_memory: int = number(0, low=0, high=65536)
    target_stream: Literal["off", "both", "only"] = "off"
    output: OutputConfig = OutputConfig()
    positions: PositionConfig = PositionConfig()
    loss: LossConfig = LossConfig()

    @property
    def latents(self) -> Range:
        return parse_range(self.n_latent, "model.n_latent")

    @property
    def steps(self) -> Range:
        return parse_range(self.n_step, "model.n_step")

    def parsed_program(self) -> Program | None:
        """The program, checked; None for random programs."""
        return parse_program(self.program, self.steps.high, self.n_memory, self.static_memory)

    def check(self) -> None:
        """What the fields must satisfy together."""
        if self.width % self.heads:
            raise UserError(f"model.width={self.width} does not divide into model.heads={self.heads}; choose a multiple")
        if self.width % 2 and self.positions.kind != "learned":
            raise UserError(f"model.width={self.width} is odd, and sinusoids come in pairs; choose an even number")
        if self.positions.kind in BY_ENDS and self.width % 4:
            raise UserError(f"model.width={self.width} does not divide into sinusoids for two ends; choose a multiple of 4")
        if self.positions.kind.startswith(("random", "ends")) and not self.positions.max:
            raise UserError(f"model.positions.kind={self.positions.kind} needs model.positions.max, such as 2048")
        low, high = self.latents.low, self.steps.high
        if low > 4096 or high > 4096:
            raise UserError(f"model.n_latent={self.n_latent}, model.n_step={self.n_step}: more than 4096 is not supported")
        program = self.parsed_program()
        if program is None or self.loss.steps not in ("random", "progressive"):
            return
        # Steps that training may end at must output; the last row always does.
        rows, low = program.rows(self.steps.high), 1 if self.loss.steps == "progressive" else self.steps.low
        for step in range(low, self.steps.high + 1):
            if not rows[step - 1][OUTPUT]:
                raise UserError(
                    f"row {step} of model.program does not output, and model.loss.steps={self.loss.steps} may end there; use "
                    "model.loss.steps=all or last"
                )


def units(config: Config) -> Units:
    return Units("samples", 1.0, "nats/token", "{name}: samples of up to {length} tokens, new ones for every step")


def demo() -> Config:
    """A thinker of 31 k parameters learns to reverse ten symbols on a laptop."""
    return Config(
        model=ModelConfig(),
        data=DataConfig(task="flip", length=10, curriculum=FIXED, test=2048),
        optim=_adam(3e-3),
        schedule=Schedule(kind="cosine", warmup=0.08, floor=0.05),
        every=Every(log=50, eval=200, sample=0, save=600),
        steps=1200,
        batch=32,
        ema=0.99,
    )


def ablation() -> Config:
    """The demo as the baseline of an ablation: what keeps an answer stable when steps are added."""
    base = demo()
    return replace(base, every=replace(base.every, eval=0))


def copy() -> Config:
    """Copy twenty symbols, trained mostly on twenty, and on one to twenty."""
    return Config(
        model=ModelConfig(width=64, heads=8, n_latent="20"),
        data=DataConfig(task="copy", length=20, curriculum=MOSTLY_LONG),
        optim=_adam(3e-3),
        schedule=Schedule(kind="cosine", warmup=0.05, floor=0.01),
        every=Every(log=100, eval=1000, sample=0, save=5000),
        steps=8000,
        batch=512,
        ema=0.999,
        precision="tf32",
        compile="blocks",
    )


def flip() -> Config:
    """Reverse twenty symbols."""
    return replace(copy(), data=DataConfig(task="flip", length=20, curriculum=FIXED), steps=20_000)


def roll() -> Config:
    """Rotate twenty symbols by the number that the first of them gives."""
    return replace(copy(), data=DataConfig(task="roll", length=20, curriculum=FIXED), steps=20_000)


def roll_num() -> Config:
    """The first of up to twenty symbols added to all of them."""
    return replace(copy(), data=DataConfig(task="roll_num", length=20), steps=20_000)


def copy40() -> Config:
    """Copy forty symbols, one latent for each."""
    model = ModelConfig(width=64, heads=8, n_latent="40")
    return replace(copy(), model=model, data=DataConfig(task="copy", length=40, curriculum=MOSTLY_LONG))


def add16() -> Config:
    """Add two numbers below 1000 in base 16, with a tenth of all pairs held out."""
    model = ModelConfig(width=64, n_step="2:6")
    data = DataConfig(task="add", base=16, max_value=1000, held=0.1)
    return replace(copy(), model=model, data=data, optim=_adam(3e-3), steps=12_000)


def cumsum() -> Config:
    """Running sums of ten symbols modulo 16, by one model for 4 to 16 latents and 4 to 12 steps.

    Sinusoids, because each sum is the one before it and a symbol. Muon, because AdamW needs many times the steps for the later
    sums; a learning rate that decays while they are learned leaves some out.
    """
    model = ModelConfig(
        width=64, heads=8, n_latent="4:16:2", n_step="4:12", output=OutputConfig(layers=2), positions=PositionConfig(kind="sin")
    )
    data = DataConfig(task="cumsum", length=10, curriculum=FIXED)
    optim = replace(_adam(3e-3), kind="muon", muon_lr=1e-2, muon_weight_decay=0.0)
    schedule = Schedule(kind="wsd", warmup=0.02, decay=0.3, floor=0.01)
    return replace(copy(), model=model, data=data, optim=optim, schedule=schedule, steps=5000)


def chomsky() -> Config:
    """One of the six tasks of the Chomsky hierarchy, trained up to length 40 and tested up to length 500.

    data.task is reverse_string, duplicate_string, odds_first, missing_duplicate, binary_addition or bucket_sort. Odds_first and
    bucket_sort need an origin: model.positions.kind=ends. With sinusoids nothing is right beyond the trained lengths.
    """
    model = ModelConfig(
        width=64,
        heads=2,
        n_latent="40",
        n_step="2",
        noise=0.0,
        latent_init="positional",
        positions=PositionConfig(kind="ends_shifted", max=1024),
    )
    lengths = (41, 50, 75, 100, 150, 200, 300, 400, 500)
    data = DataConfig(task="reverse_string", length=40, test=8192, test_lengths=lengths)
    return replace(cumsum(), model=model, data=data, batch=128, steps=4000)


def prefix() -> Config:
    """Parities of all prefixes of up to 32 bits, one latent per bit, tested up to 512 bits.

    Lengths grow with accuracy, and a fifth of the samples is drawn from all of them: parities of 32 bits give no signal at the
    start of training. The published DT-Net trains on 32 bits with
    `data.curriculum.kind=fixed model.n_step=30 model.loss.steps=progressive`.
    """
    model = ModelConfig(
        width=64,
        heads=8,
        n_latent="32",
        n_step="4:16",
        latent_init="shared",
        positions=PositionConfig(kind="random_sorted", max=2048),
    )
    stages = CurriculumConfig(kind="mixed", start=2)
    data = DataConfig(task="prefix", length=32, curriculum=stages, test=8192, test_lengths=(48, 64, 128, 256, 512))
    late = Schedule(kind="wsd", warmup=0.05, decay=0.3, floor=0.01)
    return replace(copy(), model=model, data=data, optim=_adam(1e-3), schedule=late, batch=128, steps=20_000)


def mirrored() -> Config:
    """Fifteen of 256 symbols and the same backwards, token by token, by the causal target stream."""
    model = ModelConfig(width=128, heads=8, n_latent="16", n_step="1:2", target_stream="only")
    data = DataConfig(task="mirrored", length=15, vocab=256, curriculum=FIXED)
    return replace(copy(), model=model, data=data, optim=_adam(1e-3), steps=5000, batch=256)


def _adam(lr: float) -> Optim:
    return Optim(lr=lr, beta2=0.99, weight_decay=0.0, clip=1.0)


def check_settings(config: Config) -> dict[str, object]:
    """A small copy for the checks: few latents and steps, short samples, and no other lengths."""
    model, data = config.model, config.data
    wanted = {"model.n_latent": _at_most(model.latents, 12), "model.n_step": _at_most(model.steps, 4)}
    few: dict[str, object] = {key: text for key, text in wanted.items() if text}
    few |= {"data.length": 6} if data.length > 6 else {}
    return few | ({"data.test_lengths": ""} if data.test_lengths else {}) | ({"data.test": 256} if data.test > 256 else {})


def _at_most(numbers: Range, most: int) -> str:
    """The range with lower ends, as text; empty where it is low already."""
    if numbers.high <= most:
        return ""
    return str(Range(most if numbers.low == numbers.high else min(numbers.low, most // 2), most, numbers.stride))
