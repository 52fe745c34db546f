"""From somebody's files to a recording: find out what they are, shift or flip the controls if asked to, ask the lag doctor.

Shape suffixes: T frames, A control axes.
"""

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data import lag, poses
from seedbed.data.prepare import Say, cache_folder
from seedbed.data.recording import FORMAT, Recording, find_recording, is_recording, open_recording, write_recording
from seedbed.data.recordings import tracks, video
from seedbed.data.recordings.take import Take, motions
from seedbed.data.store import digest, is_store
from seedbed.errors import UserError

PIECE = 256
# A camera that looks the other way, seen from the body: x and z change their sign.
_HALF_TURN = np.diag([-1.0, 1.0, -1.0])


@dataclasses.dataclass(frozen=True)
class Mending:
    """What is done to the controls: action[t] becomes action[t + shift], and some axes change their sign."""

    shift: int = 0
    flip: tuple[str, ...] = ()
    accept: bool = False

    def __bool__(self) -> bool:
        return bool(self.shift or self.flip or self.accept)


def importer(place: Path) -> Callable[[Path], Take] | None:
    """Who reads this folder or file; None when nobody does."""
    if place.is_file():
        return tracks.nerfstudio if place.name == "transforms.json" else _alone if _is_lone(place) else None
    kinds: list[tuple[Callable[[Path], Take], tuple[str, ...]]] = [
        (video.stray, ("odometry.csv",)),
        (tracks.nerfstudio, ("transforms.json",)),
        (tracks.tum, ("rgb.txt", "groundtruth.txt")),
        (tracks.euroc, ("mav0/cam0/data.csv",)),
        (tracks.euroc, ("cam0/data.csv",)),
        (video.with_actions, ("actions.csv",)),
        (tracks.record3d, ("metadata.json",)),
        (tracks.record3d, ("metadata", "rgbd")),
    ]
    return next((read for read, names in kinds if all((place / name).exists() for name in names)), None)


def _is_lone(file: Path) -> bool:
    return file.suffix.lower() in (*video.VIDEOS, ".r3d")


def _alone(file: Path) -> Take:
    """A file that somebody may well try, and that is not enough."""
    if file.suffix.lower() == ".r3d":
        raise UserError(f"{file} is a zip of Record3D: unpack it (unzip {file.name} -d DIR) and prepare the folder")
    raise UserError(f"{file} has no controls; put it into a folder with actions.csv (time,<axis>,...) and prepare that folder")


def is_importable(path: str) -> bool:
    """Whether `data prepare` makes a recording of this."""
    place = Path(path).expanduser()
    return is_recording(place) if is_store(place) else importer(place) is not None


def prepare_recording(
    path: str, height: int, width: int, mending: Mending, *, out: Path | None = None, say: Say = lambda line: None
) -> Recording:
    """The recording of these files: the one that exists, or a new one that the lag doctor has passed."""
    place = Path(path).expanduser()
    take = _stored(place) if is_store(place) else _read(place)
    for note in take.notes:
        say(f"{place}: {note}")
    if is_store(place):
        height, width = open_recording(place).frames_THWC.shape[1:3]
    key = digest([FORMAT, take.identity(), height, width, dataclasses.asdict(mending)])
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", place.name or "recording")[:40]
    target = (out or cache_folder("") / f"{label}-{height}x{width}-{key[:12]}").expanduser().absolute()
    found = find_recording(target, key)
    if found:
        return found
    origin = {"name": f"{take.kind}: {place.name}", "path": str(place), "identity": take.identity()}
    return _passed(lambda t: _write(target, t, height, width, mending, origin, key), take, say)


def _read(place: Path) -> Take:
    if not place.exists():
        raise UserError(f"{place} does not exist")
    read = importer(place)
    if read is None:
        raise UserError(f"{place} is no recording that can be imported; docs/world-data.md lists the formats")
    return read(place)


