"""Record the box world: scripted trajectories that cover all controls, rendered in batches.

Shape suffixes: N trajectories, T frames, A control axes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seedbed.cache import cache_folder
from seedbed.data.progress import Progress
from seedbed.data.store import digest
from seedbed.recipes.world.recording.recording import FORMAT, Recording, find_recording, write_recording

if TYPE_CHECKING:
    from seedbed.recipes.world.simulators.boxworld import BoxWorld

PIECE = 256  # frames rendered before they are written


def record_box(
    num_frames: int, height: int, width: int, seed: int, *, out: Path | None = None, cache: str = "", device: str = "cpu"
) -> Recording:
    """A recording of `num_frames` frames in the world of this seed: the existing one, or a new one."""
    from seedbed.recipes.world.simulators.boxworld import BoxWorld

    world = BoxWorld(seed, height, width, device)
    # At least ten trajectories where they stay long enough for the longest rollout.
    num_trajectories = max(1, round(num_frames / TRAJECTORY_FRAMES), min(10, num_frames // 300))
    # Rounding differs between devices, and with it an occasional edge pixel.
    key = digest([FORMAT, world.facts, num_frames, num_trajectories, world.device.type])
    path = (out or cache_folder(cache) / f"box-{height}x{width}-{num_frames}-{key[:12]}").absolute()
    found = find_recording(path, key)
    if found:
        return found
    length = -(-num_frames // num_trajectories)
    scripted = trajectories(world, length, num_trajectories, seed)
    pose_T44, applied_TA, requested_TA = (a.reshape(-1, *a.shape[2:])[:num_frames] for a in scripted)
    frame_T = np.arange(num_frames)
    return write_recording(
        path,
        _render(world, pose_T44),
        applied_TA,
        frame_T % length * world.FRAME_SECONDS,
        frame_T // length,
        world.AXES,
        pose=pose_T44,
        command=requested_TA,
        source={"name": f"box:{seed}"},
        simulator=world.facts,
        key=key,
    )


def _render(world: "BoxWorld", pose_T44: np.ndarray) -> Iterator[np.ndarray]:
    import torch

    progress = Progress("rendering", "frames")
    for low in range(0, len(pose_T44), PIECE):
        yield world.render(torch.from_numpy(pose_T44[low : low + PIECE])).cpu().numpy()
        progress(min(low + PIECE, len(pose_T44)), len(pose_T44))
    progress.close()


# Typical motion of one frame: metres, then radians.
SPEED_6 = np.array([0.12, 0.10, 0.05, 0.03, 0.035, 0.08])
SMOOTH = 0.6  # how much of the velocity stays from frame to frame
JITTER = 0.15  # random motion in every segment, as a share of the speed
MAX_PITCH, MAX_ROLL = 0.6, 0.45
UPRIGHT = 0.12  # share of roll that is undone per frame, outside of roll segments
STILL, FREE, CIRCLE = 12, 13, 14  # beside the twelve of axis and sign
# What a deck holds: every axis and sign twice, standing still, free motion, and a full turn now and then.
DECK = np.array([*range(12), *range(12), STILL, STILL, FREE, FREE, FREE, FREE, CIRCLE])
SHORT, LONG = 6, 20  # frames of a segment
TURN = 1.0  # yaw speed of a circle, as a share of the speed
TRAJECTORY_FRAMES = 512


def trajectories(world: "BoxWorld", num_frames: int, num_trajectories: int, seed: int) -> tuple[np.ndarray, ...]:
    """Poses (N, T, 4, 4), the applied and the requested motion (N, T, A), which differ at obstacles; zero at the last frame."""
    rngs = [np.random.Generator(np.random.PCG64([world.seed, seed, n])) for n in range(num_trajectories)]
    plan_NT = np.stack([_plan(rng, num_frames, n) for n, rng in enumerate(rngs)])
    noise_NT6 = np.stack([rng.standard_normal((num_frames, 6)) for rng in rngs])
    drift_NT6 = np.stack([_drift(rng, num_frames) for rng in rngs])
    pose_NT44 = np.empty((num_trajectories, num_frames, 4, 4))
    requested_NT6, applied_NT6 = np.zeros((2, num_trajectories, num_frames, 6))
    pose_N44, speed_N6 = np.stack([world.free_pose(rng) for rng in rngs]), np.zeros((num_trajectories, 6))
    pose_NT44[:, 0] = pose_N44
    for t in range(num_frames - 1):
        target_N6 = _target(plan_NT[:, t], drift_NT6[:, t], noise_NT6[:, t]) * SPEED_6
        speed_N6 = SMOOTH * speed_N6 + (1 - SMOOTH) * _upright(target_N6, pose_N44, plan_NT[:, t])
        requested_NT6[:, t] = speed_N6
        after_N44 = world.slide(pose_N44, speed_N6)
        # Only positions are corrected, so the rotation is exactly the requested one.
        moved_N3 = np.einsum("nji,nj->ni", pose_N44[:, :3, :3], after_N44[:, :3, 3] - pose_N44[:, :3, 3])
        applied_NT6[:, t] = np.concatenate((moved_N3, speed_N6[:, 3:]), -1)
        pose_NT44[:, t + 1] = pose_N44 = after_N44
    seconds_NT1 = np.full((num_trajectories, num_frames, 1), world.FRAME_SECONDS)
    seconds_NT1[:, -1] = 0.0
    return pose_NT44, np.concatenate((applied_NT6, seconds_NT1), -1), np.concatenate((requested_NT6, seconds_NT1), -1)


def _plan(rng: np.random.Generator, num_frames: int, number: int) -> np.ndarray:
    """The segment kind of each frame: shuffled decks one after another; turns left and right alternate."""
    pieces, total, deck = [], 0, number
    circle = round(2 * np.pi / (SPEED_6[5] * TURN))
    while total < num_frames:
        for kind in rng.permutation(DECK):
            length = circle if kind == CIRCLE else int(rng.integers(SHORT, LONG + 1))
            pieces.append(np.full(length, kind + deck % 2 if kind == CIRCLE else kind))
            total += length
        deck += 1
    # A trajectory begins anywhere in its deck, so that short ones differ.
    return np.roll(np.concatenate(pieces), -int(rng.integers(total)))[:num_frames]


def _drift(rng: np.random.Generator, num_frames: int) -> np.ndarray:
    """Random motion on all six axes: smooth noise at the typical speed."""
    keep, value_6, rows = 0.9, rng.standard_normal(6), []
    for step_6 in rng.standard_normal((num_frames, 6)):
        value_6 = keep * value_6 + np.sqrt(1 - keep**2) * step_6
        rows.append(value_6)
    return np.array(rows)


def _target(plan_N: np.ndarray, drift_N6: np.ndarray, noise_N6: np.ndarray) -> np.ndarray:
    """The target velocity of each trajectory, in units of the typical speed."""
    target_N6 = JITTER * noise_N6
    scripted = np.flatnonzero(plan_N < STILL)
    target_N6[scripted, plan_N[scripted] // 2] += 1.0 - 2.0 * (plan_N[scripted] % 2)
    target_N6[plan_N == STILL] = 0.0
    target_N6[plan_N == FREE] = drift_N6[plan_N == FREE]
    for sign, kind in ((1.0, CIRCLE), (-1.0, CIRCLE + 1)):
        target_N6[plan_N == kind] = np.array([0, 0, 0, 0, 0, sign * TURN])
    return target_N6


def _upright(target_N6: np.ndarray, pose_N44: np.ndarray, plan_N: np.ndarray) -> np.ndarray:
    """Limit pitch and roll, and level the horizon."""
    down_N = -np.arcsin(np.clip(pose_N44[:, 2, 0], -1, 1))  # positive pitch looks down
    roll_N = np.arctan2(pose_N44[:, 2, 1], pose_N44[:, 2, 2])
    aimed_N6 = target_N6.copy()
    for axis, tilt_N, limit in ((3, roll_N, MAX_ROLL), (4, down_N, MAX_PITCH)):
        away_N = (np.abs(tilt_N) > limit) & (np.sign(aimed_N6[:, axis]) == np.sign(tilt_N))
        aimed_N6[away_N, axis] *= -1
    for axis, tilt_N, share in ((3, roll_N, UPRIGHT), (4, down_N, UPRIGHT / 4)):
        idle_N = (plan_N // 2 != axis) & (plan_N != STILL)
        aimed_N6[idle_N, axis] -= share * tilt_N[idle_N]
    return aimed_N6
