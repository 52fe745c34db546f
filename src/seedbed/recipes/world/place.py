"""The place as it was learned: a map of features that has coordinates, and what a camera sees of it from where it stands.

Shape suffixes: B windows, A axes, P numbers of a pose, H W rays, D stretches of a ray, E their ends, N points, C features of the
map, F of a ray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.data.recording import Recording
from seedbed.errors import UserError
from seedbed.nn.cells import conv_flops, init_conv, leaky, linear_flops
from seedbed.nn.groups import declare
from seedbed.nn.init import normal_

NUMBERS = 12  # of a pose: three rows of a rotation and a place
MOTION = ("x", "y", "z", "roll", "pitch", "yaw")
# Rays per side, as a share of the picture's pixels; convolutions make the rest of it.
COARSE = 4
# Points along a ray, nearer ones closer together, in units of half the ground that was walked.
NEAREST, FARTHEST = 0.03, 2.2
# Half the longer side of the picture at distance one, as a first guess: what the lens really is, is learned.
OPENING = 0.767
LEVEL = 0.1  # a camera that looks almost straight down counts as one that looks this much ahead
# The map: cells along a side of its planes, and what a point of it says.
CELLS, HIDDEN, SAID = 128, 32, 24
# Features of a cell, and points along a ray: for networks with less than this many channels at their coarsest, and for others.
SMALL, FINE = 16, 24
NARROW = 100
# Those others look again, once a pixel, where the first look met something: at so many points of planes with so many cells along
# the longer side, and features of a cell.
POINTS, TEXELS, GRAIN = 8, 512, 12
SHORTEST = 4  # a side of those planes has at least one in so many of these cells, however flat the place is
DOUBT = 0.003  # the least weight that a stretch of a ray has when points are spread over it
INSIDE = 0.7  # share of a plane's side for what was walked; the rest of the world is pressed into the rim
FLAT = 0.1  # an axis that was walked less is taken as long as this share of the longest
THICK = 10.0  # densities count per tenth of the unit
TILES = 48  # of the ground, along a side: where somebody walked, one may walk
EDGE = 0.02  # of a tile: so much may sums of controls differ from recorded places
FASTER = 5.0  # cells are seen seldom, so they learn at this many times the rate


class Seen(NamedTuple):
    """Of the learned place, by a camera: features, and how much of every ray ends at each of its depths."""

    features_BFHW: Tensor
    weight_BDHW: Tensor
    shown_B6HW: Tensor | None = None  # pictures of one ray a pixel, before the control and after it, where one looks again


def poses_of(recording: Recording) -> np.ndarray:
    """(T, P) in float32; refused where controls are not the camera's own motion."""
    units = {axis.name: axis.unit for axis in recording.axes}
    if recording.pose_T44 is None or any(units.get(name) != ("m" if name in "xyz" else "rad") for name in MOTION):
        missing = "no poses" if recording.pose_T44 is None else f"other controls than {', '.join(MOTION)} in m and rad"
        raise UserError(
            f"model.odometer adds up the motion of a camera, but {recording.path} has {missing}\nset model.odometer=false"
        )
    return as_numbers(recording.pose_T44)


def as_numbers(pose_B44: np.ndarray) -> np.ndarray:
    """Poses as the network is told of them, (B, P)."""
    return pose_B44[:, :3].reshape(-1, NUMBERS).astype(np.float32)


def turn(vector_B3: Tensor) -> Tensor:
    """Rotation matrices (B, 3, 3) of rotation vectors, sound at zero."""
    angle_B11 = vector_B3.square().sum(1).clamp_min(1e-12).sqrt()[:, None, None]
    x, y, z = vector_B3.unbind(1)
    zero = torch.zeros_like(x)
    skew_B33 = torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), dim=1).unflatten(1, (3, 3))
    first, second = angle_B11.sin() / angle_B11, 2.0 * ((0.5 * angle_B11).sin() / angle_B11).square()
    return torch.eye(3, device=x.device) + first * skew_B33 + second * (skew_B33 @ skew_B33)


