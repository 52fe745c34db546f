"""Frames of a video with their timestamps, and the importers of videos: Stray Scanner, video + actions.csv.

Shape suffixes: T frames, A control axes, N rows of a table.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from seedbed.data.progress import Progress
from seedbed.errors import UserError
from seedbed.recipes.world.recording import decoders, poses
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
    time_T = decoders.times(video)
    if len(time_T) == 0:
        raise UserError(f"{video} has no frames")
    if header[0] == "frame" and len(values) != len(time_T):
        raise UserError(f"{video.name} has {len(time_T):,} frames, actions.csv {len(values):,} rows: the counts must agree")
    actions_TA = values[:, 1:] if header[0] == "frame" else _held(values[:, 0], values[:, 1:], time_T, table)
    names, columns, episode_T = header[1:], [*actions_TA.T], np.zeros(len(time_T), np.int32)
    if header[0] == "frame" and "episode" in names:
        at = names.index("episode")
        names, episode_T = [*names[:at], *names[at + 1 :]], columns.pop(at).astype(np.int32)
    frames = functools.partial(decode, video, np.arange(len(time_T)))
    if header[0] == "frame" and tuple(names) == POSE_COLUMNS:
        pose_T7 = np.column_stack(columns)
        pose_T44 = poses.from_quaternion(pose_T7[:, 3:], pose_T7[:, :3])
        return capture_from_poses("video + actions.csv", (table, video), frames, time_T, pose_T44, episode_T)
    if "dt" not in names:
        names, columns = [*names, "dt"], [*columns, np.diff(time_T, append=time_T[-1])]
    axes = tuple((name, "s" if name == "dt" else "") for name in names)
    return Capture("video + actions.csv", (table, video), frames, time_T, episode_T, np.column_stack(columns), axes)


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


# ---- decoding ------------------------------------------------------------------------------------------------------------


def decode(video: Path, wanted_T: np.ndarray, height: int, width: int) -> Iterator[np.ndarray]:
    """The frames with these numbers, upright, at one size."""
    progress, wanted, last = Progress("decoding", "frames"), set(wanted_T.tolist()), int(wanted_T[-1])
    shape, given = None, 0
    for n, picture in enumerate(decoders.pictures(video)):
        if n in wanted:
            shape = shape or (picture.width, picture.height)
            if (picture.width, picture.height) != shape:
                size = f"{picture.width}x{picture.height}"
                raise UserError(f"{video}: frame {n:,} has {size} pixels, the first {shape[0]}x{shape[1]}")
            image = picture.image()
            yield fit(image.rotate(picture.turn, expand=True) if picture.turn else image, height, width)
            given += 1
            progress(given, len(wanted))
        if n == last:
            break
    progress.close()
    if given < len(wanted):
        raise UserError(f"{video} ends before frame {last:,} that its table names: {given:,} of {len(wanted):,} frames are there")


def rotation(video: Path) -> int:
    """The counter-clockwise rotation in degrees that a player applies to the frames."""
    for picture in decoders.pictures(video):
        return picture.turn
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
