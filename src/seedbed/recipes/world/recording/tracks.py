"""Importers of images with camera poses: nerfstudio's transforms.json, Record3D, TUM RGB-D and EuRoC.

Shape suffixes: T frames, N rows of a table.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.errors import UserError
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.capture import (
    PICTURES,
    Capture,
    capture_from_poses,
    inside,
    json_file,
    numbers,
    pictures,
    read_rows,
)

# The frame interval of formats without timestamps.
NOMINAL = 1 / 30
# Poses further apart than this many usual intervals are not interpolated.
GAP = 5.0


def nerfstudio(place: Path) -> Capture:
    """transforms.json: camera-to-world matrices of an OpenGL camera, in any order, mostly without timestamps."""
    file = place / "transforms.json" if place.is_dir() else place
    given = json_file(file).get("frames")
    if not isinstance(given, list) or not given:
        raise UserError(f"{file} has no frames")
    root = file.parent
    entries = [_entry(root, file, n, entry) for n, entry in enumerate(given)]
    timed = all(entry[2] is not None for entry in entries)
    entries.sort(key=lambda entry: (entry[2] or 0.0 if timed else 0.0, _natural(entry[0].name)))
    paths = [entry[0] for entry in entries]
    pose_T44 = poses.body_pose(np.stack([entry[1] for entry in entries]), poses.FROM_OPENGL)
    if timed:
        time_T, episode_T = np.array([entry[2] for entry in entries]), np.zeros(len(paths), np.int32)
    else:
        time_T, episode_T = _numbered(file, paths)
    notes = () if timed else ("it states no time: frames are taken to be evenly spaced at 30 a second",)
    return capture_from_poses("transforms.json", (file, *paths), pictures(paths), time_T, pose_T44, episode_T, notes)


def _entry(root: Path, file: Path, n: int, entry: Any) -> tuple[Path, np.ndarray, float | None]:
    try:
        name, matrix = str(entry["file_path"]), np.array(entry["transform_matrix"], np.float64)
        stamp = entry.get("timestamp", entry.get("time"))
        stamp = None if stamp is None else float(stamp)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{file}: frame {n} needs file_path and a transform_matrix of numbers") from None
    if matrix.shape == (3, 4):
        matrix = np.vstack((matrix, [0, 0, 0, 1]))
    if matrix.shape != (4, 4):
        raise UserError(f"{file}: the transform_matrix of frame {n} is not 4x4")
    path = inside(root, name)
    if not path.suffix:
        path = next((p for p in (path.with_name(path.name + end) for end in PICTURES) if p.is_file()), path)
    return path, matrix, stamp


def _natural(name: str) -> list[tuple[int, int | str]]:
    """frame_9 before frame_10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def _numbered(file: Path, paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Times and episodes from the numbers in file names: a gap starts an episode, an uneven step is refused."""
    found = [re.findall(r"\d+", path.stem) for path in paths]
    number_T = np.array([int(f[-1]) if f else n for n, f in enumerate(found)], np.int64)
    step_T = np.diff(number_T)
    if not len(step_T):
        return np.zeros(len(paths)), np.zeros(len(paths), np.int32)
    usual = int(np.median(step_T))
    if (step_T <= 0).any() or (step_T != usual).mean() > 0.1:
        raise UserError(
            f"{file}: frames are not evenly spaced (steps of {step_T.min()} to {step_T.max()} in their numbers, mostly {usual}), "
            "and it states no time\nexport every frame, or give each a `timestamp` in seconds"
        )
    episode_T = np.concatenate(([0], np.cumsum(step_T != usual))).astype(np.int32)
    return number_T / max(usual, 1) * NOMINAL, episode_T


def record3d(folder: Path) -> Capture:
    """Record3D: metadata with rows qx, qy, qz, qw, tx, ty, tz of an ARKit camera, fps or times, and numbered images."""
    file = next(p for p in (folder / "metadata.json", folder / "metadata") if p.is_file())
    facts = json_file(file)
    try:
        row_T7 = np.array(facts["poses"], np.float64).reshape(-1, 7)
        stamps = facts.get("frameTimestamps")
        time_T = np.array(stamps, np.float64) if stamps else np.arange(len(row_T7)) / float(facts["fps"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise UserError(f"{file} needs poses (7 numbers each) and fps or frameTimestamps") from None
    place = next((folder / name for name in ("rgbd", "rgb") if (folder / name).is_dir()), folder)
    paths = sorted((p for p in place.iterdir() if p.suffix.lower() in PICTURES), key=lambda p: _natural(p.name))
    if not paths:
        raise UserError(f"{place} has no frames; a Record3D export keeps them in rgbd/ (an .r3d file is a zip: unpack it first)")
    if not len(paths) == len(row_T7) == len(time_T):
        raise UserError(
            f"{folder} has {len(paths):,} frames, {len(row_T7):,} poses and {len(time_T):,} times: the counts must agree"
        )
    pose_T44 = poses.body_pose(poses.from_quaternion(row_T7[:, :4], row_T7[:, 4:]), poses.FROM_OPENGL)
    return capture_from_poses("Record3D", (file, *paths), pictures(paths), time_T, pose_T44)


def tum(folder: Path) -> Capture:
    """TUM RGB-D: rgb.txt and groundtruth.txt with separate timestamps; poses of an OpenCV camera, x, y, z, w."""
    listing, track = folder / "rgb.txt", folder / "groundtruth.txt"
    rows, time_T = _listed(listing, None)
    paths = [inside(folder, " ".join(row[1:])) for row in rows]
    value_N8 = numbers(read_rows(track, None), track, 8)
    camera_N44 = poses.from_quaternion(value_N8[:, 4:8], value_N8[:, 1:4])
    return _joined("TUM", (listing, track), paths, time_T, track, value_N8[:, 0], poses.body_pose(camera_N44, poses.FROM_OPENCV))


def euroc(folder: Path) -> Capture:
    """EuRoC: nanoseconds, quaternions with w first, poses of the body; the extrinsics of cam0 come from sensor.yaml."""
    folder = folder / "mav0" if (folder / "mav0").is_dir() else folder
    listing, sensor = folder / "cam0" / "data.csv", folder / "cam0" / "sensor.yaml"
    track = next((p for p in sorted(folder.glob("*/data.csv")) if "groundtruth" in p.parent.name), None)
    if track is None:
        raise UserError(f"{folder} has no poses: state_groundtruth_estimate0/data.csv is missing")
    rows, time_T = _listed(listing, ",")
    paths = [inside(folder / "cam0" / "data", row[1]) for row in rows]
    value_N8 = numbers(read_rows(track), track, 8)
    quaternion_N4 = value_N8[:, [5, 6, 7, 4]]
    camera_N44 = poses.from_quaternion(quaternion_N4, value_N8[:, 1:4]) @ _mounting(sensor)
    # Counted from the first frame: as seconds since 1970 float64 would round them to a tenth of a microsecond.
    start = time_T[0]
    body_N44 = poses.body_pose(camera_N44, poses.FROM_OPENCV)
    return _joined(
        "EuRoC", (listing, track, sensor), paths, (time_T - start) / 1e9, track, (value_N8[:, 0] - start) / 1e9, body_N44
    )


def _listed(listing: Path, separator: str | None) -> tuple[list[list[str]], np.ndarray]:
    """The rows of a list of frames, and their times."""
    rows = read_rows(listing, separator)
    if not rows:
        raise UserError(f"{listing} has no frames")
    return rows, numbers(rows, listing, 1)[:, 0]


def _mounting(sensor: Path) -> np.ndarray:
    """T_BS of a sensor.yaml: the pose of the camera in the body frame."""
    try:
        found = re.search(r"T_BS:.*?data:\s*\[([^\]]*)\]", sensor.read_text(), re.DOTALL)
        matrix_44 = np.array([float(word) for word in found[1].split(",")]).reshape(4, 4) if found else None
    except FileNotFoundError:
        raise UserError(f"{sensor} is missing: it holds the pose of the camera on the body (T_BS)") from None
    except ValueError:
        matrix_44 = None
    if matrix_44 is None:
        raise UserError(f"{sensor} holds no T_BS of 16 numbers")
    # The nearest rigid motion: numbers in text files are rounded.
    left, _, right = np.linalg.svd(matrix_44[:3, :3])
    matrix_44[:3, :3] = left @ right
    return matrix_44


def _joined(
    kind: str,
    tables: tuple[Path, ...],
    paths: list[Path],
    time_T: np.ndarray,
    track: Path,
    time_N: np.ndarray,
    pose_N44: np.ndarray,
) -> Capture:
    """Poses at the times of the frames. Frames before, after and inside long gaps of the track are left out."""
    if len(time_N) < 2:
        raise UserError(f"{track} holds {len(time_N)} poses; at least two are needed")
    if (np.diff(time_N) <= 0).any():
        raise UserError(f"{track}: time does not run forward at row {int(np.argmax(np.diff(time_N) <= 0)) + 2}; sort it by time")
    bad_N = np.flatnonzero(~np.isfinite(pose_N44).reshape(len(pose_N44), -1).all(1))
    if len(bad_N):
        raise UserError(f"{track}: the pose of row {bad_N[0] + 1:,} is not a finite number; cut the track there")
    within_T = (time_T >= time_N[0]) & (time_T <= time_N[-1])
    right_T = np.clip(np.searchsorted(time_N, time_T, side="right"), 1, len(time_N) - 1)
    long_N = np.diff(time_N) > GAP * np.median(np.diff(time_N))
    keep_T = within_T & ~long_N[right_T - 1]
    if not keep_T.any():
        raise UserError(
            f"{track.name} covers {time_N[0]:.3f} to {time_N[-1]:.3f} s, the frames {time_T[0]:.3f} to {time_T[-1]:.3f} s"
        )
    kept = np.flatnonzero(keep_T)
    episode_T = np.concatenate(([0], np.cumsum(np.diff(kept) > 1))).astype(np.int32)
    pose_T44 = poses.interpolate(time_N, pose_N44, time_T[kept])
    left_out = len(time_T) - len(kept)
    notes = (f"{left_out:,} of {len(time_T):,} frames have no pose near them and are left out",) if left_out else ()
    chosen = [paths[n] for n in kept]
    return capture_from_poses(kind, (*tables, *chosen), pictures(chosen), time_T[kept], pose_T44, episode_T, notes)
