"""Tri-plane radiance field of the recorded scene, rendered from a camera pose that is tracked by dead reckoning.

Shape suffixes: B windows, A axes, P numbers of a pose, H W rays, D samples of a ray, E edges between samples, N points, C plane
features, F ray features. Names of parameters and submodules (`say`, `said`, `lens_4`, `detail` ...) are those of checkpoints.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.errors import UserError
from seedbed.nn.init import declare, module_list, normal_
from seedbed.recipes.world.cells import flops, init_conv, leaky
from seedbed.recipes.world.recording.recording import Recording
from seedbed.train.stop_gradient import stop_gradient

POSE_SIZE = 12  # numbers of a pose: the rows of a 3x4 camera-to-world matrix
MOTION = ("x", "y", "z", "roll", "pitch", "yaw")
RAY_STRIDE = 4  # pixels per ray of the coarse pass, along a side
NEAR, FAR = 0.03, 2.2  # depth range of the samples, spaced geometrically, in units of half the recorded extent
HALF_FOV_TAN = 0.767  # initial camera: tangent of half the field of view along the longer side; intrinsics are learned
MIN_HORIZONTAL = 0.1  # lower bound of the horizontal part of the viewing direction
HIDDEN, FEATURES = 32, 24  # of the decoder
# Plane features and depth samples: for U-nets with fewer than SMALL_WIDTH channels at the coarsest scale, and for others.
SMALL, LARGE = 16, 24
SMALL_WIDTH = 100
# The large ones add hierarchical sampling: fine samples per pixel (others where a config says so), and planes of a higher
# resolution with fewer features.
FINE_SAMPLES, FINE_SCALE, FINE_CHANNELS = 8, 4, 12
MAX_ASPECT = 4  # of the fine planes
MIN_WEIGHT = 0.003  # added to every coarse weight before fine samples are drawn
INNER_SHARE = 0.7  # of a plane's side for the recorded extent; space beyond it is contracted into the rest
MIN_EXTENT = 0.1  # smallest extent of an axis, as a share of the largest
DENSITY_SCALE = 10.0
MASK_CELLS = 48  # of the walkable mask, along a side
MASK_MARGIN = 0.02  # of a cell: tolerance between integrated controls and recorded positions
LR_SCALE = 5.0  # each cell is seen rarely, so planes and intrinsics learn faster


class Rendering(NamedTuple):
    """A rendered view: features per coarse ray, and the volume-rendering weight of each of its samples."""

    features_BFHW: Tensor
    weight_BDHW: Tensor
    rendered_B6HW: Tensor | None = None  # fine pass: images before and after the control


class RadianceField(nn.Module):
    """Features on three planes, decoded to density and features, and volume-rendered along camera rays.

    The pose is tracked by dead reckoning: the pose of the first frame and every control since. A view is therefore the same
    whenever the camera returns, however long a rollout is.
    """

    motion_A6: Tensor
    middle_3: Tensor
    reach_3: Tensor
    depth_D: Tensor
    bounds_23: Tensor
    walkable_N: Tensor

    def __init__(self, recording: Recording, widths: tuple[int, ...], cells: int = 128, fine_samples: int = 0) -> None:
        super().__init__()
        is_large = widths[-1] >= SMALL_WIDTH
        self.num_samples, self.fine_samples = LARGE if is_large else SMALL, fine_samples or (FINE_SAMPLES if is_large else 0)
        self.height, self.width = (side // RAY_STRIDE for side in recording.frames_THWC.shape[1:3])
        names = [axis.name for axis in recording.axes]
        motion_A6 = torch.zeros(len(names), 6)
        for n, name in enumerate(MOTION):
            motion_A6[names.index(name), n] = recording.axes[names.index(name)].scale
        first, last = recording.span("train")
        recorded_T3 = flat_poses(recording).reshape(-1, 3, 4)[:, :, 3]
        position_T3 = recorded_T3[first:last].astype(np.float64)
        low_3, high_3 = position_T3.min(0), position_T3.max(0)
        unit = max(float((high_3 - low_3).max()) / 2, 1e-3)
        self.register_buffer("motion_A6", motion_A6)
        self.register_buffer("middle_3", torch.from_numpy((low_3 + high_3) / 2).float())
        self.register_buffer("reach_3", torch.from_numpy(np.maximum((high_3 - low_3) / 2, MIN_EXTENT * unit)).float())
        self.register_buffer("depth_D", torch.from_numpy(unit * np.geomspace(NEAR, FAR, self.num_samples)).float())
        self.register_buffer("bounds_23", torch.from_numpy(np.stack((recorded_T3.min(0), recorded_T3.max(0)))), persistent=False)
        self.register_buffer("walkable_N", self._walkable_mask(torch.from_numpy(recorded_T3)), persistent=False)
        self.planes = declare(nn.Parameter(torch.zeros(3, self.num_samples, cells, cells)), "scalar", lr_scale=LR_SCALE)
        # Camera intrinsics: log scales across and down, how much of a pitch shifts the image instead of rotating the view, and
        # the log scale of that shift.
        self.lens_4 = declare(nn.Parameter(torch.zeros(4)), "scalar", lr_scale=LR_SCALE)
        self.say, self.said = nn.Linear(self.num_samples, HIDDEN), nn.Linear(HIDDEN, 1 + FEATURES)
        self.enter = module_list(nn.Conv2d(FEATURES + 8, channels, 1) for channels in widths)
        self.detail = FineField(self.reach_3, widths[0], FINE_SCALE * cells) if self.fine_samples else None

    def init_weights(self, generator: torch.Generator) -> None:
        normal_(self.planes, 0.1, generator)
        for layer in (self.say, self.said, *self.enter):
            init_conv(layer, generator)
        if self.detail is not None:
            self.detail.init_weights(generator)

    def next_pose(self, pose_BP: Tensor, action_BA: Tensor) -> Tensor:
        """Dead reckoning: the pose after a scaled control, in float32, kept inside the walkable mask."""
        with torch.autocast(pose_BP.device.type, enabled=False):
            motion_B6 = action_BA.float() @ self.motion_A6
            before_B34 = pose_BP.unflatten(1, (3, 4))
            turned_B33 = before_B34[:, :, :3] @ rotation_matrices(motion_B6[:, 3:])
            position_B31 = before_B34[:, :, 3:] + before_B34[:, :, :3] @ motion_B6[:, :3, None]
            position_B3 = self._clamp_to_walkable(before_B34[:, :, 3], position_B31[:, :, 0])
            return torch.cat((turned_B33, position_B3[:, :, None]), dim=2).flatten(1)

    def _clamp_to_walkable(self, from_B3: Tensor, to_B3: Tensor) -> Tensor:
        """The target position, else the move along one axis that stays inside the mask, else the old position."""
        to_B3 = to_B3.maximum(self.bounds_23[0]).minimum(self.bounds_23[1])
        x_B3 = torch.cat((to_B3[:, :1], from_B3[:, 1:2], to_B3[:, 2:]), dim=1)
        y_B3 = torch.cat((from_B3[:, :1], to_B3[:, 1:]), dim=1)
        free_B1, x_B1, y_B1 = (self.walkable_N[self._mask_cell(to)][:, None] for to in (to_B3, x_B3, y_B3))
        return torch.where(free_B1, to_B3, torch.where(x_B1, x_B3, torch.where(y_B1, y_B3, from_B3)))

    def _mask_cell(self, position_B3: Tensor) -> Tensor:
        """(B,) index of the mask cell at a position."""
        low_3, high_3 = self.bounds_23
        share_B3 = (position_B3 - low_3) / (high_3 - low_3).clamp_min(1e-6)
        x_B, y_B, _ = (MASK_CELLS * share_B3).clamp(0.0, MASK_CELLS - 1.0).long().unbind(1)
        return MASK_CELLS * x_B + y_B

    def _walkable_mask(self, recorded_T3: Tensor) -> Tensor:
        """Cells that the recorded camera visited; small gaps are closed."""
        mask_11KK = torch.zeros(1, 1, MASK_CELLS, MASK_CELLS)
        size_3 = (self.bounds_23[1] - self.bounds_23[0]) / MASK_CELLS
        for x in (-MASK_MARGIN, 0.0, MASK_MARGIN):
            for y in (-MASK_MARGIN, 0.0, MASK_MARGIN):
                mask_11KK.view(-1)[self._mask_cell(recorded_T3 + size_3 * torch.tensor([x, y, 0.0]))] = 1.0
        dilated_11KK = F.max_pool2d(mask_11KK, 3, stride=1, padding=1)
        return (-F.max_pool2d(-dilated_11KK, 3, stride=1, padding=1)).flatten() > 0.5

    def render_coarse(self, pose_BP: Tensor) -> Rendering:
        """Coarse pass: features, depth, transmittance, ray direction and origin (B, F, H, W)."""
        with torch.autocast(pose_BP.device.type, enabled=False):
            direction_B3HW, origin_B3 = self._rays(pose_BP.unflatten(1, (3, 4)))
            unit = self._unit
            point_B3DHW = origin_B3[:, :, None, None, None] + self.depth_D[:, None, None] * direction_B3HW[:, :, None]
            features_NC = sample_planes(self.planes, self._contract(point_B3DHW))
        shape = (len(pose_BP), self.num_samples, self.height, self.width)
        outputs = self.said(leaky(self.say(features_NC))).float().unflatten(0, shape)
        step_D11 = (torch.diff(self.depth_D, append=self.depth_D[-1:] ** 2 / self.depth_D[-2:-1]) / unit)[:, None, None]
        weight_BDHW, background_BHW = ray_weights(outputs[..., 0], step_D11)
        features_BFHW = (weight_BDHW[..., None] * outputs[..., 1:]).sum(1).movedim(-1, 1)
        depth_B1HW = (weight_BDHW * (self.depth_D / unit)[:, None, None]).sum(1, keepdim=True)
        origin_B3HW = (origin_B3 / unit)[:, :, None, None].expand_as(direction_B3HW)
        parts = (features_BFHW, depth_B1HW, background_BHW[:, None], direction_B3HW, origin_B3HW)
        return Rendering(torch.cat(parts, dim=1), weight_BDHW)

    def render_fine(self, detail: "FineField", pose_BP: Tensor, weight_BDHW: Tensor) -> Tensor:
        """Fine pass: an image (B, 3, H, W), one ray per pixel, with samples drawn from the coarse weights."""
        with torch.autocast(pose_BP.device.type, enabled=False):
            edge_BEHW = self._fine_edges(stop_gradient(weight_BDHW))
            direction_B3HW, origin_B3 = self._rays(pose_BP.unflatten(1, (3, 4)), RAY_STRIDE)
            depth_BDHW = 0.5 * (edge_BEHW[:, 1:] + edge_BEHW[:, :-1])
            point_B3DHW = origin_B3[:, :, None, None, None] + depth_BDHW[:, None] * direction_B3HW[:, :, None]
            depth_unit_BDHW, step_BDHW = depth_BDHW / self._unit, torch.diff(edge_BEHW, dim=1) / self._unit
            features_NC = sample_planes(list(detail.planes), self._contract(point_B3DHW))
        given_NC = torch.cat((features_NC, depth_unit_BDHW.reshape(-1, 1)), dim=1)
        outputs = detail(given_NC).float().unflatten(0, depth_unit_BDHW.shape)
        weight_BDHW, _ = ray_weights(outputs[..., 0], step_BDHW)
        return (weight_BDHW[..., None] * outputs[..., 1:]).sum(1).movedim(-1, 1)

    def forward(self, pose_BP: Tensor) -> tuple[Tensor, Tensor | None]:
        """Images without the U-net: one pixel per coarse ray, and full size where there is a fine pass."""
        seen = self.render_coarse(pose_BP)
        picture_B3HW = None if self.detail is None else self.render_fine(self.detail, pose_BP, seen.weight_BDHW)
        return seen.features_BFHW[:, :3], picture_B3HW

    def render_before_and_after(self, pose_BP: Tensor, numbers_BN: Tensor) -> Rendering:
        """The view after the control, and fine images before and after it. Those get gradients from the field's own loss only."""
        after_BP = self.next_pose(pose_BP, numbers_BN[:, : len(self.motion_A6)])
        seen = self.render_coarse(after_BP)
        if self.detail is None:
            return seen
        with torch.no_grad():
            weight_BDHW = torch.cat((self.render_coarse(pose_BP).weight_BDHW, seen.weight_BDHW))
            pictures = self.render_fine(self.detail, torch.cat((pose_BP, after_BP)), weight_BDHW)
        return seen._replace(rendered_B6HW=stop_gradient(torch.cat(pictures.chunk(2), dim=1)))

    def project(self, seen: Rendering, scale: int) -> Tensor:
        """The view projected to the U-net's channels at 1/2^(scale + 1) of the image size."""
        factor, features_BFHW = RAY_STRIDE / 2 ** (scale + 1), seen.features_BFHW
        if factor > 1.0:
            features_BFHW = F.interpolate(features_BFHW, scale_factor=factor, mode="bilinear", align_corners=False)
        elif factor < 1.0:
            features_BFHW = F.avg_pool2d(features_BFHW, round(1.0 / factor))
        projected_BCHW = self.enter[scale](features_BFHW)
        if scale or self.detail is None or seen.rendered_B6HW is None:
            return projected_BCHW
        return projected_BCHW + self.detail.enter(F.pixel_unshuffle(seen.rendered_B6HW, 2))

    @property
    def _unit(self) -> Tensor:
        return self.depth_D[-1] / FAR

    def _fine_edges(self, weight_BDHW: Tensor) -> Tensor:
        """Edges of the fine samples of every pixel's ray: inverse transform sampling of the coarse weights, at even quantiles."""
        rest_B1HW = 1.0 - weight_BDHW.sum(1, keepdim=True)
        weight_BDHW = torch.cat((weight_BDHW[:, :-1], weight_BDHW[:, -1:] + rest_B1HW), dim=1)
        # A surface in one coarse sample may be in the next one for a neighbouring ray.
        around_BDHW = F.max_pool3d(weight_BDHW[:, None], (3, 1, 1), stride=1, padding=(1, 0, 0))[:, 0]
        weight_BDHW = MIN_WEIGHT + 0.5 * (weight_BDHW + around_BDHW)
        weight_BDHW = F.interpolate(weight_BDHW, scale_factor=RAY_STRIDE, mode="bilinear", align_corners=False)
        pdf_BDHW = weight_BDHW / weight_BDHW.sum(1, keepdim=True)
        before_BDHW = pdf_BDHW.cumsum(1) - pdf_BDHW
        ratio = self.depth_D[1] / self.depth_D[0]
        bound_E = torch.cat((self.depth_D, self.depth_D[-1:] * ratio)) * ratio.rsqrt()
        quantile_E111 = torch.linspace(0.0, 1.0, self.fine_samples + 1, device=weight_BDHW.device)[:, None, None, None]
        # The inverse CDF as a sum over samples: each is covered fully, in part or not at all.
        covered_BEDHW = ((quantile_E111 - before_BDHW[:, None]) / pdf_BDHW[:, None]).clamp(0.0, 1.0)
        return bound_E[0] + (covered_BEDHW * torch.diff(bound_E)[:, None, None]).sum(2)

    def _rays(self, pose_B34: Tensor, scale: int = 1) -> tuple[Tensor, Tensor]:
        """Unit directions and origins in the world; `scale` times as many rays along a side as in the coarse pass.

        A pinhole camera rotates its view when it pitches. Old game engines shift the image instead, and walls stay upright.
        """
        on, height, width = pose_B34.device, scale * self.height, scale * self.width
        pixel = 2.0 * HALF_FOV_TAN / max(height, width)
        left_W = pixel * (0.5 * (width - 1) - torch.arange(width, device=on, dtype=torch.float32))
        up_H1 = pixel * (0.5 * (height - 1) - torch.arange(height, device=on, dtype=torch.float32))[:, None]
        (across, down, _, steep), shifts = self.lens_4.exp(), self.lens_4[2]
        upright_3 = torch.eye(3, device=on)[2]
        forward_B3, left_B3, up_B3, position_B3 = pose_B34.unbind(2)
        level_B1 = forward_B3[:, :2].square().sum(1, keepdim=True).sqrt().clamp_min(MIN_HORIZONTAL)
        forward_B3 = forward_B3 * (1.0 + shifts * (1.0 / level_B1 - 1.0))
        forward_B3 = forward_B3 + upright_3 * forward_B3 * shifts * (steep - 1.0)
        up_B3 = up_B3 + shifts * (upright_3 - up_B3)
        forward, left, up = (side[:, :, None, None] for side in (forward_B3, left_B3, up_B3))
        direction_B3HW = forward + left * (across * left_W) + up * (down * up_H1)
        return direction_B3HW / direction_B3HW.square().sum(1, keepdim=True).sqrt(), position_B3 - self.middle_3

    def _contract(self, point_B3DHW: Tensor) -> Tensor:
        """Scene contraction to plane coordinates (3, N) in [-1, 1]: linear inside the recorded extent, inverse outside."""
        share = point_B3DHW / self.reach_3[:, None, None, None]
        size = share.abs().clamp_min(1.0)
        contracted = torch.where(size > 1.0, share.sign() * (1.0 - (1.0 - INNER_SHARE) / size), INNER_SHARE * share)
        return contracted.movedim(1, 0).flatten(1)

    def intrinsics(self) -> dict[str, float]:
        """Learned field of view in degrees, across and down, and the share of a pitch that shifts the image."""
        across, down, shifts, steep = self.lens_4.double().cpu().tolist()
        sides = ((across, self.width), (down - shifts * steep, self.height))
        halves = (HALF_FOV_TAN * math.exp(wider) * side / max(self.height, self.width) for wider, side in sides)
        across, down = (math.degrees(2.0 * math.atan(half)) for half in halves)
        return {"across": round(across, 1), "down": round(down, 1), "shifts": round(shifts, 3)}

    def flops(self, positions: list[int]) -> float:
        """Of a prediction, multiplications only; `positions` by scale."""
        enter = sum(flops(conv, n) for conv, n in zip(self.enter, positions, strict=True))
        fine = 0.0 if self.detail is None else flops(self.detail.enter, positions[0])
        return self._pass_flops()[0] + enter + self.rendered_flops() + fine

    def rendered_flops(self) -> float:
        """Of the fine images of a prediction, before and after the control; they have no backward pass."""
        coarse, fine = self._pass_flops()
        return 0.0 if self.detail is None else coarse + 2.0 * fine

    def render_flops(self) -> float:
        """Of one view of the field alone."""
        return sum(self._pass_flops())

    def _pass_flops(self) -> tuple[float, float]:
        """Of the coarse pass and of the fine one: their decoders, once per sample."""
        rays, detail = self.height * self.width, self.detail
        coarse = self.num_samples * rays * (flops(self.say) + flops(self.said))
        if detail is None:
            return coarse, 0.0
        return coarse, self.fine_samples * rays * RAY_STRIDE**2 * (flops(detail.say) + flops(detail.said))


