"""Poses, the box world, walks through it, and recordings: equalities first, then what a recording refuses."""

import dataclasses
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_close_in_float

from seedbed.data.store import Store
from seedbed.errors import UserError
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording import recording as recordings
from seedbed.recipes.world.recording.capture import POSE_AXES, motions
from seedbed.recipes.world.recording.recording import (
    PARTS,
    Recording,
    cut,
    ends,
    measure_axes,
    open_recording,
    scale_actions,
    write_recording,
)
from seedbed.recipes.world.simulators.box import (
    FOG,
    HORIZON,
    RADIUS,
    REACH,
    ROOM,
    SHADES,
    SPEED_6,
    BoxWorld,
    rebuild_simulator,
    record_box,
    record_room,
    trajectories,
)

RNG = np.random.default_rng(0)


def turns(num: int, size: float) -> np.ndarray:
    axis = RNG.standard_normal((num, 3))
    return axis / np.linalg.norm(axis, axis=1, keepdims=True) * size


# ---- poses ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-8, 1e-4, 0.5, 2.0, np.pi - 1e-7, np.pi - 1e-12])
def test_rotation_vectors_round_trip(size: float):
    vector_N3 = turns(50, size)
    np.testing.assert_allclose(poses.log(poses.exp(vector_N3)), vector_N3, atol=1e-9)


def random_poses(num: int, step: float = 0.3) -> np.ndarray:
    pose_44, found = np.eye(4), []
    for motion_6 in RNG.standard_normal((num, 6)) * step:
        pose_44 = poses.step(pose_44, motion_6)
        found.append(pose_44)
    return np.stack(found)


def test_chaining_all_motions_reproduces_the_last_pose():
    pose_N44 = random_poses(300)
    np.testing.assert_allclose(functools.reduce(poses.step, poses.relative(pose_N44), pose_N44[0]), pose_N44[-1], atol=1e-9)


def test_relative_motion_is_invariant_to_the_world_frame():
    pose_N44, elsewhere_44 = random_poses(100), random_poses(3)[-1]
    elsewhere_44[:3, 3] = 70, -20, 5
    np.testing.assert_allclose(poses.relative(elsewhere_44 @ pose_N44), poses.relative(pose_N44), atol=1e-12)
    # The other order, T' inverse(T), does change: the test can tell.
    assert np.abs(poses.relative(pose_N44 @ elsewhere_44) - poses.relative(pose_N44)).max() > 0.1


@pytest.mark.parametrize("basis_33", [poses.FROM_OPENGL, poses.FROM_OPENCV], ids=["opengl", "opencv"])
def test_camera_bases_are_rotations(basis_33: np.ndarray):
    np.testing.assert_allclose(basis_33.T @ basis_33, np.eye(3), atol=0)
    assert np.linalg.det(basis_33) == pytest.approx(1)
    looks = {"opengl": (0, 0, -1), "opencv": (0, 0, 1)}
    assert tuple(basis_33[:, 0]) in looks.values()


def test_interpolation_meets_its_ends_and_keeps_constant_speed():
    time_N = np.array([0.0, 1.0, 3.0])
    pose_N44 = random_poses(3)
    found = poses.interpolate(time_N, pose_N44, np.array([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]))
    np.testing.assert_allclose(found[[0, 2, 6]], pose_N44, atol=1e-12)
    turns_N3 = poses.relative(found)[2:, 3:]
    np.testing.assert_allclose(turns_N3, np.broadcast_to(turns_N3[:1], turns_N3.shape), atol=1e-12)


def test_quaternions_need_not_have_length_one():
    rotation_N33 = poses.exp(turns(20, 2.5))
    pose_N44 = poses.from_quaternion(3.0 * poses.to_quaternion(rotation_N33), np.zeros((20, 3)))
    np.testing.assert_allclose(pose_N44[:, :3, :3], rotation_N33, atol=1e-12)


# ---- the box world -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world() -> BoxWorld:
    return BoxWorld(2, 32, 40)


@pytest.fixture(scope="module")
def walked(world: BoxWorld) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return trajectories(world, 700, 4, 1)


