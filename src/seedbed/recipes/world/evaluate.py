"""Rollouts on held-out windows against baselines: persistence (the last frame), the mean frame, and fade (their best mix).

Shape suffixes: B windows, T frames, A control axes, H W pixels.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seedbed.recipes.world.curriculum import NEAR
from seedbed.recipes.world.data import WindowSource, WorldData
from seedbed.recipes.world.memory import Memory, quantise, to_float
from seedbed.recipes.world.metrics import psnr, sharpness

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator

HORIZONS = (1, 4, 16, 64, 256)
# Windows and horizon of an evaluation while training; `examine` uses more and longer ones.
NUM_QUICK = {"cuda": 128, "mps": 64, "cpu": 48}
QUICK_HORIZON = 16
TOGETHER = {"cuda": 512, "mps": 64, "cpu": 64}


@dataclass
class Trajectories:
    """A batch of recorded windows: true frames in [-1, 1] and controls; the first `before` frames fill the memory."""

    frames_BTCHW: Tensor
    action_BTA: Tensor
    start_B: np.ndarray
    before: int
    pose_T44: np.ndarray | None = None  # of the whole recording

    @functools.cached_property
    def index_B(self) -> Tensor:
        """Noise counters: rows of the recording, so that they do not depend on the batch size."""
        return torch.from_numpy(self.start_B).to(self.action_BTA.device)

    def target(self, step: int) -> Tensor:
        """The true frame after `step` steps."""
        return self.frames_BTCHW[:, self.before - 1 + step]

    def action(self, step: int) -> Tensor:
        """The control that leads to it."""
        return self.action_BTA[:, self.before - 2 + step]

    def memory(self, system: Emulator, step: int = 1) -> Memory:
        """The true memory before `step`."""
        frames_BTCHW = self.frames_BTCHW[:, step - 1 : self.before - 1 + step]
        pose_BP = None if self.pose_T44 is None else system.as_pose(self.pose_T44[self.start_B + self.before - 2 + step])
        return Memory.start(frames_BTCHW, system.layout, pose_BP)


def trajectory_batch(
    system: Emulator, source: WindowSource, num: int, horizon: int, start_B: np.ndarray | None = None
) -> Trajectories:
    """`num` windows at once, or those that begin at `start_B`; a shorter horizon where the recording has none so long."""
    before = system.layout.num_frames
    horizon = source.available_horizon(before, horizon)
    start_B = source.windows(num, before, horizon) if start_B is None else start_B
    frames, action_BTA = source.read(start_B, before + horizon, next(system.parameters()).device)
    return Trajectories(to_float(frames), action_BTA, start_B, before, source.recording.pose_T44)


def trajectories(system: Emulator, source: WindowSource, num: int, horizon: int) -> Iterator[Trajectories]:
    """`num` fixed windows with `horizon` following frames, in batches; fewer where the recording is short."""
    start_N, batch = source.windows(num, system.layout.num_frames, horizon), TOGETHER[next(system.parameters()).device.type]
    for first in range(0, len(start_N), batch):
        yield trajectory_batch(system, source, num, horizon, start_N[first : first + batch])


def free_run(
    system: Emulator, traj: Trajectories, num_steps: int, actions: list[Tensor] | None = None, level: float = 0.0
) -> Iterator[tuple[int, Tensor]]:
    """A rollout on predicted frames: step and quantised frame; with the recorded controls unless others are given."""
    memory = traj.memory(system)
    for step in range(1, num_steps + 1):
        action_BA = traj.action(step) if actions is None else actions[step - 1]
        memory = system.rollout_step(memory, action_BA, traj.index_B, step, level)
        yield step, memory.last


def teacher_forced(system: Emulator, traj: Trajectories, step: int) -> Tensor:
    """The prediction of frame `step` from the true frames before it."""
    return quantise(system.predict_frame(traj.memory(system, step), traj.action(step), traj.index_B, step))


def baselines(data: WorldData, traj: Trajectories, horizon: int) -> dict[str, Tensor]:
    """Predictions of the baselines for this horizon, fitted on the training split."""
    last = traj.target(0)
    mean = (torch.from_numpy(data.mean_frame).movedim(-1, 0) / 127.5 - 1.0).to(last.device)
    weight = data.fade(horizon)
    return {"copy": last, "mean": mean.expand_as(last), "fade": weight * last + (1 - weight) * mean}


@torch.no_grad()
def quick(system: Emulator, source: WindowSource) -> dict[str, float]:
    """The evaluation during training. The first entry, lower is better, selects the best checkpoint."""
    device = next(system.parameters()).device
    horizon = source.available_horizon(system.layout.num_frames, QUICK_HORIZON)
    marks = [h for h in HORIZONS if h <= horizon]
    sums, total = collections.defaultdict(float), 0
    for traj in trajectories(system, source, NUM_QUICK[device.type], horizon):
        total += len(traj.start_B)
        for name, value in _quick(system, traj, horizon, marks).items():
            sums[name] += value.item() * len(traj.start_B)
    found = {name: value / total for name, value in sums.items()}
    found["gap"] = found.pop("gap_free") / max(found.pop("gap_forced"), 1e-9)
    near = 4 if "free_4" in found else 1
    found["listens"] = found[f"free_{near}"] - found.pop("shuffled")
    return found


def _quick(system: Emulator, traj: Trajectories, horizon: int, marks: list[int]) -> dict[str, Tensor]:
    errors, free, rest = [], {}, {}
    length = min(NEAR, horizon)
    for step, frame in free_run(system, traj, horizon):
        error = (frame - traj.target(step)).abs().mean()
        errors.append(error)
        if step in marks:
            free[f"free_{step}"] = psnr(frame, traj.target(step)).mean()
            for name, picture in baselines(system.data, traj, step).items():
                rest[f"{name}_{step}"] = psnr(picture, traj.target(step)).mean()
            rest[f"sharp_{step}"] = sharpness(frame).mean() / sharpness(traj.target(step)).mean()
        if step == length:
            rest["gap_free"] = error
            rest["gap_forced"] = (teacher_forced(system, traj, step) - traj.target(step)).abs().mean()
    near = 4 if 4 in marks else 1
    other = [traj.action(step).roll(1, 0) for step in range(1, near + 1)]
    shuffled = [frame for _, frame in free_run(system, traj, near, other)][-1]
    rest["shuffled"] = psnr(shuffled, traj.target(near)).mean()
    # The later half: early in the curriculum the first frames are good and long rollouts are not.
    return {"free_l1": torch.stack(errors[len(errors) // 2 :]).mean(), **free, **rest}
