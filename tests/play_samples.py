"""A player without a network: the frame shows the sum of the controls, so every step can be verified."""

from pathlib import Path
from typing import Any

import numpy as np

from seedbed.errors import UserError
from seedbed.recipes.world.player import Recorder
from seedbed.recipes.world.recording.recording import measure_axes
from seedbed.train.player import Axis

RNG = np.random.default_rng(0)
AXES = tuple(
    measure_axes(np.column_stack([RNG.normal(size=(500, 2)), np.full(500, 0.05)]), [("x", "m"), ("yaw", "rad"), ("dt", "s")])
)


class CountingRollout:
    """Dreams a picture whose bytes are the seed, the number of steps and the rounded sum of the first control."""

    def __init__(self) -> None:
        self.level, self.locked = 0.0, False
        self.reset(0)

    def reset(self, seed: int, reference: str = "nothing") -> None:
        self.seed, self.reference, self.num_steps, self.total = seed, reference, 0, 0.0
        self.action_A = self.applied_A = np.zeros(3, np.float32)
        self.pose_44 = np.eye(4) if reference == "simulator" else None
        self._draw()

    def step(self, action_A: np.ndarray) -> bool:
        if self.reference == "recording" and self.num_steps == 5:
            return False
        self.action_A, self.applied_A = action_A, action_A * np.float32(0.5)
        self.num_steps += 1
        self.total += float(action_A[0])
        if self.pose_44 is not None:
            self.pose_44 = self.pose_44.copy()
            self.pose_44[0, 3] += float(self.applied_A[0])
        self._draw()
        return True

    def anchor(self) -> None:
        if self.reference == "nothing":
            raise UserError("there is no reference to reset the memory to")
        self.total = 0.0
        self._draw()

    def _draw(self) -> None:
        self.frame_HWC = np.full((8, 12, 3), (self.seed, self.num_steps % 256, round(self.total) % 256), np.uint8)

    @property
    def reference_HWC(self) -> np.ndarray | None:
        return None if self.reference == "nothing" else 255 - self.frame_HWC

    def memory_images(self) -> list[np.ndarray]:
        return [np.stack([self.frame_HWC] * 4), np.stack([self.frame_HWC[::4, ::4]] * 8)]


class CountingPlayer:
    axes: tuple[Axis, ...] = AXES
    height, width, num_seeds = 8, 12, 7
    references = ("nothing", "simulator", "recording")

    def facts(self) -> dict[str, Any]:
        return {
            "seconds": 0.05,
            "ramp": [1, 1, 1],
            "joint": None,
            "level": 0.0,
            "noisy": False,
            "runtime": "counting",
            "about": "",
        }

    def new_rollout(self) -> CountingRollout:
        return CountingRollout()

    def recorder(self, path: Path, of: str, run: str) -> Recorder:
        return Recorder(path, self, of, run, {"name": "counting"})