def test_frame_has_the_same_bytes_whatever_is_drawn_beside_it(world: BoxWorld, walked):
    pose_B44 = torch.from_numpy(walked[0][0, :40])
    together = world.render(pose_B44)
    assert torch.equal(together, torch.cat([world.render(p) for p in pose_B44.split(7)]))
    assert together.dtype == torch.uint8 and together.shape == (40, 32, 40, 3)
    assert torch.equal(together, BoxWorld(2, 32, 40).render(pose_B44))
    assert not torch.equal(together, BoxWorld(3, 32, 40).render(pose_B44))


def test_culling_of_boxes_changes_almost_no_pixel(world: BoxWorld, walked, monkeypatch: pytest.MonkeyPatch):
    pose_B44 = torch.from_numpy(walked[0][:, ::50].reshape(-1, 4, 4))
    one_by_one, together = world.render(pose_B44), world._picture(pose_B44)  # as on a CPU, and as on a GPU
    assert np.mean([world._visible(p.numpy()).shape[1] for p in pose_B44.split(1)]) < 0.6 * world.num_boxes
    num_seen = world._visible(pose_B44.numpy()).shape[1]
    assert num_seen < world.num_boxes, "as many for all as the pose with most needs"
    everything = np.arange(world.num_boxes)
    monkeypatch.setattr(world, "_visible", lambda pose_B44: np.broadcast_to(everything, (len(pose_B44), len(everything))).copy())
    whole = world.render(pose_B44)
    # Of other shapes, a ray's last bits may be others, and a byte on the border of two values, or a pixel on an edge, with them.
    for culled in (one_by_one, together, world._picture(pose_B44)):
        assert (culled != whole).double().mean() < 1e-3


def test_full_turn_returns_the_first_frame(world: BoxWorld):
    pose_44 = world.free_pose(np.random.default_rng(3))
    turn_6 = np.array([0, 0, 0, 0, 0, 2 * np.pi / 60])
    path = [pose_44]
    for _ in range(60):
        path.append(world.slide(path[-1][None], turn_6[None])[0])
    first, half, last = world.render(torch.from_numpy(np.stack([path[0], path[30], path[60]]))).int()
    assert ((first - last).abs().amax(-1) <= 1).float().mean() >= 0.99
    assert (first - half).abs().float().mean() > 10


def test_picture_shows_what_stands_there():
    """From the middle of the yard towards each wall: its own colour ahead, ground below, sky above."""
    world = BoxWorld(1, 33, 33, num_boxes=4)
    for wall, yaw in enumerate((0.0, np.pi, np.pi / 2, -np.pi / 2)):
        pose_44 = poses.step(np.eye(4), np.array([0, 0, 1.0, 0, 0, yaw]))
        picture_HWC = world.render(torch.from_numpy(pose_44[None]))[0].double() / 255
        ahead_3, paint_23 = picture_HWC[16, 16], world._paint_6K[:, wall].view(2, 3).double()
        haze_3, clear = torch.tensor(HORIZON, dtype=torch.float64), np.exp(-REACH / FOG)
        ends_23 = haze_3 + (paint_23 * SHADES[wall] - haze_3) * clear
        assert ((ahead_3 >= ends_23.amin(0) - 0.01) & (ahead_3 <= ends_23.amax(0) + 0.01)).all(), f"wall {wall}"
        assert picture_HWC[0, 16, 2] > picture_HWC[0, 16, 0] + 0.1, "the sky is blue"


def test_motion_never_ends_inside_a_box(world: BoxWorld):
    """Great strides in all directions: whatever is in the way, the eye stays where it may be, and turns are never changed."""
    rng = np.random.default_rng(5)
    pose_N44 = np.stack([world.free_pose(rng) for _ in range(64)])
    slid = 0
    for _ in range(40):
        motion_N6 = rng.standard_normal((64, 6)) * [0.8, 0.8, 0.3, 0.1, 0.1, 0.5]
        after_N44 = world.slide(pose_N44, motion_N6)
        assert world.is_free(after_N44[:, :3, 3]).all()
        done_N6 = poses.relative(np.stack([pose_N44, after_N44], 1).reshape(-1, 4, 4))[::2]
        np.testing.assert_allclose(done_N6[:, 3:], motion_N6[:, 3:], atol=1e-9)
        slid += int((np.abs(done_N6 - motion_N6).max(1) > 1e-6).sum())
        pose_N44 = after_N44
    assert slid > 100


