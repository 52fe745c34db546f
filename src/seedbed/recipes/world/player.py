"""Walking through what a run has learned: the same memory, scaling and network as in training, one frame at a time.

Shape suffixes: A control axes, T frames, H W pixels, C colours, N frames of one scale.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seedbed.data.boxworld import simulator_of
from seedbed.data.poses import relative
from seedbed.data.recording import PARTS, Axis, Recording, scale_actions
from seedbed.errors import UserError
from seedbed.recipes.world.memory import Memory, to_bytes, to_float
from seedbed.train.playing import NOTHING, RECORDING, SIMULATOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from seedbed.recipes.world.emulator import Emulator

MAX_SEEDS = 48
# A walk that begins at a seed should have this many recorded frames to be compared with, where there are such.
AFTER = (256, 64, 8, 1)
MAX_RAMP = 12
RARE = 0.99


class WorldPlayer:
    """A trained emulator that any number of visitors may enter; `train/playing.py` says what each part is for."""

    def __init__(self, system: Emulator, runtime: str) -> None:
        # A copy: the weights of a run may be the averaged ones for a moment only. The recording is shared.
        self.system = copy.deepcopy(system, {id(system.data): system.data, id(system.config): system.config}).eval()
        self.recording: Recording = system.data.recording
        self.axes, self.runtime = self.recording.axes, runtime
        self.height, self.width = system.height, system.width
        self.device = next(system.parameters()).device
        self.predict: Callable[..., Tensor] = self.system.dream
        if runtime == "onnx":
            from seedbed.recipes.world.export_web import OnnxNet

            self.predict = OnnxNet(self.system).dream
        self.starts = _seeds(self.recording, system.layout.num_frames)
        self.num_seeds = len(self.starts)
        self.world = simulator_of(self.recording)
        self.besides = (NOTHING, SIMULATOR, RECORDING) if self.world else (NOTHING, RECORDING)

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        recording = self.recording
        low, high = recording.spans("train")[0]
        actions_TA = recording.actions_TA[low:high][~recording.last_T[low:high]].astype(np.float64)
        return {
            "seconds": recording.facts["recording"]["median_dt"] or 1 / 30,
            **control_facts(actions_TA, recording.axes),
            "level": 0.0,
            "max_level": self.system.config.model.context_noise,
            "noisy": True,
            "runtime": "ONNX Runtime, one core" if self.runtime == "onnx" else f"torch on {self.device.type}",
            "about": f"learned from {recording.num_frames:,} frames; the starts are frames it was not trained on",
        }

    def facts(self) -> dict[str, Any]:
        return self._facts

    def simulator(self) -> dict[str, Any] | None:
        return self.recording.facts.get("simulator")

    def enter(self) -> Dream:
        return Dream(self)


class Dream:
    """One visitor's walk. Its noise follows from the seed and the step, so a walk repeated is the same walk."""

    def __init__(self, player: WorldPlayer) -> None:
        self.player, self.recording = player, player.recording
        self.level, self.locked = 0.0, False
        self.reset(0)

    def reset(self, seed: int, beside: str = NOTHING) -> None:
        self.seed, self.beside, self.num_steps = seed, beside, 0
        self.at = int(self.player.starts[seed])
        reach = self.player.system.layout.num_frames
        frames_THWC = np.array(self.recording.frames_THWC[self.at - reach + 1 : self.at + 1])
        # What really happened, as far back as the memory reaches.
        self._real: deque[np.ndarray] = deque(frames_THWC, maxlen=reach)
        self.action_A = self.done_A = np.zeros(len(self.player.axes), np.float32)
        pose_T44 = self.recording.pose_T44
        self.pose_44 = np.array(pose_T44[self.at]) if beside == SIMULATOR and pose_T44 is not None else None
        self.anchor_to_real()

    def anchor(self) -> None:
        if self.beside == NOTHING:
            raise UserError("nothing real stands beside the dream; switch the simulator or the recording on first")
        self.anchor_to_real()

    def anchor_to_real(self) -> None:
        frames_1THWC = torch.from_numpy(np.stack(self._real)[None]).to(self.player.device)
        self.memory = Memory.start(to_float(frames_1THWC), self.player.system.layout, self._pose())
        self.frame_HWC = self._real[-1]

    def _pose(self) -> Tensor | None:
        """Of the newest real frame, for an odometer."""
        if self.pose_44 is None:
            return self.player.system.pose_of(np.array([self.at]))
        return self.player.system.as_pose(self.pose_44[None])

    @property
    def beside_HWC(self) -> np.ndarray | None:
        return None if self.beside == NOTHING else self._real[-1]

    @torch.inference_mode()
    def step(self, action_A: np.ndarray) -> bool:
        if self.beside == RECORDING:
            if self.at + 1 >= self._end():
                return False
            action_A = np.array(self.recording.actions_TA[self.at])
        frame_13HW = self.player.predict(self.memory, self.scaled(action_A), *self._counters(), self.level)
        self.memory = self.player.system.onward(self.memory, self.scaled(action_A), frame_13HW)
        self.frame_HWC = to_bytes(self.memory.last)[0].cpu().numpy()
        self.action_A = self.done_A = action_A
        self.num_steps += 1
        self._really(action_A)
        return True

    def _end(self) -> int:
        """The recording steers to the end of the episode, inside its own part."""
        if self.recording.last_T[self.at]:
            return self.at + 1
        spans = [span for part in PARTS for span in self.recording.spans(part)]
        return next((high for low, high in spans if low <= self.at < high), self.at + 1)

    def scaled(self, action_A: np.ndarray) -> Tensor:
        """The network's input (1, A) for a control in recorded units."""
        return torch.from_numpy(scale_actions(action_A[None], self.player.axes)).to(self.player.device)

    def _counters(self) -> tuple[Tensor, int]:
        return torch.tensor([self.seed], device=self.player.device), 0 if self.locked else self.num_steps

    def _really(self, action_A: np.ndarray) -> None:
        """What the same control does in the simulator, or what was recorded next."""
        if self.beside == RECORDING:
            self.at += 1
            self._real.append(np.array(self.recording.frames_THWC[self.at]))
        elif self.beside == SIMULATOR and self.player.world is not None and self.pose_44 is not None:
            before_44, world = self.pose_44, self.player.world
            pose_144 = world.move(torch.from_numpy(before_44[None]), torch.from_numpy(action_A[None]))
            self.pose_44 = pose_144[0].numpy()
            # A wall may have been in the way: what was done is not always what was asked for.
            done_6 = relative(np.stack((before_44, self.pose_44)))[0]
            self.done_A = np.concatenate((done_6, action_A[6:])).astype(np.float32)
            self._real.append(world.render(pose_144)[0].numpy())

    def memory_pictures(self) -> list[np.ndarray]:
        """Each scale's frames, as bytes, oldest first."""
        shown = []
        for kept_1MHW in self.memory.kept.values():
            frames_N3HW = kept_1MHW[0].unflatten(0, (-1, 3))
            shown.append(to_bytes(frames_N3HW).cpu().numpy())
        return shown


