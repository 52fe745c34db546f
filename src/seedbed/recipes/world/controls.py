"""Responses to controls: against exact counterfactual frames in the box world, by image shift elsewhere.

Shape suffixes: B windows, A control axes, H W pixels, T frames.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seedbed.recipes.world.evaluate import Trajectories, free_run
from seedbed.recipes.world.memory import to_float
from seedbed.recipes.world.metrics import psnr, sharpness, shift
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.recording import Recording, scale_actions
from seedbed.recipes.world.simulators.box import BoxWorld, rebuild_simulator
from seedbed.train.player import Axis

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator

# For how many steps a control is held.
HELD = (1, 8)
# A probe counts where the true frames of both signs differ by at least this much, on average over [-1, 1].
MIN_DIFFERENCE = 0.01
# Minimum correlation between an axis and the image shift in the recording itself.
MIN_CORRELATION = 0.3
STILL_STEPS = 256
MOVED, SHARP = 0.1, (0.5, 2.0)


def raw_action(recording: Recording, axis: Axis | None = None, value: float = 0.0) -> np.ndarray:
    """Controls in recorded units: this axis alone, with the median dt."""
    names = [a.name for a in recording.axes]
    raw_A = np.array([a.scale if a.is_time else 0.0 for a in recording.axes])
    if axis is not None:
        raw_A[names.index(axis.name)] = value
    else:
        raw_A[[n for n, name in enumerate(names) if name.lower() == "noop"][:1]] = 1.0
    return raw_A


def held(system: Emulator, raw_A: np.ndarray, num: int, like: Tensor) -> list[Tensor]:
    """The same scaled control for every window and `num` steps."""
    scaled_A = scale_actions(raw_A[None], system.data.recording.axes)[0]
    return [torch.from_numpy(scaled_A).to(like).expand(len(like), -1)] * num


def steerable(recording: Recording) -> list[Axis]:
    """Axes that can be controlled: neither dt nor constant ones."""
    return [axis for axis in recording.axes if not axis.dead and not axis.is_time]


def responses(system: Emulator, traj: Trajectories) -> dict[str, dict[str, Any]]:
    """Per axis: how often the frame follows the sign of the control, and the size of the response."""
    recording = system.data.recording
    world = rebuild_simulator(recording, traj.frames_BTCHW.device)
    if world is not None:
        return {axis.name: _exact(system, traj, axis, world) for axis in steerable(recording)}
    return _by_shift(system, traj)


def _exact(system: Emulator, traj: Trajectories, axis: Axis, world: BoxWorld) -> dict[str, Any]:
    """Whether a rollout is nearer to the true frame of its sign than of the other; slope 1 is the true response."""
    found: dict[str, Any] = {"judged": "exact"}
    raws = [raw_action(system.data.recording, axis, value) for value in axis.full]
    rollouts = [_held_frames(system, traj, raw_A) for raw_A in raws]
    for num in HELD:
        truths, free_B = [], np.ones(len(traj.start_B), bool)
        for raw_A in raws:
            pose_B44, moved_B = _true_pose(system, traj, world, raw_A, num)
            free_B &= moved_B
            truths.append(to_float(world.render(torch.from_numpy(pose_B44))).to(traj.frames_BTCHW))
        ends = [frames[num] for frames in rollouts]
        found |= {f"{name}_{num}": value for name, value in _compare(ends, truths, torch.from_numpy(free_B)).items()}
    return found


def _held_frames(system: Emulator, traj: Trajectories, raw_A: np.ndarray) -> list[Tensor]:
    """The last true frame, then the rollout with a held control; the shorter hold is the beginning of the longer."""
    actions = held(system, raw_A, max(HELD), traj.action(1))
    return [traj.target(0), *(frame for _, frame in free_run(system, traj, max(HELD), actions))]


def _true_pose(
    system: Emulator, traj: Trajectories, world: BoxWorld, raw_A: np.ndarray, num: int
) -> tuple[np.ndarray, np.ndarray]:
    """The pose that the control leads to, and whether the way was free."""
    recorded = system.data.recording.pose_T44
    assert recorded is not None
    pose_B44, free_B = recorded[traj.start_B + traj.before - 1], np.ones(len(traj.start_B), bool)
    for _ in range(num):
        motion_B6 = np.broadcast_to(raw_A[:6], (len(pose_B44), 6))
        after_B44 = world.slide(pose_B44, motion_B6)
        straight_B44 = poses.step(pose_B44, motion_B6)
        free_B &= np.abs(after_B44[:, :3, 3] - straight_B44[:, :3, 3]).max(-1) < 1e-6
        pose_B44 = after_B44
    return pose_B44, free_B


def _compare(rollouts: list[Tensor], truths: list[Tensor], free_B: Tensor) -> dict[str, Any]:
    distinct_B = (truths[1] - truths[0]).abs().flatten(1).mean(1) > MIN_DIFFERENCE
    kept_B = free_B.to(distinct_B.device) & distinct_B
    if not kept_B.any():
        return {"accuracy": None, "slope": None, "num": 0}
    right = []
    for own, other in ((0, 1), (1, 0)):
        near, far = ((rollouts[own] - truths[k]).square().flatten(1).mean(1) for k in (own, other))
        right.append((near < far)[kept_B].float())
    predicted, true = ((pair[1] - pair[0])[kept_B].flatten(1) for pair in (rollouts, truths))
    slope_B = (predicted * true).sum(1) / true.square().sum(1)
    return {"accuracy": torch.cat(right).mean().item(), "slope": slope_B.median().item(), "num": int(2 * kept_B.sum())}


def _by_shift(system: Emulator, traj: Trajectories) -> dict[str, dict[str, Any]]:
    """The sign of the image shift, for axes that shift the image in the recording; others cannot be measured."""
    recording, found = system.data.recording, {}
    steps = range(1, min(9, traj.frames_BTCHW.shape[1] - 3))
    moved_B2 = torch.cat([shift(traj.target(s - 1), traj.target(s)) for s in steps]).double()
    acted_BA = torch.cat([traj.action(s) for s in steps]).double()
    names = [axis.name for axis in recording.axes]
    for axis in steerable(recording):
        both_3B = torch.cat((acted_BA[:, names.index(axis.name), None], moved_B2), dim=1).T
        follows = torch.corrcoef(both_3B)[0, 1:].nan_to_num().tolist()  # what is constant follows nothing
        way = int(np.argmax(np.abs(follows)))
        if abs(follows[way]) < MIN_CORRELATION or not all(axis.full):
            found[axis.name] = {"judged": "not: the recording itself does not shift with it"}
            continue
        row: dict[str, Any] = {"judged": "shift"}
        rollouts = [_held_frames(system, traj, raw_action(recording, axis, value)) for value in axis.full]
        for num in HELD:
            ends = [torch.stack([shift(a, b)[:, way] for a, b in pairwise(frames[: num + 1])]).sum(0) for frames in rollouts]
            right_B = torch.sign(ends[1] - ends[0]) == math.copysign(1.0, follows[way])
            row |= {f"accuracy_{num}": right_B.float().mean().item(), f"num_{num}": len(right_B)}
        found[axis.name] = row
    return found


def worst_accuracy(found: dict[str, dict[str, Any]]) -> float | None:
    """Over all measured axes, at one step and at eight."""
    values = [row[f"accuracy_{num}"] for row in found.values() for num in HELD if row.get(f"accuracy_{num}") is not None]
    return min(values) if values else None


def idle_drift(system: Emulator, traj: Trajectories, num: int = STILL_STEPS) -> dict[str, Any]:
    """A rollout without controls: drift of brightness, contrast and sharpness from the first frame."""

    def look(frame: Tensor) -> Tensor:
        return torch.stack((frame.flatten(1).mean(1), frame.flatten(1).std(1), sharpness(frame)))

    first = traj.target(0)
    origin = look(first)
    worst_B = torch.zeros(len(first), dtype=torch.bool, device=first.device)
    moved, sharp, frame = [], [], first
    actions = held(system, raw_action(system.data.recording), num, traj.action(1))
    for _, frame in free_run(system, traj, num, actions):
        now = look(frame)
        away_2B, ratio_B = (now - origin).abs()[:2], now[2] / origin[2].clamp_min(1e-6)
        worst_B |= (away_2B > MOVED).any(0) | (ratio_B < SHARP[0]) | (ratio_B > SHARP[1])
        moved.append(away_2B.mean(1))
        sharp.append(ratio_B.mean())
    moved_T2, sharp_T = torch.stack(moved), torch.stack(sharp)
    level, contrast = moved_T2.amax(0).tolist()
    low, high = sharp_T.min().item(), sharp_T.max().item()
    return {
        "frames": num,
        "level": level,
        "contrast": contrast,
        "sharpness": [low, high],
        "psnr_to_first": psnr(frame, first).mean().item(),
        "share_of_windows": worst_B.float().mean().item(),
        "alarm": bool(max(level, contrast) > MOVED or low < SHARP[0] or high > SHARP[1]),
    }


def full_turns(system: Emulator, traj: Trajectories, circles: int = 3) -> dict[str, Any]:
    """Full turns: PSNR to the first frame after each, against the frame half a turn away."""
    recording = system.data.recording
    yaw = next((a for a in steerable(recording) if a.name in ("yaw", "turn") and a.unit in ("rad", "deg")), None)
    if yaw is None or not yaw.full[1]:
        return {}
    whole = 2 * math.pi if yaw.unit == "rad" else 360.0
    num = max(4, round(whole / yaw.full[1]))
    actions = held(system, raw_action(recording, yaw, whole / num), circles * num, traj.action(1))
    first, half, backs = traj.target(0), 0.0, []
    for step, frame in free_run(system, traj, circles * num, actions):
        if step == num // 2:
            half = psnr(frame, first).mean().item()
        if step % num == 0:
            backs.append(psnr(frame, first).mean().item())
    return {"steps_of_a_circle": num, "psnr_after": backs, "psnr_of_half_a_circle": half}