def test_trajectories_cover_every_axis_both_ways(world: BoxWorld, walked):
    pose_NT44, done_NTA, asked_NTA = walked
    motion = done_NTA[:, :-1, :6].reshape(-1, 6) / SPEED_6
    for n, (name, _) in enumerate(POSE_AXES[:6]):
        sides = (motion[:, n] > 0.25).mean(), (motion[:, n] < -0.25).mean()
        assert min(sides) > 0.06 and max(sides) < 2.2 * min(sides), (name, sides)
    assert 0.02 < (np.abs(motion).max(1) < 0.1).mean() < 0.2, "standing still is learned too"
    assert world.is_free(pose_NT44[:, :, :3, 3].reshape(-1, 3)).all()
    for pose_T44, done_TA in zip(pose_NT44, done_NTA, strict=True):
        np.testing.assert_allclose(poses.relative(pose_T44), done_TA[:-1, :6], atol=1e-9)
    blocked = np.abs(done_NTA - asked_NTA)[..., :3].max(-1) > 1e-6
    assert 0 < blocked.mean() < 0.5 and not np.abs(done_NTA - asked_NTA)[..., 3:].any()


def test_walk_does_not_depend_on_the_others(world: BoxWorld, walked):
    alone, _, _ = trajectories(world, 700, 2, 1)
    # Every frame adds four terms to each entry of the pose, and the series of a sine.
    assert_close_in_float(torch.from_numpy(alone), torch.from_numpy(walked[0][:2]), 700 * 10)


# ---- recordings ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record_box(1200, 8, 8, 4, out=tmp_path_factory.mktemp("box") / "rec")


def test_recording_of_the_box_world_is_what_its_poses_show(box: Recording):
    world = rebuild_simulator(box)
    assert world is not None and box.pose_T44 is not None
    some = np.arange(0, 1200, 97)
    np.testing.assert_array_equal(world.render(torch.from_numpy(box.pose_T44[some])).numpy(), box.frames_THWC[some])
    exact_T7 = motions(box.pose_T44, box.time_T, box.episode_T)
    np.testing.assert_allclose(box.actions_TA, exact_T7.astype(np.float32), atol=1e-6)
    assert box.facts["recording"]["convention"] == "action[t] takes frame t to frame t+1"
    assert Store.open(box.path).verify() == []


def test_room_is_a_smaller_box_world(box: Recording, tmp_path: Path):
    room = record_room(1200, 8, 8, 4, out=tmp_path / "rec")
    world = rebuild_simulator(room)
    assert world is not None and room.pose_T44 is not None
    assert world.facts == room.facts["simulator"] and (world.reach, world.num_boxes) == ROOM
    some = np.arange(0, 1200, 97)
    np.testing.assert_array_equal(world.render(torch.from_numpy(room.pose_T44[some])).numpy(), room.frames_THWC[some])
    assert np.abs(room.pose_T44[:, :2, 3]).max() <= ROOM[0] - RADIUS + 1e-9
    assert "reach" not in box.facts["simulator"], "recordings of the box world from before keep their keys"


