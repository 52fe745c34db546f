"""Model sizes and presets of the ebt recipe. No torch import, so that listing them is fast."""

from dataclasses import dataclass, replace
from typing import Literal

from seedbed.config import Config, Every, Limit, Optim, Schedule, Units, number
from seedbed.data.corpus import TextConfig
from seedbed.data.images import ImageConfig
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
class MCMCConfig:
    """Optimisation (MCMC) steps of predictions: `num_steps` in training and evaluation, or for every batch a number drawn from
    `min_steps` to `num_steps`. `alpha` is the step size; with `random_alpha` s above 1, uniform from alpha/s to alpha*s.

    `space` is what is optimised: probabilities, logits, or logits by the gradient of the probabilities (`mirror`). The loss is
    on each step or on the last one; gradients pass through one step or all. `langevin_noise` is added before each step of
    training. `replay_buffer` is its size; with `write_back` its entries are updated when they are used.
    """

    num_steps: int = number(2, low=1, high=1000)
    min_steps: int = number(0, low=0, high=1000)
    num_landscapes: int = number(2, low=1, high=64)
    alpha: float = number(500.0, low=1e-4, high=1e9)
    learn_alpha: bool = True
    random_alpha: float = number(1.0, low=1.0, high=100.0)
    space: Literal["prob", "logit", "mirror"] = "prob"
    initial_condition: Literal["normal", "zeros"] = "normal"
    loss: Literal["each", "last"] = "each"
    backprop_through: Literal["one", "all"] = "one"
    langevin_noise: float = number(0.0, low=0.0, high=1000.0)
    replay_buffer: int = number(0, low=0, high=1 << 20)
    write_back: bool = True

    def counts(self) -> tuple[int, ...]:
        """The numbers of steps that a batch may be trained with."""
        return tuple(range(self.min_steps or self.num_steps, self.num_steps + 1))

    def check(self) -> None:
        if self.min_steps > self.num_steps:
            raise UserError(f"model.mcmc.min_steps={self.min_steps} is above model.mcmc.num_steps={self.num_steps}")


@dataclass(frozen=True)
class ModelConfig:
    """An energy model, or the `plain` transformer of the same size that is its baseline.

    `size` names layers, heads and width; a number other than 0 overrides it. `step_embed` adds an embedding of the energy
    landscape to the predictions (`pred`) or to the context, as its first token (`prefix`). `head_init=calibrated` scales the
    energy so that the first step changes logits by about 1. `decay_all` decays norms and embeddings as well. `control` trains
    the plain transformer at the end of the run, for its report.
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
    mcmc: MCMCConfig = MCMCConfig()

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
        self.mcmc.check()
        if self.kind == "energy" and self.mcmc.num_landscapes > 1 and self.step_embed == "none":
            raise UserError(
                f"model.mcmc.num_landscapes={self.mcmc.num_landscapes} differ by their embedding, and model.step_embed=none; "
                "use pred, or one landscape"
            )


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


S1 = MCMCConfig()
S2 = replace(S1, num_steps=3, min_steps=2, num_landscapes=1, alpha=5.0, learn_alpha=False, random_alpha=2.0, loss="last")
S2 = replace(S2, langevin_noise=3.0, replay_buffer=192)


def units(config: Config) -> Units:
    return config.data.units if isinstance(config.data, TextConfig) else config.data.units("smooth L1")


def demo() -> Config:
    """A small energy-based transformer learns bytes of Python's reference, and measures the gain by more steps.

    About 90 k parameters. When it ends it trains the plain transformer of the same size, to compare.
    """
    return Config(
        model=ModelConfig(size="5xs", mcmc=replace(S1, alpha=5.0), control=True),
        data=TextConfig(text="reference", tokenizer="bpe", vocab=257, block=32),
        optim=_adam("5xs"),
        schedule=Schedule(kind="cosine", warmup=0.05, floor=0.1),
        every=Every(log=20, eval=250, sample=0, save=250),
        limit=Limit(valid=256),
        steps=500,
        batch=16,
    )


def shakespeare_s1() -> Config:
    """tiny-shakespeare by characters, two steps in two energy landscapes: the fast preset."""
    return replace(s1(), data=TextConfig(text="tinyshakespeare.txt", tokenizer="char", block=256), steps=3000)


def shakespeare_s2() -> Config:
    """tiny-shakespeare by characters, trained for more steps: random step sizes and numbers of steps, noise, and a replay buffer.

    Without the random step size: `model.mcmc.random_alpha=1`.
    """
    return replace(s2(), data=TextConfig(text="tinyshakespeare.txt", tokenizer="char", block=256), steps=3000)


def code_s1() -> Config:
    """Python's standard library in 4,096 tokens of byte-level BPE, by the fast preset."""
    data = TextConfig(text="stdlib", tokenizer="bpe", vocab=4096, block=256, valid=0.05)
    return replace(s1(), data=data, steps=5000)


