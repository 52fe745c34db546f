"""Pose tracking and the radiance field: dead reckoning is exact, no future frame leaks, full turns close."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import float_limit
from torch.utils.flop_counter import FlopCounterMode
from world_samples import config_of, made, valid

from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.recipes.world import objective
from seedbed.recipes.world.controls import held, raw_action
from seedbed.recipes.world.curriculum import Stage
from seedbed.recipes.world.evaluate import free_run
from seedbed.recipes.world.examine import action_swap, examine, table, trajectory_batch
from seedbed.recipes.world.objective import open_window, rows_of
from seedbed.recipes.world.radiance_field import (
    FINE_SCALE,
    POSE_SIZE,
    FineField,
    RadianceField,
    bilinear,
    bilinear_gather,
    flat_poses,
    rotation_matrices,
)
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.recording import write_recording

PLACED = ("model.pose_tracking=true", "model.rollout=6")
AGAIN = (*PLACED, "model.size=1.3m")  # wide enough to look again
FIELDS = {"small": PLACED, "asked": (*PLACED, "model.fine_samples=4"), "wide": AGAIN}


def spread(system, size: float = 0.05) -> None:
    """No weight is zero, as some are at birth: every input counts."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in system.parameters():
            param += size * torch.randn(param.shape, generator=generator)


def field_of(system) -> RadianceField:
    assert system.trunk.field is not None
    return system.trunk.field


def test_fine_pass_is_where_a_config_or_a_wide_network_asks_for_it() -> None:
    fields = {name: field_of(made(*settings)[0]) for name, settings in FIELDS.items()}
    assert {name: field.fine_samples for name, field in fields.items()} == {"small": 0, "asked": 4, "wide": 8}
    assert {name: field.detail is not None for name, field in fields.items()} == {"small": False, "asked": True, "wide": True}
    assert fields["asked"].num_samples == fields["small"].num_samples


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-3, 0.3, 3.0])
def test_pose_rotation_equals_that_of_the_recording(size: float) -> None:
    vector_B3 = size * np.random.default_rng(1).standard_normal((64, 3))
    found = rotation_matrices(torch.from_numpy(vector_B3).float())
    # Three squares, a root, a sine, products; and an angle of up to 3 turns is itself rounded by 9 eps.
    np.testing.assert_allclose(found.numpy(), poses.exp(vector_B3), atol=float_limit(16))


def test_dead_reckoning_reproduces_recorded_positions() -> None:
    """A whole episode of the recording, from its first pose by its scaled controls alone."""
    system, _, _ = made(*PLACED)
    recording = system.data.recording
    assert recording.pose_T44 is not None
    last = int(np.flatnonzero(recording.last_T)[0])
    pose_BP, scaled_TA = system.pose_of(np.array([0])), torch.from_numpy(recording.scaled())
    for t in range(last):
        pose_BP = field_of(system).next_pose(pose_BP, scaled_TA[t : t + 1])
    np.testing.assert_allclose(pose_BP[0].view(3, 4).numpy(), recording.pose_T44[last, :3], atol=2e-4)


def test_walkable_mask_allows_every_recorded_step() -> None:
    """From true poses the ground changes nothing, bit for bit; nor does it where sums of controls differ a little."""
    system, _, _ = made(*PLACED)
    field, recording = field_of(system), system.data.recording
    row_T = np.flatnonzero(~recording.last_T)
    pose_TP, scaled_TA = system.pose_of(row_T), torch.from_numpy(recording.scaled()[row_T])
    found_TP = field.next_pose(pose_TP, scaled_TA)
    assert 0 < field.walkable_N.float().mean() < 1
    field.walkable_N = torch.ones_like(field.walkable_N)
    assert torch.equal(found_TP, field.next_pose(pose_TP, scaled_TA))


@pytest.mark.parametrize("way", [1.0, -1.0])
def test_walkable_mask_is_never_left(way: float) -> None:
    """Pushed along every axis for a thousand steps while turning, from many places at once."""
    system, _, _ = made(*PLACED)
    field, recording = field_of(system), system.data.recording
    walked_T3 = flat_poses(recording).reshape(-1, 3, 4)[:, :, 3]
    pose_BP = system.pose_of(np.arange(0, 300, 10))
    held_BA = torch.full((len(pose_BP), len(recording.axes)), 2.0 * way)
    moved = torch.zeros(len(pose_BP), dtype=torch.bool)
    for _ in range(1000):
        before_BP, pose_BP = pose_BP, field.next_pose(pose_BP, held_BA)
        at_B3 = pose_BP.view(-1, 3, 4)[:, :, 3]
        assert (at_B3.numpy() >= walked_T3.min(0)).all() and (at_B3.numpy() <= walked_T3.max(0)).all()
        assert field.walkable_N[field._mask_cell(at_B3)].all()
        moved |= (at_B3 != before_BP.view(-1, 3, 4)[:, :, 3]).any(1)
    assert moved.all()
    turned_B33 = pose_BP.view(-1, 3, 4)[:, :, :3]
    torch.testing.assert_close(turned_B33 @ turned_B33.mT, torch.eye(3).expand_as(turned_B33), atol=1e-3, rtol=0.0)


