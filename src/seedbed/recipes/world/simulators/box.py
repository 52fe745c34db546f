"""A procedural world of boxes, ray-cast in torch on CPU or GPU, and its recordings: scripted trajectories over all controls.

Structure of arrays: x, y and z are planes of their own, which is ten times faster than a trailing axis of three.
Shape suffixes: B poses, K boxes, R rays, H W pixels with f x f rays each, A control axes, N trajectories, T frames.
"""

import contextlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seedbed.cache import cache_folder
from seedbed.data.store import Progress, digest
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.capture import POSE_AXES
from seedbed.recipes.world.recording.recording import FORMAT, Recording, find_recording, write_recording
from seedbed.train.engine import cpu_threads

# Bump when the same seed gives other frames.
VERSION = 2
# Supersampling along each side of a pixel, for images with fewer pixels than the second number. With single rays edges
# alias from pixel to pixel in ways that cannot be predicted from small images.
SUPERSAMPLE, SMALL = 2, 128 * 128
REACH, NUM_BOXES = 10.0, 44  # half the side of the walled area, and what stands in it, walls included
ROOM = 4.0, 12  # the same of the small world called `room`
LOW, HIGH = 0.35, 2.2  # range of camera heights
RADIUS = 0.3  # smallest distance of the camera to a wall
HORIZON, ZENITH = (0.75, 0.82, 0.90), (0.25, 0.45, 0.80)
FOG = 28.0
CHECKER = 0.7
# Frames rendered together on a GPU.
TOGETHER = 64
# Light on faces towards -x, +x, -y, +y, -z, +z.
SHADES = (0.62, 0.88, 0.70, 0.80, 0.45, 1.0)