class FineField(nn.Module):
    """Planes and decoder of the fine pass: density and colour of a point, given its distance."""

    def __init__(self, reach_3: Tensor, channels: int, cells: int) -> None:
        super().__init__()
        share_3 = (reach_3 / reach_3.max()).clamp_min(1.0 / MAX_ASPECT)
        x, y, z = (round(cells * share) for share in share_3.tolist())
        planes = (nn.Parameter(torch.zeros(1, FINE_CHANNELS, *sides)) for sides in ((y, x), (z, x), (z, y)))
        self.planes = nn.ParameterList(declare(plane, "scalar", lr_scale=LR_SCALE) for plane in planes)
        self.say, self.said = nn.Linear(FINE_CHANNELS + 1, HIDDEN), nn.Linear(HIDDEN, 4)
        self.enter = nn.Conv2d(2 * 12, channels, 1)

    def init_weights(self, generator: torch.Generator) -> None:
        for plane in self.planes:
            normal_(plane, 0.1, generator)
        for layer in (self.say, self.said, self.enter):
            init_conv(layer, generator)
        with torch.no_grad():
            self.said.weight[1:] = 0.0  # initial images are grey

    def forward(self, features_NC: Tensor) -> Tensor:
        return self.said(leaky(self.say(features_NC)))


