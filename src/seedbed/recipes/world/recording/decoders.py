"""Frames of a video with their timestamps: by av, or by opencv where av is not installed."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from seedbed.errors import UserError


@dataclass(frozen=True)
class Picture:
    """One frame as it is stored; a player rotates it `turn` degrees counter-clockwise. `image` decodes the pixels."""

    width: int
    height: int
    turn: int
    image: Callable[[], Image.Image]


def times(video: Path) -> np.ndarray:
    """The timestamp of each frame in seconds of the video, without decoding pixels."""
    return _with_av_times(video) if _has_av(video) else _with_cv_times(video)


def pictures(video: Path) -> Iterator[Picture]:
    """All frames in display order."""
    return _with_av(video) if _has_av(video) else _with_cv(video)


def _has_av(video: Path) -> bool:
    if not video.is_file():
        raise UserError(f"{video} is missing")
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True


# ---- av ------------------------------------------------------------------------------------------------------------------


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
                turn = int(getattr(frame, "rotation", 0)) % 360
                yield Picture(frame.width, frame.height, turn, frame.to_image)
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


# ---- opencv --------------------------------------------------------------------------------------------------------------


def _with_cv_times(video: Path) -> np.ndarray:
    cv2, stamps = _cv(), []
    with _cv_opened(video) as capture:
        while capture.grab():
            stamps.append(capture.get(cv2.CAP_PROP_POS_MSEC))
    return np.array(stamps, np.float64) / 1000.0


def _with_cv(video: Path) -> Iterator[Picture]:
    with _cv_opened(video) as capture:
        turn = -int(capture.get(_cv().CAP_PROP_ORIENTATION_META)) % 360  # av counts clockwise
        while True:
            there, pixels_HWC = capture.read()
            if not there:
                return
            image = Image.fromarray(np.ascontiguousarray(pixels_HWC[..., ::-1]))  # opencv returns BGR
            yield Picture(image.width, image.height, turn, lambda image=image: image)


@contextlib.contextmanager
def _cv_opened(video: Path) -> Iterator[Any]:
    cv2 = _cv()
    capture = cv2.VideoCapture(str(video), cv2.CAP_FFMPEG)
    try:
        capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)  # frames as stored: the caller rotates them
        if not capture.isOpened():
            raise UserError(f"{video} does not decode: opencv cannot open it")
        yield capture
    finally:
        capture.release()


def _cv() -> Any:
    try:
        import cv2  # type: ignore[import-not-found]
    except ImportError:
        raise UserError('reading a video needs av: pip install "seedbed[video]"') from None
    return cv2
