"""Shapes and presets of the world recipe. Nothing here needs torch, so listing them costs nothing."""

import re
from dataclasses import dataclass
from typing import Literal

from seedbed.config import Config, Every, Optim, Schedule, number
from seedbed.errors import UserError

NAMED_SIZES = {"nano": 0.3e6, "micro": 0.6e6, "small": 1.5e6, "base": 5e6}
NEVER = 1.0


def num_parameters(size: str) -> float:
    """What the dial asks for, about: `nano` .. `base`, or millions such as `5m` or `0.8m`."""
    if size in NAMED_SIZES:
        return NAMED_SIZES[size]
    if not re.fullmatch(r"\d+(\.\d+)?m", size) or not 0.05 <= float(size[:-1]) <= 1000:
        raise UserError(f"model.size={size} is not {', '.join(NAMED_SIZES)} or millions of parameters such as 5m or 0.8m")
    return 1e6 * float(size[:-1])


@dataclass(frozen=True)
class ModelConfig:
    """The generator and its objective in stages; pictures and controls come from the recording.

    `size` is the one dial: channels and scales follow from it and the pictures. `memory` full-size frames are remembered; a
    `pyramid` adds coarser ones that reach eight times as far back. `transport` lets the network say where pixels come from,
    beside how they change. `context_noise` is the largest level of noise on the
    memory while training, told to the network. Closed loop may begin once the share `closed` of the run is done, on up to
    `rollout` frames of its own; the adversary once the share `adversarial` is done (1: never), with gradients held at `ratio`
    of the picture's error.
    """

    kind: Literal["direct", "edm"] = "direct"
    size: str = "nano"
    memory: int = number(4, low=1, high=32)
    pyramid: bool = False
    cells: int = number(2, low=1, high=16)
    transport: bool = True
    context_noise: float = number(0.2, low=0.0, high=2.0)
    blank: float = number(0.0, low=0.0, high=0.9)
    closed: float = number(0.4, low=0.0, high=1.0)
    rollout: int = number(8, low=1, high=64)
    adversarial: float = number(NEVER, low=0.0, high=1.0)
    ratio: float = number(0.1, low=0.0, high=10.0)
    gamma: float = number(0.5, low=0.0, high=1000.0)
    critic_lr: float = number(0.3, low=0.001, high=100.0)
    warm_critic: int = number(500, low=0)
    samples: int = number(3, low=1, high=100)
    channels_last: bool = False

    def check(self) -> None:
        """What the fields must satisfy together."""
        num_parameters(self.size)
        if self.blank and not self.pyramid:
            raise UserError("model.blank hides coarse memories, which only model.pyramid=true has")
        if self.kind == "edm" and self.adversarial < NEVER:
            raise UserError("the diffusion denoiser has no adversary; set model.adversarial=1")
        if self.adversarial < self.closed:
            raise UserError(
                f"model.adversarial={self.adversarial:g} comes before model.closed={self.closed:g}; the adversary is the last stage"
            )


@dataclass(frozen=True)
class DataConfig:
    """Which recording is learned: `box` (ray-cast here), `doom`, `atari:GAME`, `gym:NAME`, or the folder of a recording.

    Simulators are recorded once, `frames` long at `height` x `width`, and kept in the cache. `actions=command` learns from
    what was asked for instead of what came of it. `lag=trust` trains although pictures and controls seem shifted.
    """

    recording: str = "box"
    frames: int = number(20_000, low=200)
    height: int = number(32, low=8, high=4096)
    width: int = number(32, low=8, high=4096)
    scene: int = number(1, low=0, high=2**31)
    actions: Literal["pose", "command"] = "pose"
    lag: Literal["check", "trust"] = "check"
    cache: str = ""

    def check(self) -> None:
        if not self.recording.strip():
            raise UserError("data.recording is empty; name box, doom, atari:GAME, gym:NAME or the folder of a recording")


def demo() -> Config:
    """A walk through a small box world, learned on a laptop: recording and training within five minutes.

    `seedbed train world/demo` on two CPU cores: 32x32 pixels. Judged on other walks through the same place, on its own
    frames, beside copy-last, the mean frame and the best mix of both.
    """
    return Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(recording="box", frames=12_000),
        optim=Optim(lr=2e-3, weight_decay=0.0, beta2=0.99),
        schedule=_flat_then_down(),
        every=Every(log=20, eval=400, sample=0, save=400),
        steps=2000,
        batch=16,
        ema=0.995,
        device="cpu",
    )


def _flat_then_down() -> Schedule:
    return Schedule(kind="linear", warmup=0.02, decay=0.4, floor=0.0)