def _stored(place: Path) -> Take:
    """An existing recording as a take, so that its controls can be mended."""
    given = open_recording(place)
    axes = tuple((axis.name, axis.unit) for axis in given.axes)

    def frames(height: int, width: int) -> Iterator[np.ndarray]:
        for low in range(0, given.num_frames, PIECE):
            yield given.frames_THWC[low : low + PIECE]

    tables = (given.time_T, given.episode_T, np.array(given.actions_TA), axes, given.pose_T44)
    return Take("recording", (given.path / "manifest.json",), frames, *tables)


def _passed(write: Callable[[Take], Recording], take: Take, say: Say) -> Recording:
    """Write, and let the lag doctor judge; a recording that it refuses is taken away again."""
    recording = write(take)
    if take.kind == "Stray Scanner" and "yaw" in lag.examine(recording).wrong_axes:
        # Its format does not say which way the camera looks; the pictures do.
        say("the pictures say that these poses are those of an OpenGL camera: turned about")
        shutil.rmtree(recording.path)
        recording = write(_turned_about(take))
    try:
        say(f"lag doctor: {lag.require_aligned(recording).words}")
    except UserError:
        shutil.rmtree(recording.path)
        raise
    return recording


def _turned_about(take: Take) -> Take:
    assert take.pose_T44 is not None
    pose_T44 = poses.body_pose(take.pose_T44, _HALF_TURN)
    return dataclasses.replace(take, pose_T44=pose_T44, actions_TA=motions(pose_T44, take.time_T, take.episode_T))


def _write(target: Path, take: Take, height: int, width: int, mending: Mending, origin: dict[str, Any], key: str) -> Recording:
    keep_T, actions_TA = mended(take, mending)
    return write_recording(
        target,
        _kept(take.frames(height, width), keep_T),
        actions_TA,
        take.time_T[keep_T],
        take.episode_T[keep_T],
        take.axes,
        pose=None if take.pose_T44 is None else take.pose_T44[keep_T],
        source=origin | {"shift": mending.shift, "flip": list(mending.flip)},
        key=key,
        accepted=mending.accept,
    )


def mended(take: Take, mending: Mending) -> tuple[np.ndarray, np.ndarray]:
    """Which frames stay, and their controls: those whose control would come from outside of the episode go."""
    names = [name for name, _ in take.axes]
    for name in mending.flip:
        if name not in names or name == "dt":
            raise UserError(f"--flip {name}: there is no such axis; it has {', '.join(n for n in names if n != 'dt')}")
    num = len(take.episode_T)
    from_T = np.arange(num) + mending.shift
    keep_T = (from_T >= 0) & (from_T < num)
    from_T = from_T.clip(0, num - 1)
    keep_T &= take.episode_T[from_T] == take.episode_T
    actions_TA = take.actions_TA[from_T].astype(np.float64)
    if "dt" in names:
        # The time to the next frame belongs to the frames, wherever the controls were.
        actions_TA[:, names.index("dt")] = take.actions_TA[:, names.index("dt")]
    for name in mending.flip:
        actions_TA[:, names.index(name)] *= -1
    if not keep_T.any():
        raise UserError(f"--shift-actions {mending.shift} leaves no frame: every episode is shorter than that")
    return keep_T, actions_TA[keep_T]


def _kept(frames: Iterator[np.ndarray], keep_T: np.ndarray) -> Iterator[np.ndarray]:
    """The frames to keep, from single pictures or pieces; one too many or too few is an error of the source."""
    t = 0
    for frame in frames:
        piece_NHWC = frame if frame.ndim == 4 else frame[None]
        keep_N = keep_T[t : t + len(piece_NHWC)]
        t += len(piece_NHWC)
        if len(keep_N) < len(piece_NHWC):
            break
        if keep_N.any():
            yield piece_NHWC[keep_N]
    if t != len(keep_T):
        raise UserError(f"{t:,} frames for {len(keep_T):,} rows of the table: the counts must agree")
