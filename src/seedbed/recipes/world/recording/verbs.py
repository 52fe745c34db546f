"""`seedbed data record`, and `data prepare | inspect` of recordings: text or JSON output."""

import argparse
import json
import re
import shlex
import sys
import time
from typing import Any

from seedbed.errors import EXIT_OK, UserError
from seedbed.recipes.world.recording.recording import Recording, open_recording

DEFAULT_SIZE = "64x64"


def record(given: argparse.Namespace) -> int:
    """Record a simulator under scripted or random controls."""
    from seedbed.recipes.world import simulators
    from seedbed.recipes.world.recording.lag_estimation import require_aligned

    start = time.monotonic()
    recording = simulators.record(given.source, given.frames, *read_size(given.size), given.seed, out=given.out)
    say(f"lag: {require_aligned(recording).summary}")
    return show_result(recording, time.monotonic() - start, given.json)


def prepare(given: argparse.Namespace) -> int:
    """Import files as a recording, or find the existing one; the lag is checked."""
    from seedbed.recipes.world.recording.importing import Correction, prepare_recording

    start = time.monotonic()
    correction = Correction(given.shift_actions, tuple(given.flip), given.accept_lag)
    recording = prepare_recording(given.path, *read_size(given.size or DEFAULT_SIZE), correction, out=given.out, say=say)
    return show_result(recording, time.monotonic() - start, given.json)


def inspect(given: argparse.Namespace) -> int:
    """Print statistics, and draw a sheet of images and plots into the recording's folder."""
    from seedbed.recipes.world.recording.inspect import draw_sheet, recording_facts

    recording = open_recording(given.path)
    facts = recording_facts(recording)
    facts["sheet"] = str(draw_sheet(recording, facts, recording.path / "sheet.png"))
    print(json.dumps(facts) if given.json else _pairs(_shown(facts)))
    return EXIT_OK


def _shown(facts: dict[str, Any]) -> dict[str, str]:
    """The facts as lines."""
    timing, still, episodes, near = (facts[name] for name in ("timing", "stillness", "episodes", "neighbours"))
    ratio, ends = facts["forward_to_backward"], sorted({episodes["shortest"], episodes["longest"]})
    lengths = f"{episodes['num']:,} episode{'s' * (episodes['num'] > 1)} of {' to '.join(f'{n:,}' for n in ends)}"
    apart = f"{near['valid_to_train']:.1f} levels from the nearest training frame"
    lines = {
        "store": facts["store"],
        "source": facts["source"],
        "fingerprint": facts["fingerprint"],
        "convention": facts["convention"],
        "frames": f"{facts['frames']:,} of {facts['size']} in {lengths}",
        "parts": " | ".join(f"{name} {low:,}-{high:,}" for name, (low, high) in facts["splits"].items()),
        "timing": f"{timing['fps']:.2f} frames/s, jitter {timing['jitter']:.1%}, {timing['pauses']:,} pauses",
    }
    for name, axis in facts["axes"].items():
        if name != "dt":
            sides = "never used" if axis["dead"] else f"{axis['negative']:6.1%} to -, {axis['positive']:6.1%} to +"
            full = f"full deflection {axis['full'][0]:.4g} to {axis['full'][1]:.4g} {axis['unit']}".rstrip()
            lines[f"  {name}"] = sides if axis["dead"] else f"{sides}; {full}"
    lines |= {
        "forward : back": "-" if ratio is None else f"{ratio:.2f}",
        "still": f"{still['same_picture']:.1%} of the frames repeat the one before, {still['no_control']:.1%} have no control",
        "splits": f"a validation frame is {apart}, {near['frame_to_frame']:.1f} from the one before it",
        "lag": facts["lag"]["words"],
        "sheet": facts["sheet"],
    }
    return lines | {f"warning {n}": text for n, text in enumerate(facts["warnings"], 1)}


def _pairs(pairs: dict[str, str]) -> str:
    width = max(map(len, pairs))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs.items())


def read_size(text: str) -> tuple[int, int]:
    """Height and width from `64x64` (height first), or from one number for a square."""
    found = re.fullmatch(r"(\d{1,4})(?:x(\d{1,4}))?", text.strip().lower())
    if not found or not all(8 <= int(n or found[1]) <= 1024 for n in found.groups()):
        raise UserError(f"--size {text} is not a size; write HEIGHTxWIDTH in pixels, 8 to 1024 each, such as 64x64")
    return int(found[1]), int(found[2] or found[1])


def show_result(recording: Recording, seconds: float, as_json: bool) -> int:
    """Path, content and next commands."""
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
    if as_json:
        print(json.dumps(result))
        return EXIT_OK
    parts = " | ".join(f"{name} {end - begin:,}" for name, (begin, end) in result["splits"].items())
    shown = result | {
        "frames": f"{num:,} in {made['num_episodes']:,} episode{'s' * (made['num_episodes'] > 1)}: {parts}",
        "axes": ", ".join(result["axes"]),
        "seconds": f"{seconds:.1f}",
        "inspect it": shlex.join(["seedbed", "data", "inspect", str(recording.path)]),
    }
    order = ("store", "frames", "size", "axes", "fingerprint", "seconds", "inspect it", "train on it")
    print(_pairs({name: shown[name] for name in order}))
    return EXIT_OK


def say(line: str) -> None:
    print(line, file=sys.stderr)