class BoxWorld:
    """Boxes in a walled area. `render` draws the view from a pose, `slide` applies a motion to a pose."""

    FRAME_SECONDS = 1 / 30

    def __init__(
        self,
        seed: int,
        height: int,
        width: int,
        device: str | torch.device = "cpu",
        num_boxes: int = NUM_BOXES,
        fov: float = 75.0,
        reach: float = REACH,
    ):
        self.seed, self.height, self.width, self.num_boxes, self.fov, self.reach = seed, height, width, num_boxes, fov, reach
        self.device = torch.device(device)
        self.center_K3, self.half_K3, paint_K23 = _boxes(seed, num_boxes, reach)
        self._center_K3 = torch.from_numpy(self.center_K3).to(self.device)
        self._half_K3 = torch.from_numpy(self.half_K3).to(self.device, torch.float32)
        hue = np.random.Generator(np.random.PCG64([VERSION, seed, 1])).uniform(0, 1, 1)
        ground_23 = _paint(hue, np.array([0.25, 0.3]), np.array([0.62, 0.42]))
        paint_6K = np.concatenate((paint_K23.reshape(num_boxes, 6).T, ground_23.reshape(6, 1)), 1)  # the ground comes last
        self._paint_6K = torch.tensor(paint_6K, dtype=torch.float32, device=self.device)
        self._shades = torch.tensor(SHADES, device=self.device)
        self._horizon_311, self._zenith_311 = (torch.tensor(c, device=self.device).view(3, 1, 1) for c in (HORIZON, ZENITH))
        self._supersample = SUPERSAMPLE if height * width < SMALL else 1
        height, width = height * self._supersample, width * self._supersample
        focal = width / 2 / math.tan(math.radians(fov) / 2)
        self._pixel = 1 / focal
        across_W = (torch.arange(width, dtype=torch.float64) + 0.5 - width / 2) / focal
        down_H = (torch.arange(height, dtype=torch.float64) + 0.5 - height / 2) / focal
        self._left_R = -across_W.repeat(height).to(self.device, torch.float32)
        self._up_R = -down_H.repeat_interleave(width).to(self.device, torch.float32)
        self._long_R = (1 + self._left_R**2 + self._up_R**2).sqrt()
        # Inward normals of the four sides of the view, in the body's frame.
        wide, tall = width / 2 / focal, height / 2 / focal
        edges_43 = np.array([[wide, 1, 0], [wide, -1, 0], [tall, 0, 1], [tall, 0, -1]], np.float64)
        self._edges_43 = edges_43 / np.linalg.norm(edges_43, axis=-1, keepdims=True)

    @property
    def facts(self) -> dict[str, Any]:
        """Parameters that rebuild this world, for the manifest of a recording."""
        size = {"height": self.height, "width": self.width} | ({"reach": self.reach} if self.reach != REACH else {})
        return {"name": "box", "version": VERSION, "seed": self.seed, "num_boxes": self.num_boxes, "fov": self.fov, **size}

    @torch.no_grad()
    def render(self, pose_B44: Tensor) -> Tensor:
        """uint8 (B, H, W, 3). A frame has the same bytes in any batch."""
        on_cpu = self.device.type == "cpu"  # images this small render fastest one by one, by one thread
        parts = pose_B44.to("cpu", torch.float64).split(1 if on_cpu else TOGETHER)
        with cpu_threads(1) if on_cpu else contextlib.nullcontext():
            return torch.cat([self._picture(part_B44) for part_B44 in parts])

    def slide(self, pose_N44: np.ndarray, motion_N6: np.ndarray) -> np.ndarray:
        """The poses after these motions (raw units, float64): a step in the body frame that slides along obstacles."""
        after_N44 = poses.step(pose_N44, motion_N6)
        after_N44[..., :3, 3] = self._outside(pose_N44[..., :3, 3], after_N44[..., :3, 3])
        return after_N44

    def is_free(self, position_N3: np.ndarray) -> np.ndarray:
        """Whether the camera may be at these positions."""
        inside_NK = (np.abs(position_N3[:, None] - self.center_K3) < self.half_K3 + RADIUS - 1e-9).all(-1).any(-1)
        flat_N = (np.abs(position_N3[:, :2]) <= self.reach - RADIUS + 1e-9).all(-1)
        return ~inside_NK & flat_N & (position_N3[:, 2] >= LOW) & (position_N3[:, 2] <= HIGH)

    def free_pose(self, rng: np.random.Generator) -> np.ndarray:
        """A random free position, height and heading, upright."""
        side = self.reach - 2 * RADIUS
        for _ in range(1000):
            position_3 = rng.uniform([-side, -side, LOW + 0.2], [side, side, HIGH - 0.2])
            if self.is_free(position_3[None])[0]:
                return poses.step(np.eye(4), np.array([*position_3, 0.0, 0.0, rng.uniform(-np.pi, np.pi)]))
        raise AssertionError("the world has no free position")

    def _outside(self, before_N3: np.ndarray, after_N3: np.ndarray) -> np.ndarray:
        """Push positions out of boxes along the nearest face; after a few failed tries the old position is kept."""
        position_N3 = after_N3.copy()
        for _ in range(3):
            position_N3[:, :2] = position_N3[:, :2].clip(RADIUS - self.reach, self.reach - RADIUS)
            position_N3[:, 2] = position_N3[:, 2].clip(LOW, HIGH)
            offset_NK3 = position_N3[:, None] - self.center_K3
            depth_NK3 = self.half_K3 + RADIUS - np.abs(offset_NK3)
            deep_NK = depth_NK3.min(-1)
            worst_N = deep_NK.argmax(-1)
            rows = np.flatnonzero(deep_NK.max(-1) > 0)
            if not len(rows):
                break
            depth_n3, side_n3 = depth_NK3[rows, worst_N[rows]], np.sign(offset_NK3[rows, worst_N[rows]])
            axis_n = depth_n3.argmin(-1)
            picked = np.arange(len(rows))
            way_n = np.where(side_n3[picked, axis_n] == 0, 1.0, side_n3[picked, axis_n])
            position_N3[rows, axis_n] += way_n * depth_n3[picked, axis_n]
        return np.where(self.is_free(position_N3)[:, None], position_N3, before_N3)

    # ---- rendering ---------------------------------------------------------------------------------------------------

    def _visible(self, pose_B44: np.ndarray) -> np.ndarray:
        """Frustum culling: of each pose the boxes whose bounding sphere intersects the view, and others up to one number."""
        position_BK3 = (self.center_K3 - pose_B44[:, None, :3, 3]) @ pose_B44[:, :3, :3]
        reach_K = np.linalg.norm(self.half_K3, axis=-1) + 1e-3
        seen_BK = (position_BK3 @ self._edges_43.T > -reach_K[:, None]).all(-1)
        # No ray hits a box out of view: one keeps the arrays from being empty.
        return np.argsort(~seen_BK, axis=1, kind="stable")[:, : max(1, seen_BK.sum(1).max())]

    def _picture(self, pose_B44: Tensor) -> Tensor:
        seen_BK, pose = torch.from_numpy(self._visible(pose_B44.numpy())).to(self.device), pose_B44.to(self.device)
        turn_B33, eye_B3 = pose[:, :3, :3].float(), pose[:, :3, 3]
        # Rays in the world; no component is exactly zero, so that all have an inverse.
        ray_B3R = turn_B33[:, :, :1] + turn_B33[:, :, 1:2] * self._left_R + turn_B33[:, :, 2:] * self._up_R
        ray_B3R = torch.where(ray_B3R.abs() < 1e-7, 1e-7, ray_B3R)
        inverse_B3R = ray_B3R.reciprocal()
        center_BK3, half_BK3 = (self._center_K3[seen_BK] - eye_B3[:, None]).float(), self._half_K3[seen_BK]
        depth_BR, hit_BR = _nearest(center_BK3, half_BK3, inverse_B3R)
        side_BR = _side(center_BK3, half_BK3, inverse_B3R, hit_BR)
        ground_BR = torch.where(ray_B3R[:, 2] < 0, eye_B3[:, 2:].float() * -inverse_B3R[:, 2], math.inf)
        on_ground_BR = ground_BR < depth_BR
        depth_BR = torch.minimum(depth_BR, ground_BR)
        side_BR = side_BR.masked_fill_(on_ground_BR, 5)
        paint_6BR = self._paint_6K[:, seen_BK.gather(1, hit_BR).masked_fill_(on_ground_BR, self.num_boxes)]
        point_B3R = torch.addcmul(eye_B3[:, :, None].float(), ray_B3R, depth_BR.clamp(max=1e4)[:, None])
        # Checkers of two colours, shading by face, fog by distance, and a sky gradient.
        cells_B3R = (point_B3R * (1 / CHECKER)).floor_()
        # Along the normal of the face the point lies between two cells: that axis is excluded.
        across_BR = cells_B3R.gather(1, (side_BR >> 1)[:, None])[:, 0]
        odd_BR = ((cells_B3R.sum(1) - across_BR) * 0.5).frac_().abs_() * 2  # 0 or 1
        far_BR = depth_BR * self._long_R
        # Squares smaller than a pixel are blended.
        sharp_BR = (2.0 - far_BR * (4 * self._pixel / CHECKER)).clamp_(0.0, 1.0)
        mix_BR = (odd_BR - 0.5).mul_(sharp_BR).add_(0.5)
        clear_BR = (far_BR * (-1 / FOG)).exp_()
        seen_3BR = torch.lerp(paint_6BR[:3], paint_6BR[3:], mix_BR).mul_(self._shades[side_BR])
        seen_3BR = torch.lerp(self._horizon_311, seen_3BR, clear_BR)
        high_BR = (ray_B3R[:, 2] / self._long_R).clamp_(0, 1).sqrt_()
        sky_3BR = torch.lerp(self._horizon_311, self._zenith_311, high_BR)
        light_3BR = torch.where(depth_BR.isinf(), sky_3BR, seen_3BR)
        light_3BHfWf = light_3BR.unflatten(2, (self.height, self._supersample, self.width, self._supersample))
        picture_3BHW = light_3BHfWf.mean((3, 5)).mul_(255).round_().clamp_(0, 255).to(torch.uint8)
        return picture_3BHW.permute(1, 2, 3, 0).contiguous()


