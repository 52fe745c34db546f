"""Model sizes and presets of the world recipe. No torch import, so that listing them is fast."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from seedbed.config import Config, Every, Optim, Schedule, Units, number
from seedbed.errors import UserError

NAMED_SIZES = {"nano": 0.5e6, "small": 1.5e6, "base": 5e6}
NEVER = 1.0
PLAYABLE = True  # its System has the capability of that name
SMALL_SIDE = 12  # pixels of the images in the checks


def num_parameters(size: str) -> float:
    """Approximate number of parameters: `nano` .. `base`, or millions such as `5m` or `0.8m`."""
    if size in NAMED_SIZES:
        return NAMED_SIZES[size]
    if not re.fullmatch(r"\d+(\.\d+)?m", size) or not 0.05 <= float(size[:-1]) <= 1000:
        raise UserError(f"model.size={size} is not {', '.join(NAMED_SIZES)} or millions of parameters such as 5m or 0.8m")
    return 1e6 * float(size[:-1])


@dataclass(frozen=True)
class ModelConfig:
    """The generator and the curriculum of its objective; images and controls come from the recording.

    `size` sets channels and scales, with the image size. `memory` full-size frames are remembered; a `pyramid` adds coarser
    ones that reach eight times as far back, and `memory_dropout` is the share of them that training hides. `transport` moves
    pixels by predicted kernels before a residual is added. `static`: nothing in the scene moves by itself and controls are the
    camera's motion, so frames stay the same without control. `pose_tracking` integrates the controls from the first frame's
    pose and renders a tri-plane radiance field from there; planes have `plane_resolution` cells along a side, and four times
    as many in the fine pass, which takes `fine_samples` per pixel (0: 8 in networks from about 1.25m on, else no such pass).
    `context_noise` is the largest noise level on the memory in training, an input of the network.
    Closed loop may begin once the share `closed` of the run is done, on rollouts of up to `rollout` frames; adversarial
    training once the share `adversarial` is done (1: never), after `critic_warmup` steps of the critic alone, with gradients
    held at `ratio` of the error's. The diffusion model (`kind=edm`) samples a frame in `samples` steps; its rollouts feed back
    one denoising of the noised true frame, or a sampled frame.
    """

    kind: Literal["direct", "edm"] = "direct"
    size: str = "nano"
    memory: int = number(4, low=1, high=32)
    pyramid: bool = False
    cells: int = number(2, low=1, high=16)
    transport: bool = True
    static: bool = False
    pose_tracking: bool = False
    plane_resolution: int = number(128, low=8, high=4096)
    fine_samples: int = number(0, low=0, high=64)
    context_noise: float = number(0.2, low=0.0, high=2.0)
    memory_dropout: float = number(0.0, low=0.0, high=0.9)
    closed: float = number(0.25, low=0.0, high=1.0)
    rollout: int = number(32, low=1, high=64)
    adversarial: float = number(NEVER, low=0.0, high=1.0)
    ratio: float = number(0.3, low=0.0, high=10.0)
    gamma: float = number(0.5, low=0.0, high=1000.0)
    critic_lr: float = number(0.3, low=0.001, high=100.0)
    critic_warmup: int = number(500, low=0)
    samples: int = number(3, low=1, high=100)
    feedback: Literal["denoised", "drawn"] = "denoised"
    channels_last: bool = False

    def check(self) -> None:
        """Constraints between the fields."""
        num_parameters(self.size)
        if self.memory_dropout and not self.pyramid:
            raise UserError("model.memory_dropout applies to coarse memories; it needs model.pyramid=true")
        if self.kind == "edm" and self.adversarial < NEVER:
            raise UserError("model.kind=edm has no adversarial stage; set model.adversarial=1")
        if self.adversarial < self.closed:
            raise UserError(
                f"model.adversarial={self.adversarial:g} comes before model.closed={self.closed:g}; it is the last stage"
            )


@dataclass(frozen=True)
class DataConfig:
    """The recording: `box` or the smaller `room` (ray-cast here), `doom`, `atari:GAME`, `gym:ID`, or the folder of a recording.

    Simulators are recorded once, `frames` long at `height` x `width` and from the seed `scene`, and kept in the cache; a
    folder has its own size. `actions=command` trains on the requested controls instead of the applied ones. At the end of a
    run `examined` held-out windows get the full evaluation; 0 skips it.
    """

    recording: str = "box"
    frames: int = number(20_000, low=200)
    height: int = number(64, low=8, high=4096)
    width: int = number(64, low=8, high=4096)
    scene: int = number(1, low=0, high=2**31)
    actions: Literal["pose", "command"] = "pose"
    examined: int = number(256, low=0)
    cache: str = ""

    def check(self) -> None:
        if not self.recording.strip():
            raise UserError("data.recording is empty; name box, doom, atari:GAME, gym:ID or the folder of a recording")


def units(config: Config) -> Units:
    return Units("frames", 1.0, "", "{name}: {frames}")


def demo() -> Config:
    """A small room on a laptop: recording and training within five minutes."""
    field = {"pose_tracking": True, "plane_resolution": 64, "fine_samples": 4}
    return Config(
        model=ModelConfig(size="nano", static=True, **field, closed=0.3, rollout=4),
        data=DataConfig(recording="room", frames=20_000, height=32, width=32, examined=32),
        optim=Optim(lr=2e-3, weight_decay=0.0, beta2=0.99),
        schedule=SCHEDULE,
        every=Every(log=20, eval=100, sample=0, save=350),
        steps=700,
        batch=32,
        ema=0.99,
    )


def box64() -> Config:
    """The box world at 64x64 on one GPU: open loop, then closed loop; model.adversarial=0.5 adds the critic."""
    return _on_gpu(POSED, DataConfig(recording="box", frames=120_000))


def edm() -> Config:
    """The same world by a diffusion model after DIAMOND: three steps a frame, to compare with box64."""
    base = box64()
    model = replace(base.model, kind="edm", rollout=2, channels_last=False)
    return replace(base, model=model, optim=replace(base.optim, lr=5e-4, weight_decay=0.01))


def doom() -> Config:
    """ViZDoom at 64x64, recorded here by random play on a static map.

    Needs `pip install "seedbed[doom]"`, or an existing recording: data.recording=FOLDER.
    """
    return _on_gpu(POSED, DataConfig(recording="doom", frames=24_000))


def atari() -> Config:
    """Breakout of the Atari at 64x64, recorded here by random play; discrete controls, one axis per button.

    Needs `pip install "seedbed[atari]"`. Another game: data.recording=atari:Pong.
    """
    return _on_gpu(ModelConfig(size="5m"), DataConfig(recording="atari:Breakout", frames=24_000))


def log5m() -> Config:
    """The journal's generator, 192x256 pixels and 32 frames of memory at four sizes, with a curriculum."""
    model = ModelConfig(size="5m", pyramid=True, memory_dropout=0.1, static=True, rollout=16)
    data = DataConfig(recording="box", frames=20_000, height=192, width=256)
    return replace(_on_gpu(model, data), batch=64, steps=30_000)


