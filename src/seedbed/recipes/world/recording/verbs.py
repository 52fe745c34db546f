"""`seedbed data record`, and `data prepare | inspect` of recordings: text or JSON output, statistics and a sheet of images.

Shape suffixes: T frames, A control axes, P pairs of frames.
"""

import argparse
import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data.grids import tile
from seedbed.errors import EXIT_OK, UserError
from seedbed.recipes.world import simulators
from seedbed.recipes.world.recording import lag_estimation
from seedbed.recipes.world.recording.importing import Correction, prepare_recording
from seedbed.recipes.world.recording.lag_estimation import require_aligned
from seedbed.recipes.world.recording.recording import MAX_DT, PARTS, Recording, open_recording, spread
from seedbed.train.player import Axis

DEFAULT_SIZE = "64x64"

# Frames that differ by less than this (mean over pixels, in levels of 256) count as equal.
STILL = 0.5
# Deflection from which an axis counts as used.
USED = 0.25
MAX_COMPARED = 2000
SHEET_COLUMNS, SHEET_ROWS = 10, 4
# Thumbnail side for the nearest-neighbour search.
SQUARES = 8


def record(given: argparse.Namespace) -> int:
    start = time.monotonic()
    recording = simulators.record(given.source, given.frames, *read_size(given.size), given.seed, out=given.out)
    say(f"lag: {require_aligned(recording).summary}")
    return show_result(recording, time.monotonic() - start, given.json)


def prepare(given: argparse.Namespace) -> int:
    """Import files as a recording, or find the existing one; the lag is checked."""
    start = time.monotonic()
    correction = Correction(given.shift_actions, tuple(given.flip), given.accept_lag)
    recording = prepare_recording(given.path, *read_size(given.size or DEFAULT_SIZE), correction, out=given.out, say=say)
    return show_result(recording, time.monotonic() - start, given.json)


def inspect(given: argparse.Namespace) -> int:
    """Print statistics, and draw a sheet of images and plots into the recording's folder."""
    recording = open_recording(given.path)
    facts = recording_facts(recording)
    facts["sheet"] = str(draw_sheet(recording, facts))
    print(json.dumps(facts) if given.json else _pairs(_shown(facts)))
    return EXIT_OK


def _shown(facts: dict[str, Any]) -> dict[str, str]:
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


def recording_facts(recording: Recording) -> dict[str, Any]:
    made, estimate = recording.facts["recording"], lag_estimation.estimate_lag(recording)
    num, height, width, _ = recording.frames_THWC.shape
    length_E = np.bincount(recording.episode_T - recording.episode_T.min())
    length_E = length_E[length_E > 0]
    axes = {axis.name: _axis_facts(recording, n, axis) for n, axis in enumerate(recording.axes)}
    back = axes["x"]["negative"] if "x" in axes else 0.0
    facts = {
        "store": str(recording.path),
        "source": recording.facts["source"]["name"],
        "fingerprint": recording.fingerprint,
        "convention": made["convention"],
        "frames": num,
        "size": f"{height}x{width}",
        "episodes": {"num": len(length_E), "shortest": int(length_E.min()), "longest": int(length_E.max())},
        "splits": recording.facts["splits"],
        "timing": _timing(recording),
        "axes": axes,
        "dead": [axis.name for axis in recording.axes if axis.dead and not axis.is_time],
        "forward_to_backward": axes["x"]["positive"] / back if back else None,
        "stillness": _stillness(recording),
        "neighbours": _neighbours(recording),
        "lag": estimate.facts() | {"words": estimate.summary},
    }
    return facts | {"warnings": _warnings(facts)}


def _warnings(facts: dict[str, Any]) -> list[str]:
    warnings, still, timing = [], facts["stillness"], facts["timing"]
    if facts["dead"]:
        warnings.append(f"never used: {', '.join(facts['dead'])}; the network cannot learn what they do")
    for name, axis in facts["axes"].items():
        low, high = sorted((axis["negative"], axis["positive"]))
        # Buttons have one side only.
        if name != "dt" and high > 0 and axis["range"][0] < 0 and low < 0.1 * high:
            warnings.append(f"{name} has one direction only: {axis['positive']:.1%} to +, {axis['negative']:.1%} to -")
    if still["same_although_steered"] > 0.05:
        warnings.append(f"{still['same_although_steered']:.1%} of the frames repeat the one before although a control was given")
    if timing["pauses"]:
        warnings.append(f"{timing['pauses']:,} pauses longer than {MAX_DT} frames: no window crosses them")
    if timing["jitter"] > 0.5:
        warnings.append(f"frames are unevenly spaced (jitter {timing['jitter']:.0%}); dt is one of the controls for that")
    if facts["lag"]["clear"] and (facts["lag"]["lag"] or any(s["sign"] < 0 for s in facts["lag"]["signs"].values())):
        warnings.append(f"lag: {facts['lag']['words']}")
    return warnings