def control_facts(actions_TA: np.ndarray, axes: tuple[Axis, ...]) -> dict[str, Any]:
    """How people steered: how fast they moved each axis, what is a button, what never came together."""
    steered_A = np.array([not axis.is_time for axis in axes])
    alive_A = steered_A & ~np.array([axis.dead for axis in axes])
    button_A = alive_A & np.isin(actions_TA, (0.0, 1.0)).all(0)
    one_of = bool(button_A.any() and (actions_TA[:, steered_A].sum(1) == 1.0).all())
    return {
        "ramp": [_ramp(column_T) for column_T in actions_TA.T],
        "buttons": button_A.tolist(),
        "one_of": one_of,
        "joint": None if one_of else _joint(actions_TA, alive_A),
    }


def _seeds(recording: Recording, reach: int) -> np.ndarray:
    """Frames to start from, at even distances over frames that were not trained on, where there are any."""
    for part in ("valid", "test", "train"):
        for after in AFTER:
            found_N = recording.starts(part, reach, after)
            if len(found_N):
                num = min(MAX_SEEDS, len(found_N))
                return found_N[np.arange(num) * len(found_N) // num]
    raise UserError(f"{recording.path} holds no {reach} frames in a row to start from; record longer episodes")


def _ramp(values_T: np.ndarray) -> int:
    """Steps after which an axis has lost half of its correlation with itself: how fast people moved it."""
    values_T = values_T - values_T.mean()
    power = float((values_T**2).mean())
    for lag in range(1, min(MAX_RAMP, len(values_T) - 1)):
        if power == 0 or float((values_T[lag:] * values_T[:-lag]).mean()) < 0.5 * power:
            return lag
    return MAX_RAMP if power else 1


def _joint(actions_TA: np.ndarray, alive_A: np.ndarray) -> dict[str, Any]:
    """Which combinations of controls are rare: the inverse covariance, and the distance that one in a hundred exceeds."""
    used_A = np.flatnonzero(alive_A)
    mean_A, inverse_AA = actions_TA.mean(0), np.zeros((actions_TA.shape[1],) * 2)
    used_TA = actions_TA[:, used_A] - mean_A[used_A]
    inverse_AA[np.ix_(used_A, used_A)] = np.linalg.pinv(used_TA.T @ used_TA / max(1, len(used_TA)), rcond=1e-8)
    distance_T = np.einsum("ti,ij,tj->t", used_TA, inverse_AA[np.ix_(used_A, used_A)], used_TA)
    limit = float(np.quantile(distance_T, RARE)) if len(distance_T) else 0.0
    return {"mean": mean_A.tolist(), "inverse": inverse_AA.tolist(), "limit": limit}
