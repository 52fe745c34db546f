"""Takes of every format become recordings whose controls are the truth; what is wrong with them costs one clear line."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from world_captures import NUM, SIDE, WRITERS, Truth, write_stray, write_video

from seedbed.cli import main
from seedbed.errors import UserError
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.capture import motions
from seedbed.recipes.world.recording.importing import Correction, prepare_recording
from seedbed.recipes.world.recording.recording import open_recording
from seedbed.recipes.world.recording.video import upright

pytest.importorskip("av", reason="videos need av")


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.fixture(scope="module")
def takes(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One take of every format."""
    root = tmp_path_factory.mktemp("takes")
    for name, write in WRITERS.items():
        write(root / name, truth)
    return root


def prepare(path: Path, out: Path, **correction):
    return prepare_recording(str(path), SIDE, SIDE, Correction(**correction), out=out)


@pytest.mark.parametrize("name", WRITERS)
def test_import_gives_the_true_controls(name: str, truth: Truth, takes: Path, tmp_path: Path):
    recording = prepare(takes / name, tmp_path / "out")
    assert recording.num_frames == NUM
    assert [axis.name for axis in recording.axes] == ["x", "y", "z", "roll", "pitch", "yaw", "dt"]
    np.testing.assert_allclose(recording.actions_TA[:-1, :6], truth.action_T6[:-1], atol=2e-6)
    assert not recording.actions_TA[-1].any()
    # Pictures stand in the order of the walk; a video loses a little.
    assert np.abs(recording.frames_THWC.astype(int) - truth.frames_THWC).mean() < (8 if name in ("stray", "actions") else 0.01)
    if name != "nerfstudio":
        np.testing.assert_allclose(recording.dt_T[:-1], np.diff(truth.time_T), atol=2e-5)
    if recording.pose_T44 is not None:
        exact_T7 = motions(recording.pose_T44, recording.time_T, recording.episode_T)
        np.testing.assert_allclose(
            functools.reduce(poses.step, exact_T7[:-1, :6], recording.pose_T44[0]), recording.pose_T44[-1], atol=1e-9
        )


def test_poses_of_the_other_camera_are_turned_about(truth: Truth, tmp_path: Path):
    """Stray Scanner's format does not say which way its camera looks: the pictures decide."""
    write_stray(tmp_path / "take", truth, poses.FROM_OPENGL)
    recording = prepare(tmp_path / "take", tmp_path / "out")
    np.testing.assert_allclose(recording.actions_TA[:-1, :6], truth.action_T6[:-1], atol=2e-6)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_turned_video_turns_its_camera(truth: Truth, degrees: int):
    """Turning the pictures counter-clockwise is rolling the camera: the same picture is rendered from the turned pose."""
    turned_T44 = poses.body_pose(truth.pose_T44[:4], upright(np.eye(3), degrees))
    rendered = truth.world.render(torch.from_numpy(turned_T44)).numpy().astype(int)
    expected = np.rot90(truth.frames_THWC[:4], degrees // 90, axes=(1, 2))
    assert (np.abs(rendered - expected).max(-1) <= 1).mean() > 0.98


def test_shifted_and_flipped_recordings_are_refused_and_corrected(truth: Truth, takes: Path, tmp_path: Path):
    for correction, says in (
        ({"shift": 2}, r"2 frames too early.*\n.*prepare \S+ --out"),
        ({"flip": ("yaw",)}, "yaw runs against"),
    ):
        with pytest.raises(UserError, match=says):
            prepare(takes / "record3d", tmp_path / "wrong", **correction)
        assert not (tmp_path / "wrong").exists(), "a refused recording was left behind"
    kept = prepare(takes / "record3d", tmp_path / "late", shift=2, accept=True)
    assert kept.num_frames == NUM - 2 and kept.facts["recording"]["accepted"]
    np.testing.assert_allclose(kept.actions_TA[:-1, :6], truth.action_T6[2:-1], atol=2e-6)
    np.testing.assert_allclose(kept.actions_TA[:-1, 6], kept.dt_T[:-1], atol=1e-6, err_msg="time stays with the frames")
    with pytest.raises(UserError, match=r"too early.*\n.*--shift-actions -2"):
        prepare(tmp_path / "late", tmp_path / "again")
    corrected = prepare(tmp_path / "late", tmp_path / "corrected", shift=-2)
    np.testing.assert_allclose(corrected.actions_TA[:-1, :6], truth.action_T6[2:-3], atol=2e-6)
    np.testing.assert_array_equal(corrected.frames_THWC, kept.frames_THWC[2:])


def test_command_line_prepares_inspects_and_verifies(takes: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data", "prepare", str(takes / "tum"), "--size", "32x40", "--out", "walk", "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["frames"], first["size"], first["episodes"]) == (NUM, "32x40", 1)
    assert main(words) == 0 and json.loads(capsys.readouterr().out)["fingerprint"] == first["fingerprint"]
    assert main(["data", "inspect", "walk"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\nlag +lag \+0", shown) and "forward : back" in shown and "never used" not in shown
    assert (tmp_path / "walk" / "sheet.png").stat().st_size > 20_000
    assert main(["data", "verify", "walk"]) == 0


def test_command_line_records(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "record", "box", "--frames", "60", "--size", "16x24", "--seed", "3", "--out", "yard"]) == 0
    shown = capsys.readouterr()
    assert "seedbed train world/mine data.recording=" in shown.out and "lag: undetermined" in shown.err
    assert open_recording("yard").frames_THWC.shape == (60, 16, 24, 3)
    for words, says in (
        ("box --size 64x", "is not a size"),
        ("boxx", "there is no simulator"),
        ("box --frames 3", "at least 10"),
    ):
        assert main(["data", "record", *words.split()]) == 2
        assert says in capsys.readouterr().err


# ---- what can be wrong ---------------------------------------------------------------------------------------------------


def edit(file: str, old: str, new: str, count: int = 1):
    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, count))

    return change


