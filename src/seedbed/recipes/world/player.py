"""Interactive play of a trained world model: the memory, scaling and network of training, one frame at a time.

Shape suffixes: A control axes, T frames, H W pixels, C colours, N frames of one scale.
"""

import copy
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seedbed.errors import UserError
from seedbed.recipes.world.export_web import OnnxNet
from seedbed.recipes.world.memory import Memory, to_bytes, to_float
from seedbed.recipes.world.recording.poses import relative
from seedbed.recipes.world.recording.recording import MIN_FRAMES, PARTS, Recording, scale_actions, spread, write_recording
from seedbed.recipes.world.simulators.box import rebuild_simulator
from seedbed.train.player import NOTHING, RECORDING, SIMULATOR, Axis, Player, Rollout

if TYPE_CHECKING:
    from seedbed.recipes.world.data import WorldData
    from seedbed.recipes.world.emulator import Emulator

MAX_SEEDS = 48
# Recorded frames that should follow a start, for comparison, where there are so many.
AFTER = (256, 64, 8, 1)
MAX_RAMP = 12
RARE = 0.99
MAX_FRAMES = 20_000
MIN_FREE = 1 << 30  # bytes that a recording leaves on the disk


class WorldPlayer:
    """A trained world model for any number of clients; `train/player.py` documents the interface."""

    def __init__(self, system: "Emulator", runtime: str) -> None:
        # A copy: the averaged weights may be swapped in for a moment only. The recording is shared.
        self.system = copy.deepcopy(system, {id(system.data): system.data, id(system.config): system.config}).eval()
        self.recording: Recording = system.data.recording
        self.axes, self.runtime = self.recording.axes, runtime
        self.height, self.width = system.height, system.width
        self.device = next(system.parameters()).device
        predictor = OnnxNet(self.system) if runtime == "onnx" else self.system
        self.predict: Callable[..., Tensor] = predictor.predict_frame
        self.starts = start_rows(self.recording, system.layout.num_frames)
        self.num_seeds = len(self.starts)
        self.world = rebuild_simulator(self.recording)
        self.references: tuple[str, ...] = (NOTHING, SIMULATOR, RECORDING) if self.world else (NOTHING, RECORDING)

    def facts(self) -> dict[str, Any]:
        recording = self.recording
        return {
            "seconds": recording.facts["recording"]["median_dt"] or 1 / 30,
            **recorded_controls(self.system.data),
            "level": 0.0,
            "max_level": self.system.config.model.context_noise,
            "noisy": True,
            "runtime": "ONNX Runtime, one core" if self.runtime == "onnx" else f"torch on {self.device.type}",
            "about": f"learned from {recording.num_frames:,} frames; rollouts start from held-out frames",
        }

    def new_rollout(self) -> "WorldRollout":
        return WorldRollout(self)

    def recorder(self, path: Path, of: str, run: str) -> "Recorder":
        return Recorder(path, self, of, run, self.recording.facts.get("simulator"))


