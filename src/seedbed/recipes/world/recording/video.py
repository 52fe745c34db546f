"""Importers of videos, Stray Scanner and video + actions.csv, and the frames of a video with their timestamps.

Shape suffixes: T frames, A control axes, N rows of a table.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from seedbed.data.store import Progress
from seedbed.errors import UserError
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.capture import Capture, capture_from_poses, fit, numbers, read_rows

ROUNDED = 0.05  # of the time between two frames
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")
POSE_COLUMNS = ("at_x", "at_y", "at_z", "at_qx", "at_qy", "at_qz", "at_qw")


def stray(folder: Path) -> Capture:
    """Stray Scanner: rgb.mp4 and odometry.csv (timestamp, frame, x, y, z, qx, qy, qz, qw), poses of an OpenCV camera."""
    table = folder / "odometry.csv"
    rows = read_rows(table)
    if rows and not _is_number(rows[0][0]):
        rows = rows[1:]
    if not rows:
        raise UserError(f"{table} holds no rows: there are no frames")
    values = numbers(rows, table, 9)
    frame_T = values[:, 1].astype(np.int64)
    if (np.diff(frame_T) <= 0).any():
        raise UserError(f"{table}: frame numbers do not rise at row {int(np.argmax(np.diff(frame_T) <= 0)) + 2}; sort it by time")
    camera_T44 = poses.from_quaternion(values[:, 5:9], values[:, 2:5])
    video = folder / "rgb.mp4"
    pose_T44 = poses.body_pose(camera_T44, upright(poses.FROM_OPENCV, rotation(video)))
    frames = functools.partial(decode, video, frame_T)
    return capture_from_poses("Stray Scanner", (table, video), frames, values[:, 0], pose_T44)


def with_actions(folder: Path) -> Capture:
    """A video and actions.csv: a column `time` in seconds of the video (or `frame`), and one column per control.

    A control applies from its time on: a frame's action is the mean of the rows until the next frame, or the last row before.
    With `frame`, a column `episode` numbers the episodes in the video, and the seven columns of a pose (of the body: x forward,
    y left, z up) replace the controls, which are then the motion from pose to pose.
    """
    video, table = find_video(folder), folder / "actions.csv"
    rows = read_rows(table)
    if len(rows) < 2 or _is_number(rows[0][0]):
        raise UserError(f"{table} needs a header, time,<axis>,... and rows below it")
    header = [name.lower() for name in rows[0]]
    if header[0] not in ("time", "frame") or len(header) < 2:
        raise UserError(
            f"{table} begins with the columns {', '.join(header)}; the first must be time or frame, then the controls"
        )
    values = numbers(rows[1:], table, len(header))
    if (np.diff(values[:, 0]) <= 0).any():
        raise UserError(f"{table}: {header[0]} does not rise at row {int(np.argmax(np.diff(values[:, 0]) <= 0)) + 3}; sort it")
    time_T = times(video)
    if len(time_T) == 0:
        raise UserError(f"{video} has no frames")
    by_frame = header[0] == "frame"
    if by_frame and len(values) != len(time_T):
        raise UserError(f"{video.name} has {len(time_T):,} frames, actions.csv {len(values):,} rows: the counts must agree")
    actions_TA = values[:, 1:] if by_frame else _held(values[:, 0], values[:, 1:], time_T, table)
    names, episode_T = header[1:], np.zeros(len(time_T), np.int32)
    if by_frame and "episode" in names:
        at = names.index("episode")
        del names[at]
        episode_T, actions_TA = actions_TA[:, at].astype(np.int32), np.delete(actions_TA, at, axis=1)
    frames = functools.partial(decode, video, np.arange(len(time_T)))
    if by_frame and tuple(names) == POSE_COLUMNS:
        pose_T44 = poses.from_quaternion(actions_TA[:, 3:], actions_TA[:, :3])
        return capture_from_poses("video + actions.csv", (table, video), frames, time_T, pose_T44, episode_T)
    if "dt" not in names:
        names, actions_TA = [*names, "dt"], np.column_stack((actions_TA, np.diff(time_T, append=time_T[-1])))
    axes = tuple((name, "s" if name == "dt" else "") for name in names)
    return Capture("video + actions.csv", (table, video), frames, time_T, episode_T, actions_TA, axes)


def _held(time_N: np.ndarray, value_NA: np.ndarray, frame_T: np.ndarray, table: Path) -> np.ndarray:
    """Controls at the frames: the mean over the rows during a frame, else the last row before it."""
    if time_N[0] > frame_T[-1] or time_N[-1] < frame_T[0]:
        spans = f"{time_N[0]:.3f} to {time_N[-1]:.3f} s, the video {frame_T[0]:.3f} to {frame_T[-1]:.3f} s"
        raise UserError(f"{table} covers {spans}: they do not overlap; both must count from the video's beginning")
    # Times in tables are rounded: a row this close to a frame belongs to it.
    near = ROUNDED * float(np.median(np.diff(frame_T))) if len(frame_T) > 1 else 0.0
    low_T = np.searchsorted(time_N, frame_T - near)
    high_T = np.append(low_T[1:], len(time_N))
    total_NA = np.concatenate((np.zeros((1, value_NA.shape[1])), value_NA.cumsum(0)))
    mean_TA = (total_NA[high_T] - total_NA[low_T]) / np.maximum(high_T - low_T, 1)[:, None]
    last_TA = np.where((low_T > 0)[:, None], value_NA[np.maximum(low_T - 1, 0)], 0.0)
    return np.where((high_T > low_T)[:, None], mean_TA, last_TA)


def find_video(folder: Path) -> Path:
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in VIDEOS)
    if len(found) != 1:
        what = ", ".join(p.name for p in found) or "no video"
        raise UserError(f"{folder} holds {what} beside actions.csv; it takes exactly one of {' '.join(VIDEOS)}")
    return found[0]


# Degrees by which a player rotates a frame counter-clockwise, and a function that decodes the frame as it is stored.
Picture = tuple[int, Callable[[], Image.Image]]


def decode(video: Path, wanted_T: np.ndarray, height: int, width: int) -> Iterator[np.ndarray]:
    """The frames with these numbers, upright, at one size."""
    progress, wanted, last = Progress("decoding", "frames"), set(wanted_T.tolist()), int(wanted_T[-1])
    size, given = None, 0
    for n, (turn, read) in enumerate(itertools.islice(pictures(video), last + 1)):
        if n in wanted:
            image = read()
            size = size or image.size
            if image.size != size:
                raise UserError(f"{video}: frame {n:,} has {image.width}x{image.height} pixels, the first {size[0]}x{size[1]}")
            yield fit(image.rotate(turn, expand=True), height, width)
            given += 1
            progress(given, len(wanted))
    progress.close()
    if given < len(wanted):
        raise UserError(f"{video} ends before frame {last:,} that its table names: {given:,} of {len(wanted):,} frames are there")


def rotation(video: Path) -> int:
    """The counter-clockwise rotation in degrees that a player applies to the frames."""
    for turn, _ in pictures(video):
        return turn
    raise UserError(f"{video} has no frames")


def upright(basis_33: np.ndarray, degrees: int) -> np.ndarray:
    """The body's axes when the frames of its camera are rotated counter-clockwise for display."""
    return basis_33 @ poses.exp(np.array([np.radians(degrees), 0.0, 0.0]))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def times(video: Path) -> np.ndarray:
    """The timestamp of each frame in seconds of the video, without decoding pixels."""
    return _with_av_times(video) if _has_av(video) else _with_cv_times(video)


