"""A capture: frames from files with their times, poses or controls, before they become a recording.

Shape suffixes: T frames, A control axes, H W pixels.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from seedbed.data.progress import Progress
from seedbed.errors import UserError
from seedbed.recipes.world.recording import poses
from seedbed.recipes.world.recording.recording import check_time

POSE_AXES = (("x", "m"), ("y", "m"), ("z", "m"), ("roll", "rad"), ("pitch", "rad"), ("yaw", "rad"), ("dt", "s"))
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
# Files up to this size are hashed whole; of larger ones, the beginning and the end.
HASHED = 64 << 20
# Largest deviation from orthonormality of a rotation matrix.
MAX_DEVIATION = 1e-2


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
        """Hash of the source files."""
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
    check_poses(pose_T44, kind)
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


def check_poses(pose_T44: np.ndarray, kind: str) -> None:
    """Finite numbers and valid rotations."""
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


# ---- images --------------------------------------------------------------------------------------------------------------


def fit(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Centre crop and resize by area averaging."""
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image, np.uint32) >> 8).astype(np.uint8))
    if image.mode != "RGB":
        image = image.convert("RGB")
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BOX)
    return np.asarray(image, np.uint8)


def pictures(files: list[Path]) -> Callable[[int, int], Iterator[np.ndarray]]:
    """Decode these files one after the other; all must have one size."""

    def decode(height: int, width: int) -> Iterator[np.ndarray]:
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
                raise UserError(
                    f"{file} has {found[0]}x{found[1]} pixels, the first frame {first[0]}x{first[1]}: sizes are mixed"
                )
            yield picture
            progress(n + 1, len(files))
        progress.close()

    return decode


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
    """A JSON object from a file."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no JSON object")
    return found