def _nearest(center_BK3: Tensor, half_BK3: Tensor, inverse_B3R: Tensor) -> tuple[Tensor, Tensor]:
    """Depth of the first box along each ray, and which one: the slab test. Infinite where there is none."""
    wide_B3R, near, far = inverse_B3R.abs(), inverse_B3R.new_zeros(()), inverse_B3R.new_full((), math.inf)
    for n in range(3):
        middle_BKR = center_BK3[:, :, n, None] * inverse_B3R[:, None, n]
        extent_BKR = half_BK3[:, :, n, None] * wide_B3R[:, None, n]
        enter_BKR, leave_BKR = middle_BKR - extent_BKR, middle_BKR.add_(extent_BKR)
        near, far = torch.maximum(near, enter_BKR, out=enter_BKR), torch.minimum(far, leave_BKR, out=leave_BKR)
    return near.masked_fill_(far < near, math.inf).min(1)


def _side(center_BK3: Tensor, half_BK3: Tensor, inverse_B3R: Tensor, hit_BR: Tensor) -> Tensor:
    """Which face of the box is hit: 0 to 5 for -x, +x, -y, +y, -z, +z."""
    hit_B3R = hit_BR[:, None].expand(-1, 3, -1)
    position_B3R, half_B3R = (one_BK3.transpose(1, 2).gather(2, hit_B3R) for one_BK3 in (center_BK3, half_BK3))
    axis_BR = (position_B3R * inverse_B3R - half_B3R * inverse_B3R.abs()).max(1).indices
    return axis_BR * 2 + (inverse_B3R.gather(1, axis_BR[:, None])[:, 0] < 0)


def rebuild_simulator(recording: Recording, device: str | torch.device = "cpu") -> BoxWorld | None:
    """The simulator of a recording, if it can be rebuilt."""
    made = recording.facts.get("simulator") or {}
    if made.get("name") != "box" or made.get("version") != VERSION:
        return None
    return BoxWorld(made["seed"], made["height"], made["width"], device, made["num_boxes"], made["fov"], made.get("reach", REACH))


