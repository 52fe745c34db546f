"""A capture: frames from files with their times, poses or controls, before they become a recording.

Importers of images with camera poses: nerfstudio's transforms.json, Record3D, TUM RGB-D and EuRoC.
Shape suffixes: T frames, A control axes, H W pixels, N rows of a table.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from seedbed.data.store import Progress
from seedbed.errors import UserError
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.recording import check_time

POSE_AXES = (("x", "m"), ("y", "m"), ("z", "m"), ("roll", "rad"), ("pitch", "rad"), ("yaw", "rad"), ("dt", "s"))
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
# Files up to this size are hashed whole; of larger ones, the beginning and the end.
HASHED = 64 << 20
# Largest deviation from orthonormality of a rotation matrix.
MAX_DEVIATION = 1e-2

# The frame interval of formats without timestamps.
NOMINAL = 1 / 30
# Poses further apart than this many usual intervals are not interpolated.
GAP = 5.0


@dataclass(frozen=True)
class Capture:
    """The result of an importer. `frames(height, width)` decodes; the tables are complete before decoding."""

    kind: str
    files: tuple[Path, ...]
    frames: Callable[[int, int], Iterator[np.ndarray]]
    time_T: np.ndarray
    episode_T: np.ndarray
    actions_TA: np.ndarray
    axes: tuple[tuple[str, str], ...]
    pose_T44: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    def identity(self) -> str:
        found = hashlib.sha256()
        for file in self.files:
            if not file.is_file():
                raise UserError(f"{file} is missing")
            found.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with open(file, "rb") as handle:
                found.update(handle.read(HASHED))
                if file.stat().st_size > 2 * HASHED:
                    handle.seek(-HASHED, 2)
                found.update(handle.read(HASHED))
        return found.hexdigest()


def capture_from_poses(
    kind: str,
    files: Iterable[Path],
    frames: Callable[[int, int], Iterator[np.ndarray]],
    time_T: np.ndarray,
    pose_T44: np.ndarray,
    episode_T: np.ndarray | None = None,
    notes: Iterable[str] = (),
) -> Capture:
    """A capture whose controls are the relative motion between poses, and dt."""
    episode_T = np.zeros(len(time_T), np.int32) if episode_T is None else episode_T
    # Finite numbers and valid rotations.
    bad_T = np.flatnonzero(~np.isfinite(pose_T44).reshape(len(pose_T44), -1).all(1))
    if len(bad_T):
        raise UserError(
            f"{kind}: the pose of frame {bad_T[0]:,} is not a finite number ({len(bad_T):,} such); cut the capture there"
        )
    turn_T33 = pose_T44[:, :3, :3]
    off_T = np.abs(np.swapaxes(turn_T33, -1, -2) @ turn_T33 - np.eye(3)).max((1, 2))
    off_T = np.maximum(off_T, np.abs(np.linalg.det(turn_T33) - 1))
    if len(off_T) and off_T.max() > MAX_DEVIATION:
        t = int(off_T.argmax())
        raise UserError(f"{kind}: the pose of frame {t:,} is not rigid (off by {off_T[t]:.2g}); is it scaled or mirrored?")
    check_time(time_T, episode_T)
    actions_TA = motions(pose_T44, time_T, episode_T)
    return Capture(kind, tuple(files), frames, time_T, episode_T, actions_TA, POSE_AXES, pose_T44, tuple(notes))


def motions(pose_T44: np.ndarray, time_T: np.ndarray, episode_T: np.ndarray) -> np.ndarray:
    """(T, 7) in float64: relative motion and seconds to the next frame, zero where an episode ends."""
    actions_T7 = np.zeros((len(pose_T44), 7))
    if len(pose_T44) > 1:
        actions_T7[:-1] = np.column_stack((poses.relative(pose_T44), np.diff(time_T)))
        actions_T7[:-1][np.diff(episode_T) != 0] = 0.0
    return actions_T7


# ---- images --------------------------------------------------------------------------------------------------------------


def fit(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Centre crop and resize by area averaging."""
    if image.mode.startswith("I"):  # 16 bits a pixel
        image = Image.fromarray((np.asarray(image, np.uint32) >> 8).astype(np.uint8))
    return np.asarray(ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.BOX))


def decode(files: list[Path], height: int, width: int) -> Iterator[np.ndarray]:
    """Decode these files one after the other; all must have one size."""
    progress, first = Progress("decoding", "frames"), None
    for n, file in enumerate(files):
        try:
            with Image.open(file) as image:
                image.load()
                found = image.size
                picture = fit(image, height, width)
        except FileNotFoundError:
            raise UserError(f"{file} is missing; {n:,} of {len(files):,} frames were there") from None
        except Exception as error:
            # Decoders raise many kinds of errors on damaged files.
            raise UserError(f"{file} cannot be decoded: {(str(error).splitlines() or ['damaged'])[0]}") from None
        first = first or found
        if found != first:
            raise UserError(f"{file} has {found[0]}x{found[1]} pixels, the first frame {first[0]}x{first[1]}: sizes are mixed")
        yield picture
        progress(n + 1, len(files))
    progress.close()