class Place(nn.Module):
    """Three planes of features, seen along rays: nearer points hide farther ones, as a learned density says.

    Where the camera stands is an odometer's sum: the pose of the frame it began with and every control since. So what the
    network knows of the place is there again whenever the camera is, however long a dream goes on.
    """

    motion_A6: Tensor
    middle_3: Tensor
    reach_3: Tensor
    depth_D: Tensor
    ground_23: Tensor
    walked_N: Tensor

    def __init__(self, recording: Recording, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.fine = SMALL if widths[-1] < NARROW else FINE
        self.height, self.width = (side // COARSE for side in recording.frames_THWC.shape[1:3])
        names = [axis.name for axis in recording.axes]
        motion_A6 = torch.zeros(len(names), 6)
        for n, name in enumerate(MOTION):
            motion_A6[names.index(name), n] = recording.axes[names.index(name)].scale
        first, last = recording.spans("train")[0]
        walked_T3 = poses_of(recording).reshape(-1, 3, 4)[:, :, 3]
        place_T3 = walked_T3[first:last].astype(np.float64)
        low_3, high_3 = place_T3.min(0), place_T3.max(0)
        unit = max(float((high_3 - low_3).max()) / 2, 1e-3)
        self.register_buffer("motion_A6", motion_A6)
        self.register_buffer("middle_3", torch.from_numpy((low_3 + high_3) / 2).float())
        self.register_buffer("reach_3", torch.from_numpy(np.maximum((high_3 - low_3) / 2, FLAT * unit)).float())
        self.register_buffer("depth_D", torch.from_numpy(unit * np.geomspace(NEAREST, FARTHEST, self.fine)).float())
        self.register_buffer("ground_23", torch.from_numpy(np.stack((walked_T3.min(0), walked_T3.max(0)))), persistent=False)
        self.register_buffer("walked_N", self._tiles(torch.from_numpy(walked_T3)), persistent=False)
        self.planes = declare(nn.Parameter(torch.zeros(3, self.fine, CELLS, CELLS)), "scalar", lr_scale=FASTER)
        # How much wider the lens is across and down, as logarithms, how much of looking up or down is a shift of the picture, and
        # how far it is shifted, as a logarithm: on level ground a map may be of any height, and a shift is measured by it.
        self.lens_4 = declare(nn.Parameter(torch.zeros(4)), "scalar", lr_scale=FASTER)
        self.say, self.said = nn.Linear(self.fine, HIDDEN), nn.Linear(HIDDEN, 1 + SAID)
        self.enter = nn.ModuleList(nn.Conv2d(SAID + 8, channels, 1) for channels in widths)
        self.detail = Detail(self.reach_3, widths[0]) if self.fine == FINE else None

    def init_weights(self, generator: torch.Generator) -> None:
        normal_(self.planes, 0.1, generator)
        for layer in (self.say, self.said, *self.enter):
            init_conv(layer, generator)  # type: ignore[arg-type]
        if self.detail is not None:
            self.detail.init_weights(generator)

    def after(self, pose_BP: Tensor, action_BA: Tensor) -> Tensor:
        """The pose to which a scaled control leads, in float32; one walks where somebody walked in the recording."""
        with torch.autocast(pose_BP.device.type, enabled=False):
            motion_B6 = action_BA.float() @ self.motion_A6
            before_B34 = pose_BP.unflatten(1, (3, 4))
            turned_B33 = before_B34[:, :, :3] @ turn(motion_B6[:, 3:])
            place_B31 = before_B34[:, :, 3:] + before_B34[:, :, :3] @ motion_B6[:, :3, None]
            place_B3 = self._walk(before_B34[:, :, 3], place_B31[:, :, 0])
            return torch.cat((turned_B33, place_B3[:, :, None]), dim=2).flatten(1)

    def _walk(self, from_B3: Tensor, to_B3: Tensor) -> Tensor:
        """As far as the ground goes: along one axis of it where both at once lead off, and nowhere where neither does."""
        to_B3 = to_B3.maximum(self.ground_23[0]).minimum(self.ground_23[1])
        x_B3 = torch.cat((to_B3[:, :1], from_B3[:, 1:2], to_B3[:, 2:]), dim=1)
        y_B3 = torch.cat((from_B3[:, :1], to_B3[:, 1:]), dim=1)
        free_B1, x_B1, y_B1 = (self.walked_N[self._tile(place)][:, None] for place in (to_B3, x_B3, y_B3))
        return torch.where(free_B1, to_B3, torch.where(x_B1, x_B3, torch.where(y_B1, y_B3, from_B3)))

    def _tile(self, place_B3: Tensor) -> Tensor:
        """(B,) the tile on which a place is."""
        low_3, high_3 = self.ground_23
        share_B3 = (place_B3 - low_3) / (high_3 - low_3).clamp_min(1e-6)
        x_B, y_B, _ = (TILES * share_B3).clamp(0.0, TILES - 1.0).long().unbind(1)
        return TILES * x_B + y_B

    def _tiles(self, walked_T3: Tensor) -> Tensor:
        """Which tiles somebody was on, or stepped over: gaps that others surround are filled."""
        tiles_11KK = torch.zeros(1, 1, TILES, TILES)
        size_3 = (self.ground_23[1] - self.ground_23[0]) / TILES
        for x in (-EDGE, 0.0, EDGE):
            for y in (-EDGE, 0.0, EDGE):
                tiles_11KK.view(-1)[self._tile(walked_T3 + size_3 * torch.tensor([x, y, 0.0]))] = 1.0
        wider_11KK = F.max_pool2d(tiles_11KK, 3, stride=1, padding=1)
        return (-F.max_pool2d(-wider_11KK, 3, stride=1, padding=1)).flatten() > 0.5

    def look(self, pose_BP: Tensor) -> Seen:
        """What is seen from these poses (B, F, H, W): features, how far, how much of nothing, whereto and wherefrom."""
        with torch.autocast(pose_BP.device.type, enabled=False):
            ahead_B3HW, eye_B3 = self._rays(pose_BP.unflatten(1, (3, 4)))
            unit = self._unit
            point_B3DHW = eye_B3[:, :, None, None, None] + self.depth_D[:, None, None] * ahead_B3HW[:, :, None]
            features_NC = features(self.planes.split(1), self._pressed(point_B3DHW))
        said = self.said(leaky(self.say(features_NC))).float().unflatten(0, (len(pose_BP), self.fine, self.height, self.width))
        step_D11 = (torch.diff(self.depth_D, append=self.depth_D[-1:] ** 2 / self.depth_D[-2:-1]) / unit)[:, None, None]
        weight_BDHW, open_BHW = endings(said[..., 0], step_D11)
        seen_BFHW = (weight_BDHW[..., None] * said[..., 1:]).sum(1).movedim(-1, 1)
        far_B1HW = (weight_BDHW * (self.depth_D / unit)[:, None, None]).sum(1, keepdim=True)
        where_B3HW = (eye_B3 / unit)[:, :, None, None].expand_as(ahead_B3HW)
        parts = (seen_BFHW, far_B1HW, open_BHW[:, None], ahead_B3HW, where_B3HW)
        return Seen(torch.cat(parts, dim=1), weight_BDHW)

    def look_again(self, detail: Detail, pose_BP: Tensor, weight_BDHW: Tensor) -> Tensor:
        """A picture (B, 3, H, W) with a ray for every pixel, by points where the first look met something."""
        with torch.autocast(pose_BP.device.type, enabled=False):
            edge_BEHW = self._edges(weight_BDHW.detach())
            ahead_B3HW, eye_B3 = self._rays(pose_BP.unflatten(1, (3, 4)), COARSE)
            depth_BDHW = 0.5 * (edge_BEHW[:, 1:] + edge_BEHW[:, :-1])
            point_B3DHW = eye_B3[:, :, None, None, None] + depth_BDHW[:, None] * ahead_B3HW[:, :, None]
            far_BDHW, step_BDHW = depth_BDHW / self._unit, torch.diff(edge_BEHW, dim=1) / self._unit
            features_NC = features(list(detail.planes), self._pressed(point_B3DHW))
        said = detail(torch.cat((features_NC, far_BDHW.reshape(-1, 1)), dim=1)).float().unflatten(0, far_BDHW.shape)
        weight_BDHW, _ = endings(said[..., 0], step_BDHW)
        return (weight_BDHW[..., None] * said[..., 1:]).sum(1).movedim(-1, 1)

    def forward(self, pose_BP: Tensor) -> tuple[Tensor, Tensor | None]:
        """The pictures that the map shows without the network, one pixel a ray: a coarse one, and one of the picture's size."""
        seen = self.look(pose_BP)
        picture_B3HW = None if self.detail is None else self.look_again(self.detail, pose_BP, seen.weight_BDHW)
        return seen.features_BFHW[:, :3], picture_B3HW

    def before_and_after(self, pose_BP: Tensor, numbers_BN: Tensor) -> Seen:
        """As the camera sees it after the control; pictures also from where it is. They learn from an error of their own only."""
        after_BP = self.after(pose_BP, numbers_BN[:, : len(self.motion_A6)])
        seen = self.look(after_BP)
        if self.detail is None:
            return seen
        with torch.no_grad():
            weight_BDHW = torch.cat((self.look(pose_BP).weight_BDHW, seen.weight_BDHW))
            pictures = self.look_again(self.detail, torch.cat((pose_BP, after_BP)), weight_BDHW)
        return seen._replace(shown_B6HW=torch.cat(pictures.chunk(2), dim=1))

    def entered(self, seen: Seen, scale: int) -> Tensor:
        """What was seen, for the map of channels at 1/2^(scale + 1) of the picture's size."""
        factor, seen_BFHW = COARSE / 2 ** (scale + 1), seen.features_BFHW
        if factor > 1.0:
            seen_BFHW = F.interpolate(seen_BFHW, scale_factor=factor, mode="bilinear", align_corners=False)
        elif factor < 1.0:
            seen_BFHW = F.avg_pool2d(seen_BFHW, round(1.0 / factor))
        entered_BCHW = self.enter[scale](seen_BFHW)
        if scale or self.detail is None or seen.shown_B6HW is None:
            return entered_BCHW
        return entered_BCHW + self.detail.enter(F.pixel_unshuffle(seen.shown_B6HW, 2))

    @property
    def _unit(self) -> Tensor:
        return self.depth_D[-1] / FARTHEST

    def _edges(self, weight_BDHW: Tensor) -> Tensor:
        """Where the stretches of every pixel's ray begin and end: each as likely to end it, by what coarse rays around say."""
        rest_B1HW = 1.0 - weight_BDHW.sum(1, keepdim=True)
        weight_BDHW = torch.cat((weight_BDHW[:, :-1], weight_BDHW[:, -1:] + rest_B1HW), dim=1)
        # What a coarse ray met in one stretch another one beside it may meet in the next.
        around_BDHW = F.max_pool3d(weight_BDHW[:, None], (3, 1, 1), stride=1, padding=(1, 0, 0))[:, 0]
        weight_BDHW = DOUBT + 0.5 * (weight_BDHW + around_BDHW)
        weight_BDHW = F.interpolate(weight_BDHW, scale_factor=COARSE, mode="bilinear", align_corners=False)
        share_BDHW = weight_BDHW / weight_BDHW.sum(1, keepdim=True)
        before_BDHW = share_BDHW.cumsum(1) - share_BDHW
        ratio = self.depth_D[1] / self.depth_D[0]
        bound_E = torch.cat((self.depth_D, self.depth_D[-1:] * ratio)) * ratio.rsqrt()
        wish_E111 = torch.linspace(0.0, 1.0, POINTS + 1, device=weight_BDHW.device)[:, None, None, None]
        # A stretch is passed, half passed or not reached: so the depth at which a share of the ray has ended is a sum over them.
        passed_BEDHW = ((wish_E111 - before_BDHW[:, None]) / share_BDHW[:, None]).clamp(0.0, 1.0)
        return bound_E[0] + (passed_BEDHW * torch.diff(bound_E)[:, None, None]).sum(2)

    def _rays(self, pose_B34: Tensor, finer: int = 1) -> tuple[Tensor, Tensor]:
        """Directions in the world, of length one, and eyes from the middle of the place; `finer` times as many along a side.

        A camera turns its picture when it looks up or down. Games of the old kind shift it instead, and walls stay upright:
        rays then rise with the tangent of the angle, and their columns stand on the ground.
        """
        on, height, width = pose_B34.device, finer * self.height, finer * self.width
        pixel = 2.0 * OPENING / max(height, width)
        left_W = pixel * (0.5 * (width - 1) - torch.arange(width, device=on, dtype=torch.float32))
        up_H1 = pixel * (0.5 * (height - 1) - torch.arange(height, device=on, dtype=torch.float32))[:, None]
        (across, down, _, steep), shifts = self.lens_4.exp(), self.lens_4[2]
        upright_3 = torch.eye(3, device=on)[2]
        forward_B3, left_B3, up_B3, place_B3 = pose_B34.unbind(2)
        level_B1 = forward_B3[:, :2].square().sum(1, keepdim=True).sqrt().clamp_min(LEVEL)
        forward_B3 = forward_B3 * (1.0 + shifts * (1.0 / level_B1 - 1.0))
        forward_B3 = forward_B3 + upright_3 * forward_B3 * shifts * (steep - 1.0)
        up_B3 = up_B3 + shifts * (upright_3 - up_B3)
        forward, left, up = (side[:, :, None, None] for side in (forward_B3, left_B3, up_B3))
        ahead_B3HW = forward + left * (across * left_W) + up * (down * up_H1)
        return ahead_B3HW / ahead_B3HW.square().sum(1, keepdim=True).sqrt(), place_B3 - self.middle_3

    def _pressed(self, point_B3DHW: Tensor) -> Tensor:
        """Places on the planes (3, N), between -1 and 1: what was walked in the middle, the rest of the world at the rim."""
        share = point_B3DHW / self.reach_3[:, None, None, None]
        size = share.abs().clamp_min(1.0)
        pressed = torch.where(size > 1.0, share.sign() * (1.0 - (1.0 - INSIDE) / size), INSIDE * share)
        return pressed.movedim(1, 0).flatten(1)

    def lens(self) -> dict[str, float]:
        """What was learned of it: degrees across and down, and how much of looking up or down shifts the picture."""
        across, down, shifts, steep = self.lens_4.double().cpu().tolist()
        sides = ((across, self.width), (down - shifts * steep, self.height))  # as if a shift were what it should be
        halves = (OPENING * math.exp(wider) * side / max(self.height, self.width) for wider, side in sides)
        across, down = (math.degrees(2.0 * math.atan(half)) for half in halves)
        return {"across": round(across, 1), "down": round(down, 1), "shifts": round(shifts, 3)}

    def flops(self, positions: list[int]) -> float:
        """Of a prediction: products only; `positions` by scale."""
        enter = sum(conv_flops(conv, n) for conv, n in zip(self.enter, positions, strict=True))  # type: ignore[arg-type]
        total = self._first_flops() + enter + self.shown_flops()
        return total + (0.0 if self.detail is None else conv_flops(self.detail.enter, positions[0]))

    def shown_flops(self) -> float:
        """Of the pictures of a prediction, which have no way back: before the control, with a first look, and after it."""
        return 0.0 if self.detail is None else self._first_flops() + 2.0 * self._second_flops()

    def look_flops(self) -> float:
        """Of the map alone, for one pose."""
        return self._first_flops() + self._second_flops()

    def _first_flops(self) -> float:
        return self.fine * self.height * self.width * (linear_flops(self.say) + linear_flops(self.said))

    def _second_flops(self) -> float:
        if self.detail is None:
            return 0.0
        return POINTS * self.height * self.width * COARSE**2 * (linear_flops(self.detail.say) + linear_flops(self.detail.said))


class Detail(nn.Module):
    """What the second look reads: finer planes, and what a point of them says of its density and colour from a distance."""

    def __init__(self, reach_3: Tensor, channels: int) -> None:
        super().__init__()
        share_3 = (reach_3 / reach_3.max()).clamp_min(1.0 / SHORTEST)
        x, y, z = (round(TEXELS * share) for share in share_3.tolist())
        planes = (nn.Parameter(torch.zeros(1, GRAIN, *sides)) for sides in ((y, x), (z, x), (z, y)))
        self.planes = nn.ParameterList(declare(plane, "scalar", lr_scale=FASTER) for plane in planes)
        self.say, self.said = nn.Linear(GRAIN + 1, HIDDEN), nn.Linear(HIDDEN, 4)
        self.enter = nn.Conv2d(2 * 12, channels, 1)

    def init_weights(self, generator: torch.Generator) -> None:
        for plane in self.planes:
            normal_(plane, 0.1, generator)
        for layer in (self.say, self.said, self.enter):
            init_conv(layer, generator)
        with torch.no_grad():
            self.said.weight[1:] = 0.0  # at birth it shows nothing

    def forward(self, features_NC: Tensor) -> Tensor:
        return self.said(leaky(self.say(features_NC)))


def features(planes: Sequence[Tensor], pressed_3N: Tensor) -> Tensor:
    """The sum of the three planes' features at every point (N, C)."""
    x_N, y_N, z_N = pressed_3N
    total_NC = torch.zeros((), device=pressed_3N.device)
    for plane_1CKK, across_N, down_N in zip(planes, (x_N, x_N, y_N), (y_N, z_N, z_N), strict=True):
        total_NC = total_NC + (gathered if torch.compiler.is_exporting() else sampled)(plane_1CKK, across_N, down_N)
    return total_NC


def sampled(plane_1CKK: Tensor, across_N: Tensor, down_N: Tensor) -> Tensor:
    """A plane's features at points between its cells (N, C)."""
    at_1N12 = torch.stack((across_N, down_N), dim=-1)[None, :, None]
    return F.grid_sample(plane_1CKK, at_1N12, padding_mode="border", align_corners=False)[0, :, :, 0].T


def gathered(plane_1CKK: Tensor, across_N: Tensor, down_N: Tensor) -> Tensor:
    """The same as whole rows of features and their weights: runtimes outside of torch are several times as fast at that."""
    height, width = plane_1CKK.shape[2:]
    cell_KC = plane_1CKK[0].flatten(1).T
    x_N, y_N = ((0.5 * ((at + 1.0) * n - 1.0)).clamp(0.0, n - 1.0) for at, n in ((across_N, width), (down_N, height)))
    left_N, top_N = x_N.floor(), y_N.floor()
    right_N, bottom_N = (left_N + 1.0).clamp_max(width - 1.0), (top_N + 1.0).clamp_max(height - 1.0)
    total_NC = torch.zeros((), device=across_N.device)
    for row_N, up_N in ((top_N, 1.0 - (y_N - top_N)), (bottom_N, y_N - top_N)):
        for column_N, side_N in ((left_N, 1.0 - (x_N - left_N)), (right_N, x_N - left_N)):
            total_NC = total_NC + cell_KC.index_select(0, (row_N * width + column_N).long()) * (up_N * side_N)[:, None]
    return total_NC


def endings(density_BDHW: Tensor, step_DHW: Tensor) -> tuple[Tensor, Tensor]:
    """How much of a ray ends in each stretch of it, nearer ones hiding farther ones, and how much in none (B, H, W)."""
    open_BDHW = (-THICK * step_DHW * F.softplus(density_BDHW - 1.0)).cumsum(1).exp()
    before_BDHW = torch.cat((torch.ones_like(open_BDHW[:, :1]), open_BDHW[:, :-1]), dim=1)
    return before_BDHW - open_BDHW, open_BDHW[:, -1]