def _timing(recording: Recording) -> dict[str, Any]:
    dt_P = recording.dt_T[~recording.last_T]
    if not len(dt_P):
        return {"median": 0.0, "fps": 0.0, "jitter": 0.0, "pauses": 0}
    median = float(np.median(dt_P))
    low, high = np.quantile(dt_P, (0.05, 0.95))
    pauses = int((dt_P > MAX_DT * median).sum())
    return {"median": median, "fps": 1 / median, "jitter": float((high - low) / median), "pauses": pauses}


def _axis_facts(recording: Recording, n: int, axis: Axis) -> dict[str, Any]:
    value_P = recording.actions_TA[~recording.last_T, n]
    used = USED * axis.scale
    return {
        "unit": axis.unit,
        "dead": axis.dead,
        "negative": float((value_P < -used).mean()),
        "positive": float((value_P > used).mean()),
        "scale": axis.scale,
        "full": list(axis.full),
        "limit": axis.limit,
        "range": [float(value_P.min(initial=0)), float(value_P.max(initial=0))],
    }


def _stillness(recording: Recording) -> dict[str, float]:
    """Shares of repeated frames, of frames without control, and of repeated frames with control."""
    pair_P = spread(np.flatnonzero(~recording.last_T), MAX_COMPARED)
    frames = recording.frames_THWC
    change_P = np.array([np.abs(frames[t].astype(np.int16) - frames[t + 1]).mean() for t in pair_P])
    moving = [n for n, axis in enumerate(recording.axes) if not axis.is_time and not axis.dead]
    asked_P = (np.abs(recording.scaled()[pair_P][:, moving]) > USED).any(1) if moving else np.zeros(len(pair_P), bool)
    same_P = change_P < STILL
    return {
        "same_picture": float(same_P.mean()),
        "no_control": float((~asked_P).mean()),
        "same_although_steered": float((same_P & asked_P).mean()),
        "levels_per_frame": float(change_P.mean()),
    }


def _neighbours(recording: Recording) -> dict[str, float]:
    """Distance of validation frames to the nearest training frame, and between consecutive frames, in levels."""
    parts = [spread(np.arange(*recording.span(part)), num) for part, num in zip(PARTS[:2], (2000, 200), strict=True)]
    train, valid = (_squares(recording.frames_THWC[part]) for part in parts)
    before = _squares(recording.frames_THWC[np.maximum(parts[1] - 1, 0)])
    nearest = [float(np.abs(train - picture).mean(1).min()) for picture in valid]
    return {"valid_to_train": float(np.mean(nearest)), "frame_to_frame": float(np.abs(valid - before).mean())}


def _squares(frames_THWC: np.ndarray) -> np.ndarray:
    num, height, width, _ = frames_THWC.shape
    rows, columns = height // SQUARES, width // SQUARES
    cut = frames_THWC[:, : rows * SQUARES, : columns * SQUARES].astype(np.float32)
    return cut.reshape(num, SQUARES, rows, SQUARES, columns, 3).mean((2, 4)).reshape(num, -1)


# ---- the sheet -----------------------------------------------------------------------------------------------------------