def inside(root: Path, name: str) -> Path:
    """A file below `root`; a path outside it is refused."""
    place = (root / name).resolve()
    if not place.is_relative_to(root.resolve()):
        raise UserError(f"{name!r} leads out of {root}; an importer reads only its own folder")
    return place


# ---- tables --------------------------------------------------------------------------------------------------------------


def read_rows(file: Path, separator: str | None = ",") -> list[list[str]]:
    """The rows of a table of text; empty lines and those that begin with # are left out."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise UserError(f"{file} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    return [[w.strip() for w in line.split(separator)] for line in lines if line.strip() and not line.lstrip().startswith("#")]


def numbers(rows: list[list[str]], file: Path, width: int) -> np.ndarray:
    """The first `width` columns as float64; the error names the line."""
    found = np.empty((len(rows), width))
    for n, row in enumerate(rows):
        try:
            if len(row) < width:
                raise ValueError
            found[n] = [float(word) for word in row[:width]]
        except ValueError:
            text = " ".join(row)[:60]
            raise UserError(f"{file}: row {n + 1} should hold {width} numbers, it reads: {text!r}") from None
    return found


def json_file(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no JSON object")
    return found


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
    paths, cameras, stamps = map(list, zip(*entries, strict=True))
    pose_T44 = poses.body_pose(np.stack(cameras), poses.FROM_OPENGL)
    time_T, episode_T = (np.array(stamps), None) if timed else _numbered(file, paths)
    notes = () if timed else ("it states no time: frames are taken to be evenly spaced at 30 a second",)
    return capture_from_poses("transforms.json", (file, *paths), partial(decode, paths), time_T, pose_T44, episode_T, notes)


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
    return capture_from_poses("Record3D", (file, *paths), partial(decode, paths), time_T, pose_T44)


def tum(folder: Path) -> Capture:
    """TUM RGB-D: rgb.txt and groundtruth.txt with separate timestamps; poses of an OpenCV camera, x, y, z, w."""
    listing, track = folder / "rgb.txt", folder / "groundtruth.txt"
    rows, time_T = _listed(listing, None)
    paths = [inside(folder, " ".join(row[1:])) for row in rows]
    value_N8 = numbers(read_rows(track, None), track, 8)
    body_N44 = poses.body_pose(poses.from_quaternion(value_N8[:, 4:8], value_N8[:, 1:4]), poses.FROM_OPENCV)
    return _joined("TUM", (listing, track), paths, time_T, value_N8[:, 0], body_N44)


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
    camera_N44 = poses.from_quaternion(value_N8[:, [5, 6, 7, 4]], value_N8[:, 1:4]) @ _mounting(sensor)
    # Counted from the first frame: as seconds since 1970 float64 would round them to a tenth of a microsecond.
    second_T, second_N = (time_T - time_T[0]) / 1e9, (value_N8[:, 0] - time_T[0]) / 1e9
    body_N44 = poses.body_pose(camera_N44, poses.FROM_OPENCV)
    return _joined("EuRoC", (listing, track, sensor), paths, second_T, second_N, body_N44)


def _listed(listing: Path, separator: str | None) -> tuple[list[list[str]], np.ndarray]:
    rows = read_rows(listing, separator)
    if not rows:
        raise UserError(f"{listing} has no frames")
    return rows, numbers(rows, listing, 1)[:, 0]


def _mounting(sensor: Path) -> np.ndarray:
    """T_BS of a sensor.yaml: the pose of the camera in the body frame."""
    try:
        found = re.search(r"T_BS:.*?data:\s*\[([^\]]*)\]", sensor.read_text(), re.DOTALL)
        matrix_44 = np.array(found[1].split(",") if found else [], np.float64).reshape(4, 4)
    except FileNotFoundError:
        raise UserError(f"{sensor} is missing: it holds the pose of the camera on the body (T_BS)") from None
    except ValueError:
        raise UserError(f"{sensor} holds no T_BS of 16 numbers") from None
    # The nearest rigid motion: numbers in text files are rounded.
    left, _, right = np.linalg.svd(matrix_44[:3, :3])
    matrix_44[:3, :3] = left @ right
    return matrix_44


def _joined(
    kind: str, tables: tuple[Path, ...], paths: list[Path], time_T: np.ndarray, time_N: np.ndarray, pose_N44: np.ndarray
) -> Capture:
    """Poses at the times of the frames. Frames before, after and inside long gaps of the track are left out."""
    _, track, *_ = tables
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
    return capture_from_poses(kind, (*tables, *chosen), partial(decode, chosen), time_T[kept], pose_T44, episode_T, notes)