def rewrite(file: str, make):
    def change(folder: Path) -> None:
        (folder / file).write_text(make((folder / file).read_text()))

    return change


def swap_lines(first: int, second: int):
    def swap(text: str) -> str:
        lines = text.splitlines()
        lines[first], lines[second] = lines[second], lines[first]
        return "\n".join(lines)

    return swap


def json_edit(file: str, change):
    def apply(folder: Path) -> None:
        facts = json.loads((folder / file).read_text())
        change(facts)
        (folder / file).write_text(json.dumps(facts))

    return apply


def resize(file: str):
    from PIL import Image

    return lambda folder: Image.new("RGB", (20, 30)).save(folder / file)


def set_pose(facts: dict, value: float) -> None:
    facts["poses"][7][5] = value


def traverse(facts: dict, path: str) -> None:
    facts["frames"][0]["file_path"] = path


WRONG = [
    ("stray", lambda f: (f / "rgb.mp4").unlink(), r"rgb\.mp4 is missing"),
    ("stray", lambda f: (f / "rgb.mp4").write_bytes(b"no video at all" * 99), r"rgb\.mp4 does not decode"),
    ("stray", rewrite("odometry.csv", lambda t: t.splitlines()[0]), "there are no frames"),
    ("stray", rewrite("odometry.csv", lambda t: t + "\n9.9, 000300, 0, 0, 0, 0, 0, 0, 1"), r"ends before frame 300"),
    ("stray", rewrite("odometry.csv", swap_lines(20, 21)), "frame numbers do not rise"),
    ("stray", rewrite("odometry.csv", lambda t: t.replace(", 000004,", ", 000004, much,")), "row 5 should hold 9 numbers"),
    ("nerfstudio", json_edit("transforms.json", lambda d: d.update(frames=[])), "has no frames"),
    ("nerfstudio", json_edit("transforms.json", lambda d: traverse(d, "../../etc/passwd")), "leads out of"),
    ("nerfstudio", json_edit("transforms.json", lambda d: traverse(d, "/etc/passwd")), "leads out of"),
    ("nerfstudio", json_edit("transforms.json", lambda d: d["frames"].__delitem__(slice(0, 120))), "not evenly spaced"),
    ("nerfstudio", json_edit("transforms.json", lambda d: d["frames"][0].pop("transform_matrix")), "frame 0 needs file_path"),
    ("nerfstudio", json_edit("transforms.json", lambda d: d["frames"][3].update(transform_matrix=[[1]])), "is not 4x4"),
    ("nerfstudio", lambda f: (f / "transforms.json").write_text("{frames"), "is not JSON"),
    ("nerfstudio", lambda f: (f / "images" / "frame_5.png").unlink(), r"frame_5\.png is missing"),
    ("nerfstudio", lambda f: (f / "images" / "frame_5.png").write_bytes(b"x"), r"frame_5\.png cannot be decoded"),
    ("record3d", resize("rgbd/9.png"), "20x30 pixels, the first frame 48x48: sizes are mixed"),
    ("record3d", json_edit("metadata", lambda d: set_pose(d, float("nan"))), "pose of frame 7 is not a finite number"),
    ("record3d", json_edit("metadata", lambda d: d["poses"].pop()), "240 frames, 239 poses"),
    ("record3d", json_edit("metadata", lambda d: d.pop("poses")), "needs poses"),
    ("record3d", json_edit("metadata", lambda d: d["frameTimestamps"].reverse()), "time does not run forward"),
    ("record3d", lambda f: [p.unlink() for p in (f / "rgbd").iterdir()], "has no frames"),
    ("tum", rewrite("groundtruth.txt", swap_lines(9, 12)), "time does not run forward"),
    ("tum", rewrite("groundtruth.txt", lambda t: t[:300]), "row 2 should hold 8 numbers"),
    ("tum", rewrite("rgb.txt", lambda t: "# nothing"), "has no frames"),
    ("tum", edit("rgb.txt", "rgb/0.png", "../secret.png"), "leads out of"),
    ("tum", rewrite("rgb.txt", lambda t: t.replace("\n", "\n9")), "covers"),
    ("euroc", lambda f: (f / "mav0/cam0/sensor.yaml").unlink(), "T_BS"),
    ("euroc", lambda f: (f / "mav0/cam0/sensor.yaml").write_text("T_BS: {data: [1, 2]}"), "T_BS of 16 numbers"),
    ("euroc", lambda f: shutil.rmtree(f / "mav0/state_groundtruth_estimate0"), "has no poses"),
    ("actions", rewrite("actions.csv", lambda t: t.partition("\n")[2]), "needs a header"),
    ("actions", rewrite("actions.csv", lambda t: "speed" + t[4:]), "the first must be time or frame"),
    ("actions", rewrite("actions.csv", swap_lines(5, 6)), "time does not rise at row"),
    ("actions", rewrite("actions.csv", lambda t: "frame" + t[4:] + "999,0,0,0,0,0,0\n"), "240 frames, actions.csv 241 rows"),
    ("actions", rewrite("actions.csv", lambda t: "time,x\n9000,1\n9001,1\n"), "do not overlap"),
    ("actions", lambda f: (f / "walk.mp4").rename(f / "walk.txt"), "no video"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "says"), WRONG, ids=[f"{w[0]}-{n}" for n, w in enumerate(WRONG)])