def pictures(video: Path) -> Iterator[Picture]:
    return _with_av(video) if _has_av(video) else _with_cv(video)


def _has_av(video: Path) -> bool:
    if not video.is_file():
        raise UserError(f"{video} is missing")
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True


def _with_av_times(video: Path) -> np.ndarray:
    with _av_opened(video) as container:
        stream = container.streams.video[0]
        stamps = [p.pts for p in container.demux(stream) if p.pts is not None and p.size]
        base = float(stream.time_base)
    return np.sort(np.array(stamps, np.float64)) * base


def _with_av(video: Path) -> Iterator[Picture]:
    import av

    with _av_opened(video) as container:
        try:
            for frame in container.decode(video=0):
                yield int(getattr(frame, "rotation", 0)) % 360, frame.to_image
        except av.FFmpegError as error:
            raise UserError(f"{video} does not decode: {error.strerror}") from None


def _av_opened(video: Path) -> Any:
    import av

    try:
        container = av.open(str(video))
    except (av.FFmpegError, OSError) as error:
        raise UserError(f"{video} does not decode: {getattr(error, 'strerror', None) or error}") from None
    if not container.streams.video:
        container.close()
        raise UserError(f"{video} holds no frames")
    return container


def _with_cv_times(video: Path) -> np.ndarray:
    stamps = []
    with _cv_opened(video) as (cv2, capture):
        while capture.grab():
            stamps.append(capture.get(cv2.CAP_PROP_POS_MSEC))
    return np.array(stamps, np.float64) / 1000.0


def _with_cv(video: Path) -> Iterator[Picture]:
    with _cv_opened(video) as (cv2, capture):
        turn = -int(capture.get(cv2.CAP_PROP_ORIENTATION_META)) % 360  # av counts clockwise
        while True:
            there, pixels_HWC = capture.read()
            if not there:
                return
            pixels_HWC = np.ascontiguousarray(pixels_HWC[..., ::-1])  # opencv returns BGR
            yield turn, functools.partial(Image.fromarray, pixels_HWC)


@contextlib.contextmanager
def _cv_opened(video: Path) -> Iterator[tuple[Any, Any]]:
    try:
        import cv2  # type: ignore[import-not-found]
    except ImportError:
        raise UserError('reading a video needs av: pip install "seedbed[video]"') from None
    capture = cv2.VideoCapture(str(video), cv2.CAP_FFMPEG)
    try:
        capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)  # frames as stored: the caller rotates them
        if not capture.isOpened():
            raise UserError(f"{video} does not decode: opencv cannot open it")
        yield cv2, capture
    finally:
        capture.release()
