"""Shapes and presets of the ebt recipe. Nothing here needs torch, so listing them costs nothing."""

from dataclasses import dataclass, replace
from typing import Literal

from seedbed.config import Config, Every, Limit, Optim, Schedule, number
from seedbed.data.corpus import TextConfig
from seedbed.errors import UserError
from seedbed.recipes.ebt import denoise_presets

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
    answer; gradients reach back `through` one step or all. `langevin` is noise added before each step of training. `replay`
    keeps that many unfinished walks, which later batches go on with; with `write_back` they may be taken up again.
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
    replay: int = number(0, low=0, high=1 << 20)
    write_back: bool = True

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
    energy so that the first step moves logits by about 1. `decay_all` decays norms and embeddings as well. `control` trains
    the plain transformer beside the run when it ends, for its report.
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
    control: bool = False
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
S2 = WalkConfig(steps=3, fewest=2, landscapes=1, alpha=5.0, learn_alpha=False, spread=2.0, loss="last", langevin=3.0, replay=192)


def demo() -> Config:
    """A small energy-based transformer learns bytes of Python's reference, and shows what more steps buy.

    `seedbed train ebt/demo`: less than two minutes on two CPU cores, about 90 k parameters. The last sample holds nats per
    byte after 1 to 30 steps, and those of the plain transformer of the same size, trained beside it.
    """
    return Config(
        model=ModelConfig(size="5xs", walk=replace(S1, alpha=5.0), control=True),
        data=TextConfig(text="reference", tokenizer="bpe", vocab=257, block=32),
        optim=_adam("5xs"),
        schedule=Schedule(kind="gpt3", warmup=0.05, floor=0.1),
        every=Every(log=20, eval=250, sample=0, save=250),
        limit=Limit(valid=256),
        steps=500,
        batch=16,
        device="cpu",
    )


def shakespeare_s1() -> Config:
    """tiny-shakespeare by characters, two steps in two landscapes: the fast preset.

    `seedbed train ebt/shakespeare-s1 data.text=tinyshakespeare.txt` on one GPU: minutes. Hold it against
    `seedbed train ebt/plain data.text=tinyshakespeare.txt data.tokenizer=char`.
    """
    return replace(s1(), data=TextConfig(text="tinyshakespeare.txt", tokenizer="char", block=256), steps=3000)


def shakespeare_s2() -> Config:
    """tiny-shakespeare by characters, trained to think: random step sizes and counts, noise, and walks taken up again.

    `seedbed train ebt/shakespeare-s2 data.text=tinyshakespeare.txt` on one GPU: minutes; then `seedbed think RUN`. Without
    the random step size: `model.walk.spread=1`.
    """
    return replace(s2(), data=TextConfig(text="tinyshakespeare.txt", tokenizer="char", block=256), steps=3000)


def code_s1() -> Config:
    """Python's standard library in 4,096 tokens of byte-level BPE, by the fast preset.

    `seedbed train ebt/code-s1` on one GPU.
    """
    data = TextConfig(text="stdlib", tokenizer="bpe", vocab=4096, block=256, valid=0.05)
    return replace(s1(), data=data, steps=5000)


def s1() -> Config:
    """Two steps in two landscapes with a learned step size; `model.size` is the dial, bytes of the reference the text.

    `seedbed train ebt/s1 model.size=4xs optim.lr=2.4e-3` on one GPU. Rates by size: 4xs 2.4e-3, 3xs 1.8e-3, xxs 1.2e-3,
    xs 9e-4, small 6e-4, medium 3e-4, large 2.5e-4, xl 2e-4.
    """
    return Config(
        model=ModelConfig(walk=replace(S1, alpha=5.0)),
        data=TextConfig(text="reference", tokenizer="bpe", vocab=257, block=256),
        optim=_adam("xxs"),
        schedule=Schedule(kind="gpt3", warmup=0.02, floor=0.1),
        every=Every(log=50, eval=500, sample=0, save=500),
        steps=2000,
        batch=32,
        precision="bf16",
        compile="blocks",
    )


def s2() -> Config:
    """Two or three steps of random size with noise and replay, gradients through the last one: trained to think longer.

    `seedbed train ebt/s2` on one GPU; then `seedbed think RUN`. Replay makes every batch half as large again.
    """
    return replace(s1(), model=ModelConfig(step_embed="none", walk=S2))


def plain() -> Config:
    """The transformer of the same blocks, data, order and schedule: the control of every table.

    `seedbed train ebt/plain` on one GPU, with the `data` keys of the run it is held against.
    """
    base = s1()
    return replace(base, model=ModelConfig(kind="plain"))


def replica() -> Config:
    """The original's settings to the letter, on random tokens: for timing against it.

    `seedbed train ebt/replica` on one GPU: 6 layers, 384 wide, vocabulary 4,096; the original takes 167 ms a step on one H200.
    The landscape is the context's first token, so each landscape reads the context anew.
    """
    return Config(
        model=ModelConfig(step_embed="prefix", head_init="xavier", decay_all=True, walk=S1),
        data=TextConfig(text="random:2_000_000:4096", block=256, valid=0.01),
        optim=_adam("xxs"),
        schedule=Schedule(kind="gpt3", warmup=0.01, floor=0.1),
        every=Every(log=10, eval=0, sample=0, save=0),
        steps=200,
        batch=32,
        compile="blocks",
    )


def _adam(size: str) -> Optim:
    return Optim(lr=SIZES[size][3], beta2=0.999, weight_decay=0.01, clip=1.0)


def denoise_shapes() -> Config:
    """Cleans shapes of 32 pixels by walking downhill on an energy over images; trained at noise 0.1, judged at 0.2 too.

    `seedbed train ebt/denoise-shapes` on one GPU: minutes. Then `seedbed sample RUN --examine 1` for PSNR by steps and noise.
    """
    return denoise_presets.shapes("energy")


def regress_shapes() -> Config:
    """The control of denoise-shapes: the same blocks and data, one pass to the clean image.

    `seedbed train ebt/regress-shapes` on one GPU: minutes.
    """
    return denoise_presets.shapes("regress")


def denoise_cifar() -> Config:
    """Cleans CIFAR-10 by walking downhill on an energy over images.

    `seedbed train ebt/denoise-cifar data.images=FOLDER`, with train/CLASS/*.jpg and test/CLASS/*.jpg, on one GPU.
    """
    return denoise_presets.cifar("energy")


def regress_cifar() -> Config:
    """The control of denoise-cifar: the same blocks and data, one pass to the clean image.

    `seedbed train ebt/regress-cifar data.images=FOLDER` on one GPU.
    """
    return denoise_presets.cifar("regress")