def flat_poses(recording: Recording) -> np.ndarray:
    """(T, P) in float32. The controls must be the camera's own motion."""
    units = {axis.name: axis.unit for axis in recording.axes}
    if recording.pose_T44 is None or any(units.get(name) != ("m" if name in "xyz" else "rad") for name in MOTION):
        missing = "no poses" if recording.pose_T44 is None else f"other controls than {', '.join(MOTION)} in m and rad"
        raise UserError(
            f"model.pose_tracking integrates camera motion, but {recording.path} has {missing}\nset model.pose_tracking=false"
        )
    return flatten_poses(recording.pose_T44)


def flatten_poses(pose_B44: np.ndarray) -> np.ndarray:
    """(B, P): the network's input for poses."""
    return pose_B44[:, :3].reshape(-1, POSE_SIZE).astype(np.float32)


def rotation_matrices(vector_B3: Tensor) -> Tensor:
    """Rotation matrices (B, 3, 3) of rotation vectors; well-defined gradients at zero."""
    angle_B11 = vector_B3.square().sum(1).clamp_min(1e-12).sqrt()[:, None, None]
    x, y, z = vector_B3.unbind(1)
    zero = torch.zeros_like(x)
    skew_B33 = torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), dim=1).unflatten(1, (3, 3))
    first, second = angle_B11.sin() / angle_B11, 2.0 * ((0.5 * angle_B11).sin() / angle_B11).square()
    return torch.eye(3, device=x.device) + first * skew_B33 + second * (skew_B33 @ skew_B33)