def draw_sheet(recording: Recording, facts: dict[str, Any]) -> Path:
    """Frames of the recording, a histogram of every control, pairs of controls, positions and timing, as one PNG beside it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = [n for n, axis in enumerate(recording.axes) if not axis.is_time][:12]
    rows = -(-len(shown) // 6)
    heights = [5.2, *[1.5] * rows, 3.0]
    figure = Figure(figsize=(13, sum(heights) + 0.4 * (rows + 2)))
    # A fixed layout: an automatic one takes longer than everything else here.
    frame = {"left": 0.03, "right": 0.99, "top": 0.965, "bottom": 0.05, "wspace": 0.5, "hspace": 0.22}
    grid: Any = figure.add_gridspec(rows + 2, 12, height_ratios=heights, **frame)
    with rc_context({"axes.titlesize": 8, "xtick.labelsize": 6, "ytick.labelsize": 6}):
        _draw_pictures(figure.add_subplot(grid[0, :]), recording, facts)
        for place, n in enumerate(shown):
            column = 2 * (place % 6)
            _draw_axis(figure.add_subplot(grid[1 + place // 6, column : column + 2]), recording, n)
        low = [figure.add_subplot(grid[rows + 1, column : column + 3]) for column in (0, 3, 6, 9)]
        _draw_lag(low[0], facts["lag"])
        _draw_pairs(low[1], recording, shown)
        _draw_map(low[2], recording)
        _draw_timing(low[3], recording)
        path = recording.path / "sheet.png"
        figure.savefig(path, dpi=100)
    return path


def _draw_pictures(place: Any, recording: Recording, facts: dict[str, Any]) -> None:
    chosen = spread(np.arange(recording.num_frames), SHEET_COLUMNS * SHEET_ROWS)
    page = tile(recording.frames_THWC[chosen], SHEET_COLUMNS)
    place.imshow(np.asarray(page), interpolation="antialiased", aspect="equal")
    place.set_axis_off()
    rate, every = f"{facts['timing']['fps']:.1f} frames/s", max(1, recording.num_frames // len(chosen))
    size = f"{facts['frames']:,} frames {facts['size']}, {facts['episodes']['num']} episodes, {rate}, every {every:,}th shown"
    place.set_title(f"{facts['source']}   {size}", fontsize=10)


def _draw_axis(place: Any, recording: Recording, n: int) -> None:
    axis = recording.axes[n]
    value_P = recording.actions_TA[~recording.last_T, n]
    edge = max(axis.limit, 1e-6) * 1.2
    place.hist(value_P.clip(-edge, edge), bins=41, range=(-edge, edge), color="tab:red" if axis.dead else "tab:blue", log=True)
    for full in axis.full:
        if full:
            place.axvline(full, color="tab:orange", linewidth=1)
    place.set_title(f"{axis.name}{' [' + axis.unit + ']' if axis.unit else ''}{' dead' if axis.dead else ''}")
    place.minorticks_off()


def _draw_lag(place: Any, found: dict[str, Any]) -> None:
    lags, scores = [int(k) for k in found["scores"]], list(found["scores"].values())
    colours = ["tab:green" if k == 0 else "tab:orange" if k == found["lag"] else "tab:gray" for k in lags]
    place.bar(lags, scores, color=colours)
    place.set_title("motion explained by action[t + lag]")


def _draw_pairs(place: Any, recording: Recording, shown: list[int]) -> None:
    """How often two controls are given at once; the diagonal is the share of each control."""
    used_PA = np.abs(recording.scaled()[~recording.last_T][:, shown]) > USED
    both_AA = used_PA.T.astype(np.float64) @ used_PA / max(len(used_PA), 1)
    place.imshow(both_AA, cmap="viridis", vmin=0)
    names = [recording.axes[n].name for n in shown]
    place.set_xticks(range(len(names)), names, rotation=90)
    place.set_yticks(range(len(names)), names)
    for (y, x), value in np.ndenumerate(both_AA):
        colour = "w" if value < both_AA.max() / 2 else "k"
        place.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=6, color=colour)
    place.set_title("% of frames with both controls")


def _draw_map(place: Any, recording: Recording) -> None:
    """Camera positions seen from above, along the two axes of most motion."""
    if recording.pose_T44 is None:
        place.set_title("no poses")
        place.set_axis_off()
        return
    path_T3 = recording.pose_T44[:, :3, 3]
    first, second = sorted(np.argsort(path_T3.std(0))[-2:])
    for part, colour in zip(PARTS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        low, high = recording.span(part)
        place.scatter(path_T3[low:high, first], path_T3[low:high, second], s=1, color=colour, label=part)
    place.set_aspect("equal", adjustable="datalim")
    place.legend(fontsize=6, markerscale=4, loc="upper right")
    place.set_title(f"positions ({'xyz'[first]}, {'xyz'[second]}, m)")


def _draw_timing(place: Any, recording: Recording) -> None:
    dt_P = recording.dt_T[~recording.last_T]
    top = MAX_DT * float(np.median(dt_P)) if len(dt_P) else 1.0
    place.hist(1000 * dt_P.clip(0, top), bins=40, range=(0, 1000 * top), color="tab:blue", log=True)
    place.set_title("ms between frames")
    place.minorticks_off()