class WorldRollout:
    """One client's rollout. Its noise depends on seed and step only, so repeated controls give the same frames."""

    def __init__(self, player: WorldPlayer) -> None:
        self.player, self.recording = player, player.recording
        self.level, self.locked = 0.0, False
        self.reset(0)

    def reset(self, seed: int, reference: str = NOTHING) -> None:
        self.seed, self.reference, self.num_steps = seed, reference, 0
        self.at = int(self.player.starts[seed])
        reach = self.player.system.layout.num_frames
        frames_THWC = np.array(self.recording.frames_THWC[self.at - reach + 1 : self.at + 1])
        # Frames of the reference, as many as the memory holds.
        self._reference: deque[np.ndarray] = deque(frames_THWC, maxlen=reach)
        self.action_A = self.applied_A = np.zeros(len(self.player.axes), np.float32)
        pose_T44 = self.recording.pose_T44
        self.pose_44 = np.array(pose_T44[self.at]) if reference == SIMULATOR and pose_T44 is not None else None
        self._reset_memory()

    def anchor(self) -> None:
        if self.reference == NOTHING:
            raise UserError("there is no reference to reset the memory to; choose the simulator or the recording first")
        self._reset_memory()

    def _reset_memory(self) -> None:
        frames_1THWC, system = torch.from_numpy(np.stack(self._reference)[None]).to(self.player.device), self.player.system
        # Of the newest reference frame, for pose tracking.
        pose = system.pose_of(np.array([self.at])) if self.pose_44 is None else system.as_pose(self.pose_44[None])
        self.memory = Memory.start(to_float(frames_1THWC), system.layout, pose)
        self.frame_HWC = self._reference[-1]

    @property
    def reference_HWC(self) -> np.ndarray | None:
        return None if self.reference == NOTHING else self._reference[-1]

    @torch.inference_mode()
    def step(self, action_A: np.ndarray) -> bool:
        if self.reference == RECORDING:
            if self.at + 1 >= self._end() or not self.recording.holds(self.at + 1):
                return False
            action_A = np.array(self.recording.actions_TA[self.at])
        index_1, turn = torch.tensor([self.seed], device=self.player.device), 0 if self.locked else self.num_steps
        frame_13HW = self.player.predict(self.memory, self.scaled(action_A), index_1, turn, self.level)
        self.memory = self.player.system.advance(self.memory, self.scaled(action_A), frame_13HW)
        self.frame_HWC = to_bytes(self.memory.last)[0].cpu().numpy()
        self.action_A = self.applied_A = action_A
        self.num_steps += 1
        # Advance the simulator by the same control, or the recording by one frame.
        if self.reference == RECORDING:
            self.at += 1
            self._reference.append(np.array(self.recording.frames_THWC[self.at]))
        elif self.player.world is not None and self.pose_44 is not None:
            world, motion_6 = self.player.world, action_A[:6].astype(np.float64)
            pose_244 = np.stack((self.pose_44, world.slide(self.pose_44[None], motion_6[None])[0]))
            # A wall may block the motion, so the applied control can differ from the requested one.
            self.applied_A = np.concatenate((relative(pose_244)[0], action_A[6:])).astype(np.float32)
            self._reference.append(world.render(torch.from_numpy(pose_244[1:]))[0].numpy())
            self.pose_44 = pose_244[1]
        return True

    def _end(self) -> int:
        """Where the recorded controls end: with the episode, inside its split."""
        if self.recording.last_T[self.at]:
            return self.at + 1
        spans = map(self.recording.span, PARTS)
        return next((high for low, high in spans if low <= self.at < high), self.at + 1)

    def scaled(self, action_A: np.ndarray) -> Tensor:
        """The network's input (1, A) for a control in recorded units."""
        return torch.from_numpy(scale_actions(action_A[None], self.player.axes)).to(self.player.device)

    def memory_images(self) -> list[np.ndarray]:
        return [to_bytes(kept_1MHW[0].unflatten(0, (-1, 3))).cpu().numpy() for kept_1MHW in self.memory.kept.values()]


def recorded_controls(data: "WorldData") -> dict[str, Any]:
    recording, (low, high) = data.recording, data.recording.span("train")
    actions_TA = recording.actions_TA[low:high][~recording.last_T[low:high]].astype(np.float64)
    return data.once("controls", lambda: control_facts(actions_TA, recording.axes))


def control_facts(actions_TA: np.ndarray, axes: tuple[Axis, ...]) -> dict[str, Any]:
    """Statistics of the recorded controls: how fast each axis moved, which are buttons, which combinations are rare."""
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


def start_rows(recording: Recording, reach: int) -> np.ndarray:
    """Start frames, evenly spaced over held-out splits where there are any."""
    for part in ("valid", "test", "train"):
        for after in AFTER:
            found_N = recording.starts(part, reach, after)
            if len(found_N):
                return spread(found_N, MAX_SEEDS)[: recording.kept.get("seeds")]
    raise UserError(f"{recording.path} holds no {reach} frames in a row to start from; record longer episodes")