def sample_planes(planes: Sequence[Tensor] | Tensor, contracted_3N: Tensor) -> Tensor:
    """The sum of the three planes' features at every point (N, C). Planes of one size are one tensor, sampled by one call."""
    x_N, y_N, z_N = contracted_3N
    across, down = (x_N, x_N, y_N), (y_N, z_N, z_N)
    if isinstance(planes, Tensor) and not torch.compiler.is_exporting():
        at_3N12 = torch.stack((torch.stack(across), torch.stack(down)), dim=-1)[:, :, None]
        return F.grid_sample(planes, at_3N12, padding_mode="border", align_corners=False)[..., 0].sum(0).T
    total_NC = torch.zeros((), device=contracted_3N.device)
    for plane_CKK, across_N, down_N in zip(planes, across, down, strict=True):
        plane_1CKK = plane_CKK.view(1, *plane_CKK.shape[-3:])
        total_NC = total_NC + (bilinear_gather if torch.compiler.is_exporting() else bilinear)(plane_1CKK, across_N, down_N)
    return total_NC


def bilinear(plane_1CKK: Tensor, across_N: Tensor, down_N: Tensor) -> Tensor:
    """Bilinear interpolation of a plane's features at points (N, C)."""
    at_1N12 = torch.stack((across_N, down_N), dim=-1)[None, :, None]
    return F.grid_sample(plane_1CKK, at_1N12, padding_mode="border", align_corners=False)[0, :, :, 0].T


def bilinear_gather(plane_1CKK: Tensor, across_N: Tensor, down_N: Tensor) -> Tensor:
    """The same by gathers of whole feature vectors, which other runtimes execute several times faster."""
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


def ray_weights(density_BDHW: Tensor, step_DHW: Tensor) -> tuple[Tensor, Tensor]:
    """Volume-rendering weights of the samples of a ray, and what it transmits behind the last one (B, H, W)."""
    transmittance_BDHW = (-DENSITY_SCALE * step_DHW * F.softplus(density_BDHW - 1.0)).cumsum(1).exp()
    before_BDHW = torch.cat((torch.ones_like(transmittance_BDHW[:, :1]), transmittance_BDHW[:, :-1]), dim=1)
    return before_BDHW - transmittance_BDHW, transmittance_BDHW[:, -1]