def _boxes(seed: int, num: int, reach: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centres, half sizes and two colours each: four walls, and boxes of all sizes around a free centre."""
    assert num >= 4
    rng = np.random.Generator(np.random.PCG64([VERSION, seed]))
    wall, height = reach + 0.5, 1.6
    center_K3 = np.array([[wall, 0, height], [-wall, 0, height], [0, wall, height], [0, -wall, height]])
    half_K3 = np.array([[0.5, wall + 0.5, height]] * 2 + [[wall + 0.5, 0.5, height]] * 2)
    rest = num - 4
    size_K3 = np.stack([rng.uniform(0.25, 0.9, rest), rng.uniform(0.25, 0.9, rest), rng.uniform(0.2, 1.5, rest)], -1)
    angle_K, away_K = rng.uniform(0, 2 * np.pi, rest), np.sqrt(rng.uniform((reach / 4) ** 2, (reach * 1.2) ** 2, rest))
    position_K2 = np.stack([away_K * np.cos(angle_K), away_K * np.sin(angle_K)], -1).clip(1.5 - reach, reach - 1.5)
    center_K3 = np.concatenate((center_K3, np.concatenate((position_K2, size_K3[:, 2:]), -1)))
    half_K3 = np.concatenate((half_K3, size_K3))
    # Bright and dark squares of one hue each; the four walls lie a quarter of the circle apart.
    hue_K = np.concatenate((np.arange(4) / 4 + rng.uniform(0, 1), rng.uniform(0, 1, rest))) % 1
    bright_K3 = _paint(hue_K, rng.uniform(0.35, 0.8, num), rng.uniform(0.75, 1.0, num))
    dark_K3 = _paint(hue_K + rng.uniform(-0.08, 0.08, num), rng.uniform(0.4, 0.9, num), rng.uniform(0.25, 0.5, num))
    return center_K3, half_K3, np.stack((bright_K3, dark_K3), 1)


def _paint(hue_K: np.ndarray, saturation_K: np.ndarray, value_K: np.ndarray) -> np.ndarray:
    """RGB in [0, 1] of hue, saturation and value."""
    offset_K3 = (hue_K[:, None] * 6 + np.array([0.0, 4.0, 2.0])) % 6
    pure_K3 = np.clip(np.abs(offset_K3 - 3) - 1, 0, 1)
    return value_K[:, None] * (1 - saturation_K[:, None] * (1 - pure_K3))


# ---- recording ---------------------------------------------------------------------------------------------------------

PIECE = 256  # frames rendered before they are written


def record_box(
    num_frames: int,
    height: int,
    width: int,
    seed: int,
    *,
    out: Path | None = None,
    cache: str = "",
    device: str = "cpu",
    reach: float = REACH,
    num_boxes: int = NUM_BOXES,
) -> Recording:
    """A recording of `num_frames` frames in the world of this seed: the existing one, or a new one."""
    world = BoxWorld(seed, height, width, device, num_boxes, reach=reach)
    # At least ten trajectories where they stay long enough for the longest rollout.
    num_trajectories = max(1, round(num_frames / TRAJECTORY_FRAMES), min(10, num_frames // 300))
    # Rounding differs between devices, and with it an occasional edge pixel.
    key = digest([FORMAT, world.facts, num_frames, num_trajectories, world.device.type])
    path = (out or cache_folder(cache) / f"box-{height}x{width}-{num_frames}-{key[:12]}").absolute()
    if found := find_recording(path, key):
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
        POSE_AXES,
        pose=pose_T44,
        command=requested_TA,
        source={"name": f"box:{seed}"},
        simulator=world.facts,
        key=key,
    )


def record_room(num_frames: int, height: int, width: int, seed: int, **how: Any) -> Recording:
    """The same in a room: small enough that a network of the demo's size learns where everything stands."""
    return record_box(num_frames, height, width, seed, reach=ROOM[0], num_boxes=ROOM[1], **how)


def _render(world: BoxWorld, pose_T44: np.ndarray) -> Iterator[np.ndarray]:
    progress = Progress("rendering", "frames")
    pieces = [torch.from_numpy(pose_T44[low : low + PIECE]) for low in range(0, len(pose_T44), PIECE)]
    with ThreadPoolExecutor(1) as ahead:  # the next piece is rendered while this one is hashed and written
        later = ahead.submit(lambda: world.render(pieces[0]).cpu().numpy())
        for n, piece in enumerate(pieces):
            frames = later.result()
            later = ahead.submit(lambda n=n: world.render(pieces[n + 1]).cpu().numpy()) if n + 1 < len(pieces) else later
            yield frames
            progress(n * PIECE + len(piece), len(pose_T44))
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


def trajectories(world: BoxWorld, num_frames: int, num_trajectories: int, seed: int) -> tuple[np.ndarray, ...]:
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