def test_walkable_mask_lets_the_camera_slide_along_walls() -> None:
    """A wall across the ground: what leads through it is left out, what leads along it is not."""
    field = field_of(made(*PLACED)[0])
    low_3, high_3 = field.bounds_23
    walkable_KK = torch.ones(48, 48, dtype=torch.bool)
    walkable_KK[24:] = False
    field.walkable_N = walkable_KK.flatten()
    size_3, middle_3 = (high_3 - low_3) / 48, (low_3 + high_3) / 2
    before = (middle_3 - size_3 * torch.tensor([0.1, 0.0, 0.0]))[None]
    through, along = size_3 * torch.tensor([0.5, 0.0, 0.0]), size_3 * torch.tensor([0.0, 0.5, 0.0])
    assert torch.equal(field._clamp_to_walkable(before, before + through), before)
    torch.testing.assert_close(field._clamp_to_walkable(before, before + through + along), before + along)
    torch.testing.assert_close(field._clamp_to_walkable(before, before - through + along), before - through + along)
    field.walkable_N = walkable_KK.T.flatten()
    before = (middle_3 - size_3 * torch.tensor([0.0, 0.1, 0.0]))[None]
    torch.testing.assert_close(field._clamp_to_walkable(before, before + through + along), before + through)


def test_window_knows_the_pose_of_its_newest_frame_at_every_age() -> None:
    system, engine, feed = made(*PLACED)
    recording, batch = system.data.recording, feed.part(0)
    engine.variant = Stage("closed", 6)
    for age in range(4):
        window, _ = system.training_windows(batch, Stage("closed", 6))
        np.testing.assert_array_equal(window.memory.pose_BP.numpy(), flat_poses(recording)[_rows(system, window)])
        assert window.age_B.max() == age
        engine.begin(age, 0.5)
        engine.step(feed.part)


def _rows(system, window) -> np.ndarray:
    """Rows of the recording, found again by the controls, which no two rows share."""
    scaled_TA = system.data.recording.scaled()
    return np.array([int(np.abs(scaled_TA - row).sum(1).argmin()) for row in window.action_BA.numpy()])


def test_field_does_not_see_the_future() -> None:
    system, _, feed = made(*PLACED)
    spread(system)
    batch, before = feed.part(0), system.layout.num_frames
    changed = {name: tensor.clone() for name, tensor in batch.items()}
    changed["frames"][:, before:] = 0
    changed["pose"][:, before:] = 9.0
    changed["action"][:, before:] = 3.0
    frames = []
    for one in (batch, changed):
        window = open_window(rows_of(one), system.layout)
        level_B, real_B = system.training_noise.levels(window)
        frames.append(
            system.net(
                system.training_noise.context(window, real_B), window.action_BA, level_B, system.training_noise.own(window)
            )
        )
    assert torch.equal(*frames)


def test_memory_dropout_spares_rollouts() -> None:
    system, _, feed = made(*PLACED, "batch=64")
    spread(system)
    window, _ = system.training_windows(feed.part(0), Stage("closed", 6))
    level_B, real_B = system.training_noise.levels(window)
    hidden_B = (system.training_noise.context(window, real_B)["m1"] == 0).flatten(1).all(1)
    true, own = hidden_B[: len(hidden_B) - window.num_own], hidden_B[len(hidden_B) - window.num_own :]
    assert 0 < true.sum() < len(true) and not own.any()
    share = objective.MEMORY_DROPOUT
    assert abs(true.float().mean() - share) < 4 * math.sqrt(share * (1 - share) / len(true))
    # A hidden memory says nothing: other frames give the same prediction.
    other, _ = system.training_windows({**feed.part(0), "frames": 255 - feed.part(0)["frames"]}, Stage("closed", 6))
    args = window.action_BA, level_B, system.training_noise.own(window)
    one, two = (system.net(system.training_noise.context(w, real_B), *args) for w in (window, other))
    same_B = (one == two).flatten(1).all(1)
    assert torch.equal(same_B[: len(true)], true) and not same_B[len(true) :].any()