def test_spoilt_take_costs_one_clear_line(name, spoil, says, takes: Path, tmp_path: Path):
    shutil.copytree(takes / name, tmp_path / name)
    spoil(tmp_path / name)
    with pytest.raises(UserError, match=says) as caught:
        prepare(tmp_path / name, tmp_path / "out")
    assert len(str(caught.value).splitlines()) <= 2
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*partial"))


def test_corrections_need_a_recording_and_existing_axes(takes: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--flip dt: there is no such axis; it has x, y"):
        prepare(takes / "tum", tmp_path / "out", flip=("dt",))
    with pytest.raises(UserError, match="leaves no frame"):
        prepare(takes / "tum", tmp_path / "out", shift=64 * 9)
    (tmp_path / "a.txt").write_text("some text " * 100)
    assert main(["data", "prepare", "a.txt", "--flip", "yaw"]) == 2
    assert "has no controls to correct" in capsys.readouterr().err


def test_missing_package_is_named(takes: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UserError, match=r'pip install "seedbed\[video\]"'):
        prepare(takes / "stray", tmp_path / "out")


@pytest.mark.parametrize("name", ["stray", "actions"])
def test_opencv_decodes_where_av_is_missing(name: str, takes: Path, tmp_path: Path, monkeypatch):
    pytest.importorskip("cv2", reason="opencv is not installed")
    by_av = prepare(takes / name, tmp_path / "av")
    monkeypatch.setitem(sys.modules, "av", None)
    by_cv = prepare(takes / name, tmp_path / "cv")
    np.testing.assert_allclose(by_cv.time_T, by_av.time_T, atol=2e-5)
    np.testing.assert_allclose(by_cv.actions_TA, by_av.actions_TA, atol=2e-5)
    assert np.abs(by_cv.frames_THWC.astype(int) - by_av.frames_THWC).mean() < 1.0, "colours in another order, or other frames"


def test_column_of_episodes_keeps_takes_apart(truth: Truth, tmp_path: Path):
    folder = tmp_path / "take"
    folder.mkdir()
    write_video(folder / "a.mp4", truth.frames_THWC[:60])
    lines = [f"{n},{n // 20},{truth.action_T6[n, 5]:.8f}" for n in range(60)]
    (folder / "actions.csv").write_text("frame,episode,yaw\n" + "\n".join(lines))
    recording = prepare(folder, tmp_path / "out", accept=True)
    assert [axis.name for axis in recording.axes] == ["yaw", "dt"]
    np.testing.assert_array_equal(recording.episode_T, np.arange(60) // 20)
    assert not recording.actions_TA[[19, 39, 59]].any(), "no control leads from one take into the next"
    np.testing.assert_allclose(recording.actions_TA[:19, 0], truth.action_T6[:19, 5], atol=1e-6)


def test_pose_columns_replace_controls(truth: Truth, tmp_path: Path):
    folder = tmp_path / "take"
    folder.mkdir()
    write_video(folder / "a.mp4", truth.frames_THWC[:60])
    pose_T44 = truth.pose_T44[:60]
    rows = np.concatenate((pose_T44[:, :3, 3], poses.to_quaternion(pose_T44[:, :3, :3])), axis=1)
    lines = [f"{n},{n // 30}," + ",".join(f"{value:.9g}" for value in row) for n, row in enumerate(rows)]
    (folder / "actions.csv").write_text("frame,episode,at_x,at_y,at_z,at_qx,at_qy,at_qz,at_qw\n" + "\n".join(lines))
    recording = prepare(folder, tmp_path / "out", accept=True)
    assert [axis.name for axis in recording.axes] == ["x", "y", "z", "roll", "pitch", "yaw", "dt"]
    np.testing.assert_allclose(recording.pose_T44, pose_T44, atol=1e-7)
    inside_T = ~recording.last_T[:-1]
    np.testing.assert_allclose(recording.actions_TA[:-1, :6][inside_T], poses.relative(pose_T44)[inside_T], atol=1e-6)
    assert not recording.actions_TA[[29, 59]].any(), "no control leads from one take into the next"


@pytest.mark.parametrize(("name", "says"), [("walk.mp4", "has no controls; put it into a folder"), ("scan.r3d", "unpack it")])
def test_file_that_is_not_enough(name: str, says: str, tmp_path: Path, capsys):
    (tmp_path / name).write_bytes(b"something")
    assert main(["data", "prepare", str(tmp_path / name)]) == 2
    assert says in capsys.readouterr().err


def test_controls_between_frames_are_averaged(truth: Truth, tmp_path: Path):
    """Rows twice as dense as frames: an action is the mean until the next frame; a missing row repeats the last one."""
    folder = tmp_path / "take"
    folder.mkdir()
    write_video(folder / "a.mp4", truth.frames_THWC[:20])
    lines = [f"{n / 60:.6f},{n}" for n in range(40) if n not in (20, 21)]
    (folder / "actions.csv").write_text("time,gas\n" + "\n".join(lines))
    recording = prepare(folder, tmp_path / "out")
    gas_T = recording.actions_TA[:-1, 0]
    expected = [2 * n + 0.5 for n in range(19)]
    expected[10] = 19.0
    np.testing.assert_allclose(gas_T, expected, atol=1e-5)
    assert open_recording(tmp_path / "out").fingerprint == recording.fingerprint
