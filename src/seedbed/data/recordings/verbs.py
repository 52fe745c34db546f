"""`seedbed data record`, and `data prepare | inspect` where they meet recordings: print for a person, or as JSON."""

import re
import shlex
import sys
import time
from json import dumps
from pathlib import Path
from typing import Any

from seedbed.data.recording import Recording
from seedbed.errors import UserError

EXIT_OK = 0
DEFAULT_SIZE = "64x64"


def record(source: str, *, frames: int, size: str, seed: int, out: Path | None = None, json: bool = False) -> int:
    """Play a simulator by itself and keep what it showed."""
    from seedbed.data.lag import require_aligned
    from seedbed.data.recordings import simulators

    start = time.monotonic()
    height, width = read_size(size)
    recording = simulators.record(source, frames, height, width, seed, out=out)
    say(f"lag doctor: {require_aligned(recording).words}")
    return show_result(recording, time.monotonic() - start, json)


def prepare(
    path: str, *, size: str | None, shift: int, flip: list[str], accept: bool, out: Path | None = None, json: bool = False
) -> int:
    """Make a recording of somebody's files, or find it; the lag doctor looks at every one."""
    from seedbed.data.recordings.importing import Mending, prepare_recording

    start = time.monotonic()
    height, width = read_size(size or DEFAULT_SIZE)
    recording = prepare_recording(path, height, width, Mending(shift, tuple(flip), accept), out=out, say=say)
    return show_result(recording, time.monotonic() - start, json)


def read_size(text: str) -> tuple[int, int]:
    """Height and width from `64x64` (height first), or from one number for a square."""
    found = re.fullmatch(r"(\d{1,4})(?:x(\d{1,4}))?", text.strip().lower())
    if not found or not all(8 <= int(n or found[1]) <= 1024 for n in found.groups()):
        raise UserError(f"--size {text} is no size; write HEIGHTxWIDTH in pixels, 8 to 1024 each, such as 64x64")
    return int(found[1]), int(found[2] or found[1])


def show_result(recording: Recording, seconds: float, json: bool) -> int:
    """Where it is, what it holds, and what to do next."""
    num, height, width, _ = recording.frames_THWC.shape
    made = recording.facts["recording"]
    result: dict[str, Any] = {
        "store": str(recording.path),
        "fingerprint": recording.fingerprint,
        "frames": num,
        "size": f"{height}x{width}",
        "episodes": made["num_episodes"],
        "axes": [axis.name for axis in recording.axes],
        "splits": recording.facts["splits"],
        "seconds": round(seconds, 2),
        "train on it": shlex.join(["seedbed", "train", "world/mine", f"data.recording={recording.path}"]),
    }
    if json:
        print(dumps(result))
        return EXIT_OK
    parts = " | ".join(f"{name} {end - begin:,}" for name, (begin, end) in result["splits"].items())
    shown = result | {"frames": f"{num:,} in {made['num_episodes']} episodes: {parts}", "axes": ", ".join(result["axes"])}
    shown |= {"seconds": f"{seconds:.1f}", "look at it": shlex.join(["seedbed", "data", "inspect", str(recording.path)])}
    width = max(map(len, shown))
    for name in ("store", "frames", "size", "axes", "fingerprint", "seconds", "look at it", "train on it"):
        print(f"{name:<{width}}  {shown[name]}")
    return EXIT_OK


def say(line: str) -> None:
    print(line, file=sys.stderr)
