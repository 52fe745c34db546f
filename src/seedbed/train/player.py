"""The interactive player of a recipe: a player per run, a rollout per client.

Shape suffixes: A control axes, H W pixels, C colours.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# What a rollout is compared with: nothing, the simulator that was recorded, or the recording itself, whose controls then apply.
NOTHING, SIMULATOR, RECORDING = "nothing", "simulator", "recording"


@dataclass(frozen=True)
class Axis:
    """One control axis; statistics come from the training part. The network's input is clip(a / scale, -4, 4)."""

    name: str
    unit: str
    scale: float  # 95th percentile of |a|; of dt the median, and the input is a / median - 1
    full: tuple[float, float]  # full deflection in play: 90th percentile of the negative and of the positive side
    half: tuple[float, float]  # medians of both sides
    limit: float  # 99th percentile of |a|
    dead: bool

    @property
    def is_time(self) -> bool:
        return self.name == "dt"


class Rollout(Protocol):
    """One client's rollout: it starts from real frames and continues from its own. No state is shared between rollouts."""

    frame_HWC: np.ndarray  # uint8, the last predicted frame
    action_A: np.ndarray  # the control that led to it, in recorded units
    applied_A: np.ndarray  # the motion that the simulator applied: a wall may block it
    pose_44: np.ndarray | None  # of the simulator
    seed: int
    num_steps: int  # since the last reset
    level: float  # of noise on the memory, an input of the network
    locked: bool  # the same noise at every step

    @property
    def reference_HWC(self) -> np.ndarray | None:
        """uint8, the frame of the simulator or recording; None without a reference."""
        ...

    def reset(self, seed: int, reference: str = NOTHING) -> None:
        """Start again from the real frames of this seed."""
        ...

    def step(self, action_A: np.ndarray) -> bool:
        """Predict one frame. False, and nothing changes, at the end of a recording that provides the controls."""
        ...

    def anchor(self) -> None:
        """Replace the memory by the reference's frames."""
        ...

    def memory_images(self) -> list[np.ndarray]:
        """The memory exactly as the network gets it: for every scale the frames from oldest to newest, uint8 [N, H, W, 3]."""
        ...


class Recorder(Protocol):
    """Collects the frames of a session until they are saved as a recording."""

    num_frames: int
    of: str

    @property
    def full(self) -> bool: ...
    def begin(self, rollout: Rollout) -> None: ...
    def add(self, rollout: Rollout) -> None: ...
    def save(self) -> tuple[Path, int]: ...
    def discard(self) -> None: ...


class Player(Protocol):
    """A trained run that serves any number of rollouts."""

    axes: tuple[Axis, ...]
    height: int
    width: int
    num_seeds: int
    references: tuple[str, ...]  # those that this run has

    def facts(self) -> dict[str, Any]:
        """What the page needs beside the axes, as plain values."""
        ...

    def new_rollout(self) -> Rollout:
        """A rollout at the first seed."""
        ...

    def recorder(self, path: Path, of: str, run: str) -> Recorder:
        """Records the frames of the rollout or of the simulator into a new folder."""
        ...
