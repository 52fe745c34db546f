"""Imports captured files as a recording: detects the format, corrects the controls if asked, checks the lag.

Shape suffixes: T frames, A control axes.
"""

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from seedbed.cache import cache_folder
from seedbed.data.prepare import Say
from seedbed.data.store import digest, is_store
from seedbed.errors import UserError
from seedbed.recipes.world.recording import lag_estimation, poses, video
from seedbed.recipes.world.recording.capture import Capture, euroc, motions, nerfstudio, record3d, tum
from seedbed.recipes.world.recording.recording import (
    FORMAT,
    Recording,
    find_recording,
    is_recording,
    open_recording,
    write_recording,
)

# From an OpenCV to an OpenGL camera: x and z change sign.
_HALF_TURN = np.diag([-1.0, 1.0, -1.0])


@dataclasses.dataclass(frozen=True)
class Correction:
    """Corrections of the controls: action[t] becomes action[t + shift], and some axes change sign."""

    shift: int = 0
    flip: tuple[str, ...] = ()
    accept: bool = False


def importer(place: Path) -> Callable[[Path], Capture] | None:
    """The importer for this folder or file; None without one."""
    if place.is_file():
        is_incomplete = place.suffix.lower() in (*video.VIDEOS, ".r3d")
        return nerfstudio if place.name == "transforms.json" else _alone if is_incomplete else None
    kinds: list[tuple[Callable[[Path], Capture], tuple[str, ...]]] = [
        (video.stray, ("odometry.csv",)),
        (nerfstudio, ("transforms.json",)),
        (tum, ("rgb.txt", "groundtruth.txt")),
        (euroc, ("mav0/cam0/data.csv",)),
        (euroc, ("cam0/data.csv",)),
        (video.with_actions, ("actions.csv",)),
        (record3d, ("metadata.json",)),
        (record3d, ("metadata", "rgbd")),
    ]
    return next((read for read, names in kinds if all((place / name).exists() for name in names)), None)


def _alone(file: Path) -> Capture:
    """Errors for files that cannot be imported alone."""
    if file.suffix.lower() == ".r3d":
        raise UserError(f"{file} is a zip of Record3D: unpack it (unzip {file.name} -d DIR) and prepare the folder")
    raise UserError(f"{file} has no controls; put it into a folder with actions.csv (time,<axis>,...) and prepare that folder")


def is_importable(path: str) -> bool:
    """Whether `data prepare` makes a recording of this."""
    place = Path(path).expanduser()
    return is_recording(place) if is_store(place) else importer(place) is not None


def prepare_recording(
    path: str, height: int, width: int, correction: Correction, *, out: Path | None = None, say: Say = lambda line: None
) -> Recording:
    """The recording of these files: the existing one, or a new one whose lag was checked."""
    place = Path(path).expanduser()
    if is_store(place):
        stored = open_recording(place)
        capture, (height, width) = _stored(stored), stored.frames_THWC.shape[1:3]
    elif not place.exists():
        raise UserError(f"{place} does not exist")
    elif read := importer(place):
        capture = read(place)
    else:
        raise UserError(f"{place} is not a recording that can be imported; docs/world-data.md lists the formats")
    for note in capture.notes:
        say(f"{place}: {note}")
    identity = capture.identity()
    key = digest([FORMAT, identity, height, width, dataclasses.asdict(correction)])
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", place.name or "recording")[:40]
    target = (out or cache_folder("") / f"{label}-{height}x{width}-{key[:12]}").expanduser().absolute()
    if found := find_recording(target, key):
        return found
    origin = {"name": f"{capture.kind}: {place.name}", "path": str(place), "identity": identity}
    origin |= {"shift": correction.shift, "flip": list(correction.flip)}

    def write(capture: Capture) -> Recording:
        keep_T, actions_TA = corrected(capture, correction)
        frames = _kept(capture.frames(height, width), keep_T)
        tables = (actions_TA, capture.time_T[keep_T], capture.episode_T[keep_T], capture.axes)
        pose = None if capture.pose_T44 is None else capture.pose_T44[keep_T]
        return write_recording(target, frames, *tables, pose=pose, source=origin, key=key, accepted=correction.accept)

    return _write_checked(write, capture, say)


def _stored(given: Recording) -> Capture:
    """An existing recording, whose controls can be corrected."""
    axes = tuple((axis.name, axis.unit) for axis in given.axes)
    tables = (given.time_T, given.episode_T, given.actions_TA, axes, given.pose_T44)
    return Capture("recording", (given.path / "manifest.json",), lambda height, width: iter(given.frames_THWC), *tables)


def _write_checked(write: Callable[[Capture], Recording], capture: Capture, say: Say) -> Recording:
    """Write the recording and check its lag; a refused one is removed."""
    recording = write(capture)
    if capture.kind == "Stray Scanner" and "yaw" in lag_estimation.estimate_lag(recording).wrong_axes:
        # The format does not state the camera convention; it is estimated from the frames.
        say("the frames show that these are poses of an OpenGL camera: converted")
        shutil.rmtree(recording.path)
        assert capture.pose_T44 is not None
        pose_T44 = poses.body_pose(capture.pose_T44, _HALF_TURN)
        actions_TA = motions(pose_T44, capture.time_T, capture.episode_T)
        recording = write(dataclasses.replace(capture, pose_T44=pose_T44, actions_TA=actions_TA))
    try:
        say(f"lag: {lag_estimation.require_aligned(recording).summary}")
    except UserError:
        shutil.rmtree(recording.path)
        raise
    return recording


def corrected(capture: Capture, correction: Correction) -> tuple[np.ndarray, np.ndarray]:
    """The frames to keep and their controls: frames whose control would come from outside the episode are dropped."""
    # dt belongs to the frames: it is not shifted with the controls.
    columns = {name: n for n, (name, _) in enumerate(capture.axes) if name != "dt"}
    for name in correction.flip:
        if name not in columns:
            raise UserError(f"--flip {name}: there is no such axis; it has {', '.join(columns)}")
    num = len(capture.episode_T)
    from_T = np.arange(num) + correction.shift
    keep_T = (from_T >= 0) & (from_T < num)
    from_T = from_T.clip(0, num - 1)
    keep_T &= capture.episode_T[from_T] == capture.episode_T
    actions_TA = capture.actions_TA.astype(np.float64)
    for n in columns.values():
        actions_TA[:, n] = capture.actions_TA[from_T, n]
    for name in correction.flip:
        actions_TA[:, columns[name]] *= -1
    if not keep_T.any():
        raise UserError(f"--shift-actions {correction.shift} leaves no frame: every episode is shorter than that")
    return keep_T, actions_TA[keep_T]


def _kept(frames: Iterator[np.ndarray], keep_T: np.ndarray) -> Iterator[np.ndarray]:
    """The frames to keep; a wrong count is an error of the source."""
    num = 0
    for num, frame in enumerate(frames, 1):
        if num > len(keep_T):
            break
        if keep_T[num - 1]:
            yield frame
    if num != len(keep_T):
        raise UserError(f"{num:,} frames for {len(keep_T):,} rows of the table: the counts must agree")