def test_pose_changes_what_is_dreamed_and_a_circle_closes() -> None:
    system, _, _ = made(*PLACED)
    spread(system)
    traj = trajectory_batch(system, valid(system), 4, 4)
    memory, action_BA = traj.memory(system), traj.action(1)
    assert memory.pose_BP is not None and memory.pose_BP.shape == (4, POSE_SIZE)
    aside = memory.pose_BP + torch.tensor([0.0, 0.0, 0.0, 2.0] * 3)
    own = system.predict_frame(memory, action_BA, traj.index_B, 1)
    moved = system.predict_frame(type(memory)(memory.layout, memory.kept, aside), action_BA, traj.index_B, 1)
    assert (own - moved).abs().flatten(1).amax(1).min() > 1e-4
    yaw = next(axis for axis in system.data.recording.axes if axis.name == "yaw")
    num = round(2 * math.pi / yaw.full[1])
    around = held(system, raw_action(system.data.recording, yaw, 2 * math.pi / num), num, action_BA)
    for _, frame in free_run(system, traj, num, around):
        memory = system.advance(memory, around[0], frame)
    torch.testing.assert_close(memory.pose_BP, traj.memory(system).pose_BP, atol=1e-4, rtol=0)
    assert action_swap(system, traj) > 0


def test_volume_rendering_occludes_farther_points() -> None:
    """With a wall of full density at the first depth nothing behind it is seen, and what is seen adds up to one."""
    system, _, _ = made(*PLACED)
    field = field_of(system)
    pose_BP = system.pose_of(np.array([3, 9]))
    with torch.no_grad():
        field.said.bias[0], field.said.weight[0] = 1e4, 0.0
        seen = field.render_coarse(pose_BP).features_BFHW
        assert seen[:, -8].sub(field.depth_D[0] * 2.2 / field.depth_D[-1]).abs().max() < 1e-6 and seen[:, -7].max() == 0
        field.said.bias[0] = -1e4
        empty = field.render_coarse(pose_BP).features_BFHW
        assert (empty[:, :-8] == 0).all() and (empty[:, -7] == 1).all()
    torch.testing.assert_close(seen[:, -6:-3].norm(dim=1), torch.ones_like(seen[:, 0]), atol=1e-5, rtol=0)


def tilted(pitch: float, yaw: float) -> torch.Tensor:
    """A pose that looks down by `pitch`."""
    turned_33 = poses.exp(np.array([[0.0, 0.0, yaw]]))[0] @ poses.exp(np.array([[0.0, pitch, 0.0]]))[0]
    return torch.cat((torch.from_numpy(turned_33).float(), torch.ones(3, 1)), dim=1)[None]


@pytest.mark.parametrize("pitch", [-0.6, 0.0, 0.4])
def test_intrinsics_rotate_or_shift_the_image(pitch: float) -> None:
    """At birth it is a pinhole. Where looking down only shifts the picture, columns stay upright and the middle is the same."""
    field = field_of(made(*PLACED)[0])
    pose_B34 = tilted(pitch, 0.7)
    with torch.no_grad():
        pinhole, eye = field._rays(pose_B34)
        seen = torch.einsum("ij,ihw->jhw", pose_B34[0, :, :3], pinhole[0])  # as the camera has it
        assert torch.equal(eye[0], pose_B34[0, :, 3] - field.middle_3)
        torch.testing.assert_close((seen[1] / seen[0])[0], (seen[1] / seen[0])[-1])
        assert (seen[1] / seen[0])[0, 0].item() == pytest.approx(0.767 * 3 / 4, rel=1e-5)  # the middle of the first of four
        assert field.intrinsics() == {"across": 75.0, "down": 75.0, "shifts": 0.0}
        field.lens_4[2] = 1.0
        shifted, _ = field._rays(pose_B34)
    torch.testing.assert_close(shifted.norm(dim=1), torch.ones_like(shifted[:, 0]))
    flat = shifted[0, :2] / shifted[0, :2].norm(dim=0)
    torch.testing.assert_close(flat, flat[:, :1].expand_as(flat), msg="columns lean")
    rise = shifted[0, 2] / (shifted[0, :2] * pose_B34[0, :2, 0, None, None] / math.cos(pitch)).sum(0)
    assert rise.mean().item() == pytest.approx(-math.tan(pitch), abs=1e-5)