def s1() -> Config:
    """Two steps in two landscapes with a learned step size; `model.size` chooses the size; bytes of the reference.

    optim.lr does not follow model.size; SIZES holds the rate of each size.
    """
    return Config(
        model=ModelConfig(mcmc=replace(S1, alpha=5.0)),
        data=TextConfig(text="reference", tokenizer="bpe", vocab=257, block=256),
        optim=_adam("xxs"),
        schedule=Schedule(kind="cosine", warmup=0.02, floor=0.1),
        every=Every(log=50, eval=500, sample=0, save=500),
        steps=2000,
        batch=32,
        precision="bf16",
        compile="blocks",
    )


def s2() -> Config:
    """Two or three steps of random size with noise and replay, gradients through the last one: trained for more steps."""
    return replace(s1(), model=ModelConfig(step_embed="none", mcmc=S2))


def plain() -> Config:
    """The transformer of the same blocks, data, order and schedule: the baseline.

    Needs the `data` keys of the run that it is compared with.
    """
    return replace(s1(), model=ModelConfig(kind="plain"))


def replica() -> Config:
    """The original's settings, on random tokens: for timing.

    The landscape is the context's first token, so the context is encoded once per landscape.
    """
    return Config(
        model=ModelConfig(step_embed="prefix", head_init="xavier", decay_all=True, mcmc=S1),
        data=TextConfig(text="random:2_000_000:4096", block=256, valid=0.01),
        optim=_adam("xxs"),
        schedule=Schedule(kind="cosine", warmup=0.01, floor=0.1),
        every=Every(log=10, eval=0, sample=0, save=0),
        steps=200,
        batch=32,
        compile="blocks",
    )


def _adam(size: str) -> Optim:
    return Optim(lr=SIZES[size][3], beta2=0.999, weight_decay=0.01, clip=1.0)


def denoise_shapes() -> Config:
    """Denoises shapes of 32 pixels by gradient descent on an energy; trained at noise 0.1, also evaluated at 0.2."""
    return _denoise(DenoiseConfig(), ImageConfig(images="shapes", size=32), steps=4000)


def regress_shapes() -> Config:
    """The baseline of denoise-shapes: the same blocks and data, one pass to the clean image."""
    return replace(denoise_shapes(), model=DenoiseConfig(kind="regress"))


def denoise_cifar() -> Config:
    """Denoises CIFAR-10 by gradient descent on an energy over images.

    Needs data.images=FOLDER, a folder with train/CLASS/*.jpg and test/CLASS/*.jpg.
    """
    return _denoise(DenoiseConfig(depth=12), ImageConfig(images="cifar10", size=32, flip=True), steps=20_000)


def regress_cifar() -> Config:
    """The baseline of denoise-cifar: the same blocks and data, one pass to the clean image."""
    return replace(denoise_cifar(), model=DenoiseConfig(kind="regress", depth=12))


def _denoise(model: DenoiseConfig, data: ImageConfig, steps: int) -> Config:
    return Config(
        model=model,
        data=data,
        optim=Optim(lr=3e-4, beta2=0.999, weight_decay=0.01, clip=1.0),
        schedule=Schedule(kind="cosine", warmup=0.05, floor=0.1),
        every=Every(log=50, eval=steps // 4, sample=0, save=steps // 4),
        steps=steps,
        batch=128,
        precision="tf32",
        compile="auto",
    )


def check_settings(config: Config) -> dict[str, object]:
    """A small copy for the checks: four patches along a side of an image, or the smallest size of a text model."""
    if isinstance(config.model, DenoiseConfig):
        return config.data.check_settings(config.model.patch)
    depth, heads, width = config.model.shape
    wanted = {"model.depth": (depth, 2), "model.heads": (heads, 2), "model.width": (width, 32)}
    return {key: small for key, (full, small) in wanted.items() if small < full}