def mine() -> Config:
    """A recording of your own, from a phone, a game or a robot, of any size.

    Needs data.recording=DIR, a recording made by `seedbed data prepare PATH --out DIR`.
    """
    return _on_gpu(ModelConfig(size="5m"), DataConfig(recording="recording"))


POSED = ModelConfig(size="5m", static=True, pose_tracking=True, rollout=64)
SCHEDULE = Schedule(kind="linear", warmup=0.02, decay=0.4, floor=0.0)


def _on_gpu(model: ModelConfig, data: DataConfig) -> Config:
    return Config(
        model=replace(model, channels_last=True),
        data=data,
        optim=Optim(lr=1e-3, weight_decay=0.0, beta2=0.99),
        schedule=SCHEDULE,
        every=Every(log=50, eval=500, sample=10_000, save=10_000),
        steps=20_000,
        batch=128 if model.pose_tracking else 256,  # a radiance field is rendered for every prediction
        ema=0.999,
        precision="bf16",
        compile="blocks",
    )


def check_settings(config: Config) -> dict[str, object]:
    """A small copy for the checks: images of 12 pixels, short rollouts, coarse planes, and few channels.

    Networks with a fine pass keep it, which takes 100 channels at the coarsest scale.
    """
    model, data = config.model, config.data
    sizes = {
        **{"data.height": (data.height, SMALL_SIDE), "data.width": (data.width, SMALL_SIDE)},
        **{"data.examined": (data.examined, 8), "model.rollout": (model.rollout, 4), "model.cells": (model.cells, 1)},
        "model.plane_resolution": (model.plane_resolution, 16),
    }
    wanted: dict[str, object] = {key: small for key, (full, small) in sizes.items() if small < full}
    return wanted | ({"model.size": "1.3m"} if num_parameters(model.size) > 1.3e6 else {})