def test_lens_is_learned() -> None:
    """Views of a lens that is half as wide again and shifts, from a map that is known: the lens is found from the pictures."""
    field, true = field_of(made(*PLACED)[0]), [0.2, 0.3, 0.8, 0.2]
    spread(field, 0.2)
    pose_BP = torch.cat([tilted(pitch, yaw).flatten(1) for pitch in (-0.5, -0.2, 0.3, 0.6) for yaw in (0.0, 1.0, 2.0, 3.0)])
    with torch.no_grad():
        field.lens_4.copy_(torch.tensor(true))
        target = field.render_coarse(pose_BP).features_BFHW[:, :-8]
        field.lens_4.zero_()
    optimizer = torch.optim.Adam([field.lens_4], lr=0.03)
    for _ in range(120):
        loss = (field.render_coarse(pose_BP).features_BFHW[:, :-8] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(field.lens_4.detach(), torch.tensor(true), atol=0.03, rtol=0.0)


@pytest.mark.slow
def test_place_can_be_learned_from_poses_alone() -> None:
    """Twelve views, memories hidden: the error falls to a fraction of what the mean picture has."""
    system, _, _ = made(*PLACED)
    recording, rows = system.data.recording, np.arange(0, 240, 20)
    pose_BP, field = system.pose_of(rows), field_of(system)
    target = torch.from_numpy(recording.frames_THWC[rows]).movedim(-1, 1) / 127.5 - 1.0
    optimizer = torch.optim.Adam(system.net.parameters(), lr=1e-2)
    nothing = {"m1": torch.zeros(12, 12, 16, 16), "pose": pose_BP}
    still = torch.full((12, len(recording.axes)), 0.0)
    still[:, -1] = 1.0  # of the time alone, so that a static place may change
    field.motion_A6[-1] = 0.0
    for _ in range(150):
        loss = (system.net(nothing, still, torch.zeros(12), torch.zeros(12, 1, 16, 16)) - target).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.35 * (target - target.mean(0)).abs().mean()


def detail_of(field: RadianceField) -> FineField:
    assert field.detail is not None
    return field.detail


@pytest.mark.parametrize("sides", [(5, 9), (128, 128), (1, 7)])
def test_plane_lookup_for_export_equals_training(sides: tuple[int, int]) -> None:
    """Inside, on the rim and beyond it."""
    generator = torch.Generator().manual_seed(3)
    plane_1CKK, at_2N = torch.randn(1, 6, *sides, generator=generator), 3.0 * torch.rand(2, 500, generator=generator) - 1.5
    torch.testing.assert_close(bilinear_gather(plane_1CKK, *at_2N), bilinear(plane_1CKK, *at_2N), atol=1e-5, rtol=0.0)


def test_initial_fine_field_is_grey_and_keeps_the_last_frame() -> None:
    system, _, feed = made(*AGAIN)
    window = open_window(rows_of(feed.part(0)), system.layout)
    assert field_of(system)(window.memory.pose_BP)[1].abs().max() == 0
    frame = system.net(window.memory.tensors(), window.action_BA, torch.zeros(8), system.training_noise.own(window))
    torch.testing.assert_close(frame, window.memory.last)


def test_fine_field_image_plus_unexplained_residual() -> None:
    """With a network that says nothing, exactly: the map's picture after the control, and the last frame less that before it."""
    system, _, feed = made(*AGAIN, "model.static=false")
    field = field_of(system)
    spread(field)
    window = open_window(rows_of(feed.part(0)), system.layout)
    memory = window.memory.tensors()
    # A point that is rounded by eps, of places up to 2, lies so many times as far off among texels; neighbours differ by up to 1.
    limit = {"rtol": 0.0, "atol": 2 * FINE_SCALE * 128 * torch.finfo(torch.float32).eps}
    with torch.no_grad():
        before, after = field(window.memory.pose_BP)[1], field(field.next_pose(window.memory.pose_BP, window.action_BA))[1]
        assert (before - after).abs().max() > 1e-3
        frame = system.net(memory, window.action_BA, torch.zeros(8), system.training_noise.own(window))
        torch.testing.assert_close(frame, after + (window.memory.last - before), **limit)
        # A memory that the map knows altogether leads to what the map shows.
        known = {**memory, "m1": torch.cat((memory["m1"][:, :-3], before), dim=1)}
        frame = system.net(known, window.action_BA, torch.zeros(8), system.training_noise.own(window))
        torch.testing.assert_close(frame, after, **limit)


def test_fine_rays_are_one_per_pixel_around_coarse_rays() -> None:
    field = field_of(made(*AGAIN)[0])
    pose_B34 = tilted(0.4, 0.7)
    coarse, fine = (field._rays(pose_B34, finer)[0] for finer in (1, 4))
    assert fine.shape[2:] == (16, 16)
    ahead = pose_B34[:, :, 0, None, None]

    def flat(rays: torch.Tensor) -> torch.Tensor:
        return rays / (rays * ahead).sum(1, keepdim=True)  # as far as the picture's plane

    torch.testing.assert_close(F.avg_pool2d(flat(fine), 4), flat(coarse))


def test_fine_samples_follow_the_coarse_weights() -> None:
    """Stretches are in order and as likely as each other; nearly all of them are where the coarse rays met a wall."""
    field = field_of(made(*AGAIN)[0])
    weight_BDHW = torch.zeros(1, field.num_samples, 4, 4)
    assert (field._fine_edges(weight_BDHW).diff(dim=1) > 0).all()  # nothing was met: all the way
    weight_BDHW[:, 9] = 1.0
    edge_BEHW = field._fine_edges(weight_BDHW)
    assert edge_BEHW.shape == (1, 9, 16, 16) and (edge_BEHW.diff(dim=1) > 0).all()
    ratio = (field.depth_D[1] / field.depth_D[0]).sqrt()
    assert (edge_BEHW[:, 0] <= field.depth_D[0] / ratio).all() and (edge_BEHW[:, -1] >= field.depth_D[-1] * ratio * 0.999).all()
    inside = (edge_BEHW >= field.depth_D[8] / ratio * 0.999) & (edge_BEHW <= field.depth_D[10] * ratio * 1.001)
    assert (inside.sum(1) == 7).all()  # all but the ends, in the stretch and its neighbours
    # A wall on the left and a farther one on the right: pixels between look for both.
    weight_BDHW[:, 9, :, 2:], weight_BDHW[:, 20, :, 2:] = 0.0, 1.0
    edge_BEHW = field._fine_edges(weight_BDHW)
    near = (edge_BEHW < field.depth_D[12]).sum(1)
    assert (
        (near[..., :5] >= 8).all() and (near[..., -5:] <= 1).all() and (near[..., 7:9] > 2).all() and (near[..., 7:9] < 7).all()
    )


def test_fine_pass_is_occluded_by_walls() -> None:
    """Full density everywhere: only the first stretch is seen, and colour may depend on how far it is."""
    field = field_of(made(*AGAIN)[0])
    detail, pose_BP = detail_of(field), tilted(0.0, 0.3).flatten(1)
    with torch.no_grad():
        detail.said.weight.zero_()
        detail.said.bias.copy_(torch.tensor([1e4, 0.1, 0.2, 0.3]))
        shown = field(pose_BP)[1]
        torch.testing.assert_close(shown, torch.tensor([0.1, 0.2, 0.3])[None, :, None, None].expand(1, 3, 16, 16))
        detail.said.bias[0] = -1e4
        assert field(pose_BP)[1].abs().max() == 0


@pytest.mark.slow
def test_finer_map_is_learned_from_poses_alone() -> None:
    """Twelve views: its own picture, without the network, gets far nearer to them than their mean and than the coarse map's."""
    field = field_of(made(*AGAIN)[0])
    system, _, _ = made(*AGAIN)
    recording, rows = system.data.recording, np.arange(0, 240, 20)
    pose_BP = system.pose_of(rows)
    target = torch.from_numpy(recording.frames_THWC[rows]).movedim(-1, 1) / 127.5 - 1.0
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2)
    for _ in range(120):
        coarse, shown = field(pose_BP)
        loss = (shown - target).abs().mean()
        optimizer.zero_grad()
        (loss + (coarse - F.avg_pool2d(target, 4)).abs().mean()).backward()
        optimizer.step()
    assert loss < 0.35 * (target - target.mean(0)).abs().mean()
    wide = F.interpolate(coarse, scale_factor=4.0, mode="bilinear", align_corners=False)
    assert loss < 0.5 * (wide - target).abs().mean()