def test_same_wish_finds_the_same_recording(box: Recording, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(BoxWorld, "render", lambda *_: pytest.fail("it was drawn again"))
    assert record_box(1200, 8, 8, 4, out=box.path).fingerprint == box.fingerprint
    with pytest.raises(UserError, match="another recording; remove it first"):
        record_box(1200, 8, 8, 5, out=box.path)


def test_requested_controls_can_be_selected(box: Recording):
    asked = open_recording(box.path, "command")
    assert np.abs(asked.actions_TA - box.actions_TA)[:, :3].max() > 0.01
    np.testing.assert_array_equal(asked.actions_TA[:, 3:], box.actions_TA[:, 3:])


def make(path: Path, num: int, episodes: list[int] | None = None, **changes) -> Recording:
    """A small recording of noise; `changes` replaces any argument."""
    rng = np.random.default_rng(1)
    given = {
        "frames": rng.integers(0, 256, (num, 8, 8, 3), np.uint8),
        "actions": rng.standard_normal((num, 2)),
        "time": np.arange(num) / 10.0,
        "episode": np.repeat(np.arange(len(episodes)), episodes) if episodes else np.zeros(num, int),
        "axes_names_units": [("yaw", "rad"), ("dt", "s")],
        "source": {"name": "test"},
    } | changes
    return write_recording(path, **given)


@pytest.mark.parametrize("episodes", [[2000], [700, 650, 650], [100] * 20, [1000, 1000]], ids=str)
@pytest.mark.parametrize(("before", "after"), [(1, 0), (4, 1), (32, 256), (4, 60), (5, 55), (10, 82)])
def test_windows_stay_in_one_split_and_episode(episodes, before: int, after: int, tmp_path: Path):
    recording = make(tmp_path / "rec", 2000, episodes)
    parts = {}
    for part in PARTS:
        rows = [range(t - before + 1, t + after + 1) for t in recording.starts(part, before, after)]
        low, high = recording.span(part)
        for row in rows:
            assert low <= row[0] and row[-1] < high
            assert recording.episode_T[row[0]] == recording.episode_T[row[-1]]
        parts[part] = {t for row in rows for t in row}
    for one, other in (("train", "valid"), ("valid", "test")):
        for episode in set(recording.episode_T[sorted(parts[one])]) & set(recording.episode_T[sorted(parts[other])]):
            last = max(t for t in parts[one] if recording.episode_T[t] == episode)
            first = min(t for t in parts[other] if recording.episode_T[t] == episode)
            assert first - last > before + after, "a neighbour of a training frame is no test"


@pytest.mark.parametrize("num", [10, 11, 50, 300, 2000, 20_000])
@pytest.mark.parametrize("pieces", [1, 2, 7, 60])
def test_splits_are_contiguous_and_complete(num: int, pieces: int):
    splits, gap = cut(np.arange(num) * min(pieces, num) // num)
    bounds = sorted(splits.values())
    assert bounds[0][0] == 0 and bounds[-1][1] == num
    assert all(high == low for (_, high), (low, _) in itertools.pairwise(bounds))
    assert all(low < high for low, high in bounds) and set(PARTS) <= set(splits)
    assert gap == (0 if num < 25 else min(288, int(0.04 * num))) or "gap" not in splits
    sizes = {part: splits[part][1] - splits[part][0] for part in PARTS}
    assert sizes["train"] >= 0.7 * num and min(sizes.values()) >= 1


def test_windows_by_hand(tmp_path: Path):
    """A pause in the middle of the training part: no window crosses it."""
    time_T = np.arange(200) / 10.0
    time_T[50:] += 1.0
    recording = make(tmp_path / "rec", 200, time=time_T)
    low, high = recording.span("train")
    expected = [t for t in range(3, high - 2) if not t - 3 <= 49 < t + 2]
    assert recording.starts("train", 4, 2).tolist() == expected and low == 0
    with pytest.raises(UserError, match=r"no window of 4 \+ 500 frames fits into its train part .*\n.*shorter"):
        recording.need_starts("train", 4, 500)


def test_last_control_of_an_episode_is_nothing(tmp_path: Path):
    recording = make(tmp_path / "rec", 60, [20, 25, 15])
    last_T = np.zeros(60, bool)
    last_T[[19, 44, 59]] = True
    np.testing.assert_array_equal(recording.last_T, last_T)
    np.testing.assert_array_equal(ends(recording.episode_T), last_T)
    assert not recording.actions_TA[last_T].any() and not recording.scaled()[last_T].any()
    assert recording.actions_TA[~last_T].any(1).all()
    assert not recording.dt_T[last_T].any()


def test_statistics_come_from_training_alone(tmp_path: Path):
    actions_TA = np.random.default_rng(3).standard_normal((500, 2))
    wild_TA = actions_TA.copy()
    first = make(tmp_path / "a", 500, actions=actions_TA)
    wild_TA[first.span("valid")[0] :] *= 1000
    assert make(tmp_path / "b", 500, actions=wild_TA).axes == first.axes


def test_scaling_never_centres():
    value_T = np.concatenate((np.full(80, 0.5), np.full(10, 2.0), np.full(10, -4.0)))
    speed, dead, button, dt = measure_axes(
        np.stack([value_T, value_T * 1e-6, (np.arange(100) == 7) * 1.0, np.full(100, 0.1)], 1),
        [("x", "m"), ("z", "m"), ("fire", ""), ("dt", "s")],
    )
    assert speed.scale == pytest.approx(4.0) and speed.full == pytest.approx((-4, 2)) and speed.half == pytest.approx((-4, 0.5))
    assert dead.dead and dead.scale == 1.0
    assert not button.dead and button.scale == 1.0 and button.full == (0.0, 1.0)
    assert dt.scale == pytest.approx(0.1) and dt.full == pytest.approx((0.1, 0.1))
    raw_NA = np.array([[0, 0, 0, 0.1], [2, 1e-6, 1, 0.2], [-99, 0, 0, 0.0]])
    axes = (speed, dead, button, dt)
    np.testing.assert_allclose(scale_actions(raw_NA, axes), [[0, 0, 0, 0], [0.5, 1e-6, 1, 1], [-4, 0, 0, -1]], atol=1e-6)


def test_frames_may_come_one_by_one_with_tables_that_grow(tmp_path: Path):
    frames = np.random.default_rng(2).integers(0, 256, (40, 8, 8, 3), np.uint8)
    actions, times, episodes = [], [], []

    def play():
        for n, frame in enumerate(frames):
            actions.append((float(n), 0.1))
            times.append(n / 10)
            episodes.append(n // 20)
            yield frame

    one = make(tmp_path / "one", 0, frames=play(), actions=actions, time=times, episode=episodes)
    all_at_once = make(tmp_path / "all", 40, frames=[frames[:7], frames[7:]], actions=actions, time=times, episode=episodes)
    assert one.fingerprint == all_at_once.fingerprint
    np.testing.assert_array_equal(one.frames_THWC, frames)
    assert dataclasses.asdict(one.axes[0])["scale"] > 0


def nan_at(num: int, row: int, width: int) -> np.ndarray:
    table = np.zeros((num, width))
    table[row, 0] = np.nan
    return table


SMALL = np.zeros((40, 8, 8, 3), np.uint8)
WRONG = [
    ({"frames": []}, "no frames"),
    ({"frames": SMALL[:5]}, "5 frames are too few"),
    ({"frames": [SMALL, SMALL[:, :4, :4]]}, "frame 40 has 4x4 pixels, the first had 8x8: sizes are mixed"),
    ({"frames": [SMALL[..., :1]]}, "1 colours cannot be recorded"),
    ({"actions": np.zeros((39, 2))}, "40 frames and 39 rows of actions: the counts must agree"),
    ({"time": np.arange(41.0)}, "40 frames and 41 rows of time"),
    ({"actions": nan_at(40, 3, 2)}, "actions of frame 3 is not a finite number"),
    ({"pose": np.full((40, 4, 4), np.inf)}, "pose of frame 0 is not a finite number"),
    ({"time": -np.arange(40.0)}, "time does not run forward: frame 1 is at -1 s"),
    ({"time": np.repeat(np.arange(20.0), 2)}, "20 such places"),
    ({"episode": np.arange(40)[::-1]}, "episode numbers go back at frame 1"),
    ({"axes_names_units": [("x", "m"), ("x", "m")]}, "different names"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG, ids=[says[:30] for _, says in WRONG])
def test_bad_recording_is_refused_and_leaves_nothing(changes, says: str, tmp_path: Path):
    with pytest.raises(UserError, match=says) as caught:
        make(tmp_path / "rec", 40, **changes)
    assert len(str(caught.value).splitlines()) <= 2
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []


def test_recording_missing_is_refused(tmp_path: Path, box: Recording):
    with pytest.raises(UserError, match="there is no store at"):
        open_recording(tmp_path / "nothing")
    with pytest.raises(UserError, match="exists; choose another folder"):
        make(box.path, 40)
    plain = make(tmp_path / "plain", 40)
    with pytest.raises(UserError, match="holds no command, only"):
        open_recording(plain.path, "command")
    assert recordings.is_recording(plain.path) and not recordings.is_recording(tmp_path)