def _ramp(values_T: np.ndarray) -> int:
    """Steps after which the autocorrelation of an axis has fallen to one half."""
    values_T = values_T - values_T.mean()
    power = float((values_T**2).mean())
    for lag in range(1, min(MAX_RAMP, len(values_T) - 1)):
        if power == 0 or float((values_T[lag:] * values_T[:-lag]).mean()) < 0.5 * power:
            return lag
    return MAX_RAMP if power else 1


def _joint(actions_TA: np.ndarray, alive_A: np.ndarray) -> dict[str, Any]:
    """For the Mahalanobis distance: the inverse covariance, and the 99th percentile of recorded distances."""
    used_A = np.flatnonzero(alive_A)
    mean_A, inverse_AA = actions_TA.mean(0), np.zeros((actions_TA.shape[1],) * 2)
    used_TA = actions_TA[:, used_A] - mean_A[used_A]
    inverse_AA[np.ix_(used_A, used_A)] = np.linalg.pinv(used_TA.T @ used_TA / max(1, len(used_TA)), rcond=1e-8)
    distance_T = np.einsum("ti,ij,tj->t", used_TA, inverse_AA[np.ix_(used_A, used_A)], used_TA)
    limit = float(np.quantile(distance_T, RARE)) if len(distance_T) else 0.0
    return {"mean": mean_A.tolist(), "inverse": inverse_AA.tolist(), "limit": limit}


class Recorder:
    """One frame per step. The control of a step belongs to the frame before it."""

    def __init__(self, path: Path, player: Player, of: str, run: str, simulator: dict[str, Any] | None) -> None:
        self.path, self.player, self.of, self.run, self.simulator = path, player, of, run, simulator
        self.num_frames, self.num_episodes = 0, 0
        self._actions, self._commands, self._poses, self._episodes = [], [], [], []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    @property
    def full(self) -> bool:
        return self.num_frames >= MAX_FRAMES

    def begin(self, rollout: Rollout) -> None:
        """A first frame, from which an episode starts."""
        self.num_episodes += 1
        self._take(rollout)

    def add(self, rollout: Rollout) -> None:
        self._actions[-1] = rollout.applied_A if self.of == "simulator" else rollout.action_A
        self._commands[-1] = rollout.action_A
        self._take(rollout)

    def _take(self, rollout: Rollout) -> None:
        frame_HWC = rollout.frame_HWC if self.of == "rollout" else rollout.reference_HWC
        assert frame_HWC is not None, "the reference cannot change while the simulator is recorded"
        self._file.write(frame_HWC.tobytes())
        if self.of == "simulator":
            assert rollout.pose_44 is not None
            self._poses.append(rollout.pose_44)
        # The control that follows this frame is set by the next step; it stays zero where an episode ends.
        for rows in (self._actions, self._commands):
            rows.append(np.zeros(len(self.player.axes), np.float32))
        self._episodes.append(self.num_episodes - 1)
        self.num_frames += 1

    def save(self) -> tuple[Path, int]:
        """The recording's folder and its number of frames; an error says why there is none."""
        if self.num_frames < MIN_FRAMES:
            raise UserError(f"{self.num_frames} frames are too few for a recording; record at least {MIN_FRAMES}")
        shape = (self.num_frames, self.player.height, self.player.width, 3)
        self._file.flush()
        self.path.parent.mkdir(exist_ok=True)
        if shutil.disk_usage(self.path.parent).free < np.prod(shape) + MIN_FREE:
            raise UserError(f"the disk of {self.path.parent} is too full for this recording")
        simulated = self.of == "simulator"
        write_recording(
            self.path,
            iter(np.memmap(self._file, np.uint8, "r", shape=shape)),
            np.stack(self._actions),
            np.arange(self.num_frames) * float(self.player.facts()["seconds"]),
            np.array(self._episodes),
            [(axis.name, axis.unit) for axis in self.player.axes],
            pose=np.stack(self._poses) if simulated else None,
            command=np.stack(self._commands) if simulated else None,
            source={"name": "played", "of": self.of, "run": self.run},
            simulator=self.simulator if simulated else None,
        )
        self._file.close()
        return self.path, self.num_frames

    def discard(self) -> None:
        self._file.close()