def test_error_of_the_frame_moves_nothing_of_the_finer_map() -> None:
    system, _, feed = made(*AGAIN)
    spread(system)
    window = open_window(rows_of(feed.part(0)), system.layout)
    frame = system.net(window.memory.tensors(), window.action_BA, torch.zeros(8), system.training_noise.own(window))
    frame.square().sum().backward()
    detail = detail_of(field_of(system))
    assert all(p.grad is None for p in (*detail.planes, *detail.say.parameters(), *detail.said.parameters()))
    assert detail.enter.weight.grad.abs().max() > 0 and field_of(system).planes.grad.abs().max() > 0


@pytest.mark.parametrize("placed", FIELDS.values(), ids=FIELDS)
def test_flops_by_formula_equal_the_count(placed: tuple[str, ...]) -> None:
    """Of a prediction, of training on it, and of the map alone; grids are bilinear without products that are counted."""
    system, _, feed = made(*placed)
    window = open_window(rows_of(feed.part(0)), system.layout)
    num, given = (
        len(window.index_B),
        (window.memory.tensors(), window.action_BA, torch.zeros(8), system.training_noise.own(window)),
    )
    with FlopCounterMode(display=False) as counter:
        out = system.net(*given)
        assert system.net.flops() == pytest.approx(counter.get_total_flops() / num, rel=0.01)
        out.abs().mean().backward()
    assert system.net.flops_per_frame() == pytest.approx(counter.get_total_flops() / num, rel=0.01)
    with FlopCounterMode(display=False) as counter:
        sum(shown.sum() for shown in field_of(system)(window.memory.pose_BP) if shown is not None).backward()
    assert 3.0 * field_of(system).render_flops() == pytest.approx(counter.get_total_flops() / num, rel=0.01)


