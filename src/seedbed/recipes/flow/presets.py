"""Model sizes and presets of the flow recipe. No torch import, so that listing them is fast."""

from dataclasses import dataclass, replace
from typing import Literal

from seedbed.config import Config, Every, Optim, Schedule, Units, number
from seedbed.data.images import ImageConfig
from seedbed.errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """The transformer and its objective; channels, pixels and classes come from the data.

    With `condition=adaln` time and class shift, scale and gate every layer; with `context` they are tokens next to the patches,
    `context_tokens` of them for the class, from block `context_start` on. `predict` is the network's output: the velocity `v`,
    or the clean image `x`, which a narrow network on large patches needs. Times follow `t_distribution`; the network's input is
    `t_scale` times t. `drop` is the class dropout of training; without it there is no guidance.
    """

    depth: int = number(12, low=1, high=1000)
    width: int = number(384, low=4, high=65536)
    heads: int = number(6, low=1, high=1024)
    patch: int = number(2, low=1, high=256)
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    hidden: int = number(0, low=0, high=1 << 20)
    condition: Literal["adaln", "context"] = "adaln"
    context_tokens: int = number(0, low=0, high=1024)
    context_start: int = number(0, low=0, high=999)
    positions: Literal["2d", "1d", "sines"] = "2d"
    rope_base: float = number(1e4, low=2.0)
    qk_norm: bool = True
    patch_init: Literal["unit", "conv", "xavier"] = "unit"
    predict: Literal["v", "x"] = "v"
    t_distribution: Literal["uniform", "logit-normal"] = "logit-normal"
    t_mean: float = number(0.0, low=-10.0, high=10.0)
    t_std: float = number(1.0, low=0.01, high=10.0)
    t_scale: float = number(1000.0, low=0.001, high=1e6)
    stratified: bool = True
    drop: float = number(0.1, low=0.0, high=0.9)

    def check(self) -> None:
        """What the fields must satisfy together."""
        if self.width % self.heads:
            raise UserError(f"model.width={self.width} does not divide into model.heads={self.heads}; choose a multiple")
        axes = {"2d": 2, "1d": 1, "sines": 0}[self.positions]
        if axes and (self.width // self.heads) % (2 * axes):
            text = f"model.width/model.heads={self.width // self.heads}"
            raise UserError(f"{text}: rotary positions along {axes} axes need heads whose width is a multiple of {2 * axes}")
        if self.context_start >= self.depth:
            raise UserError(f"model.context_start={self.context_start}: the model has blocks 0 to {self.depth - 1} only")
        if self.width % 4:
            raise UserError(f"model.width={self.width} is not a multiple of 4, which sines and cosines of positions need")


def units(config: Config) -> Units:
    return config.data.units("MSE")


def demo() -> Config:
    """A small flow model learns to draw coloured shapes on a laptop.

    0.7 M parameters. Every possible image can be listed, so samples are scored exactly.
    """
    return Config(
        model=ModelConfig(depth=4, width=96, heads=4, patch=4, predict="x", t_mean=-0.8, t_std=0.8),
        data=ImageConfig(images="shapes", size=16),
        optim=Optim(lr=6e-3, weight_decay=0.0),
        schedule=SCHEDULE,
        every=Every(log=20, eval=400, sample=400, save=400),
        steps=1100,
        batch=64,
        ema=0.995,
    )


def shapes_64() -> Config:
    """The shapes of the demo at 64 pixels, for one GPU: a run of minutes whose samples are checked exactly."""
    model = ModelConfig(depth=8, width=384, heads=6, patch=4)
    return replace(_on_gpu(model, SHAPES, lr=1e-3, steps=4000, every=1000), batch=128)


def cifar10() -> Config:
    """CIFAR-10 by class, at most 8 minutes of one H200: S/2, flips, two averages of the weights.

    Needs data.images=FOLDER, a folder with train/CLASS/*.jpg and test/CLASS/*.jpg.
    """
    data = ImageConfig(images="cifar10", size=32, flip=True)
    base = _on_gpu(ModelConfig(depth=12, width=384, heads=6, patch=2), data, lr=1e-3, steps=15_000, every=4000)
    return replace(base, every=replace(base.every, log=100, eval=2000), budget=450.0, ema2=0.9995)


def s2_32() -> Config:
    """The size of SiT-S/2 at 32 pixels, for throughput: same width, depth, heads, MLP, positions and patch, on random images."""
    model = ModelConfig(depth=12, width=384, heads=6, patch=2, mlp="gelu", positions="sines", qk_norm=False)
    return _for_timing(_on_gpu(model, ImageConfig(images="random:10_000:1000", size=32), lr=2e-4, steps=400), log=20)


def seed_256() -> Config:
    """The model of a published table, exactly: 256 wide, 16 layers, 16 heads, patches of 2 at 256 pixels, 16,386 tokens."""
    shape = ModelConfig(depth=16, width=256, heads=16, patch=2, hidden=768, positions="1d", rope_base=5e5)
    model = replace(shape, condition="context", t_distribution="uniform", stratified=False)
    base = _on_gpu(model, ImageConfig(images="random:256:1000", size=256), lr=3e-4, steps=100)
    return replace(_for_timing(base, log=5), batch=8, ema=0.0)


def seed_256_h4() -> Config:
    """seed-256 with 4 heads of 64 instead of 16 of 16: same FLOPs, same parameters, a fraction of the time."""
    base = seed_256()
    return replace(base, model=replace(base.model, heads=4))


def s() -> Config:
    """Size S at 64 pixels: 384 wide, 12 layers, 6 heads, patches of 4."""
    return _on_gpu(ModelConfig(depth=12, width=384, heads=6, patch=4), SHAPES, lr=5e-4)


def b() -> Config:
    """Size B at 64 pixels: 768 wide, 12 layers, 12 heads, patches of 4."""
    return _on_gpu(ModelConfig(depth=12, width=768, heads=12, patch=4), SHAPES, lr=3e-4)


def l() -> Config:  # noqa: E743
    """Size L at 64 pixels: 1024 wide, 24 layers, 16 heads, patches of 4."""
    return _on_gpu(ModelConfig(depth=24, width=1024, heads=16, patch=4), SHAPES, lr=2e-4)


def pixels_256() -> Config:
    """256 pixels in patches of 16, no latents: 768 wide, 12 layers, the network predicts the image.

    A patch is 768 values, as wide as the network: it could not represent the noise of a velocity.
    """
    model = ModelConfig(depth=12, width=768, heads=12, patch=16, predict="x", t_mean=-0.8, t_std=0.8)
    data = ImageConfig(images="random:2_000:1000", size=256, flip=True)
    return replace(_on_gpu(model, data, lr=2e-4, steps=100_000, every=5000), ema=0.9995, ema2=0.9999)


# Patches of the checks: their images are as many times smaller as the real patches are larger.
MAX_PATCH = 4
SHAPES = ImageConfig(images="shapes", size=64)
SCHEDULE = Schedule(kind="linear", warmup=0.02, decay=0.3, floor=0.0)


def _on_gpu(model: ModelConfig, data: ImageConfig, lr: float, steps: int = 20_000, every: int = 2000) -> Config:
    return Config(
        model=model,
        data=data,
        optim=Optim(lr=lr, weight_decay=0.0),
        schedule=SCHEDULE,
        every=Every(log=50, eval=every, sample=every, save=every),
        steps=steps,
        batch=256,
        ema=0.999,
        precision="bf16",
        compile="whole",
    )


def _for_timing(config: Config, log: int) -> Config:
    """A constant learning rate, and nothing but steps."""
    schedule = Schedule(kind="constant", warmup=0.02)
    return replace(config, schedule=schedule, every=Every(log=log, eval=0, sample=0, save=0))


def check_settings(config: Config) -> dict[str, object]:
    """A small copy for the checks: smaller images, of small patches."""
    patch = config.model.patch if config.data.encode else min(config.model.patch, MAX_PATCH)
    return ({"model.patch": patch} if patch < config.model.patch else {}) | config.data.check_settings(patch)