@pytest.mark.parametrize("placed", [PLACED, AGAIN], ids=["once", "again"])
@pytest.mark.parametrize("preset", ["demo", "edm"])
def test_map_is_held_against_the_pictures_by_itself(preset: str, placed: tuple[str, ...]) -> None:
    """Its error moves the map and the lens and nothing of the network; it is that of the pictures the windows lead to."""
    system, _, feed = made(*placed, preset=preset)
    spread(system)
    field = field_of(system)
    window, _ = system.training_windows(feed.part(0), Stage("closed", 2))
    error, measured = system.loss_of_step(torch.zeros(()), torch.zeros(()), window, Stage("closed", 2))
    assert torch.equal(error.detach(), measured["loss_map"])
    error.backward()
    moved = {name for name, param in system.named_parameters() if param.grad is not None and param.grad.abs().max() > 0}
    assert moved == {name for name, _ in system.named_parameters() if ".place." in name and ".enter." not in name}
    pose_BP = field.next_pose(window.memory.pose_BP[::4], window.action_BA[::4])
    pairs = list(zip(field(pose_BP), (F.avg_pool2d(window.target_B3HW, 4), window.target_B3HW), strict=True))
    for first in (0, 1):
        wrong = sum((shown - true[first::4]).abs().mean() for shown, true in pairs if shown is not None)
        assert torch.allclose(wrong, error) == (first == 0)


@pytest.mark.slow
def test_whole_examination_and_the_denoiser_know_the_way() -> None:
    system, _, _ = made(*PLACED)
    found = examine(system, valid(system), None, 3)
    assert "75 degrees across, 75 down; 0% of a pitch shifts" in table(found)
    assert set(found["horizons"]) >= {"1", "4", "16"} and found["turning"]["steps_of_a_circle"] > 4
    _, engine, feed = made(*PLACED, preset="edm")
    engine.variant = Stage("closed", 2)
    engine.begin(0, 0.5)
    assert math.isfinite(engine.step(feed.part)["loss"].item())


def test_pose_tracking_without_poses_or_motion_is_refused(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (400, 16, 16, 3), dtype=np.uint8)
    tables = (np.full((400, 2), 1 / 30), np.arange(400) / 30, np.zeros(400, np.int32), [("gas", ""), ("dt", "s")])
    write_recording(tmp_path / "plain", frames, *tables, source={"name": "x"}, accepted=True)
    pose = np.tile(np.eye(4), (400, 1, 1))
    write_recording(tmp_path / "posed", frames, *tables, pose=pose, source={"name": "x"}, accepted=True)
    for name, says in (("plain", "has no poses"), ("posed", "has other controls than x, y, z, roll, pitch, yaw")):
        with pytest.raises(UserError, match=rf"{says}[^\n]*\nset model.pose_tracking=false"):
            find("world")[0].open_data(config_of(*PLACED, f"data.recording={tmp_path / name}"))
    with pytest.raises(UserError, match=r"data\.actions=pose"):
        find("world")[0].open_data(config_of(*PLACED, "data.actions=command"))
