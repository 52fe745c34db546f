"""The full evaluation of a world model, as plain values and as a table.

Shape suffixes: B windows, H W pixels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seedbed.nn import eagerly
from seedbed.recipes.world import controls
from seedbed.recipes.world.data import WindowSource
from seedbed.recipes.world.evaluate import HORIZONS, baselines, free_run, teacher_forced, trajectories, trajectory_batch
from seedbed.recipes.world.metrics import dissimilarity, psnr, sharpness

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator
    from seedbed.recipes.world.evaluate import Trajectories

# Windows for measurements of hundreds of frames.
NUM_LONG = {"cuda": 64, "mps": 16, "cpu": 8}
NEAR = 8
CORRUPTED, RECOVERS, PATCH = 0.1, 16, 4
LEVELS = (0.0, 0.02, 0.05, 0.1)


@torch.no_grad()
def examine(system: Emulator, source: WindowSource, folder: Path | None = None, num: int = 256) -> dict[str, Any]:
    """Evaluate `system` on `num` fixed windows of `source`; with a folder, the result is written there."""
    few = min(num, NUM_LONG[next(system.parameters()).device.type])
    with system.long_rollouts():
        near = trajectory_batch(system, source, num, 4 * NEAR)
        own = rollout_frames(system, near, NEAR + RECOVERS)
        found: dict[str, Any] = {
            "part": source.part,
            "num_windows": num,
            "horizons": at_horizons(system, source, num, few),
            "actions": {str(k): value for k, value in action_sensitivity(system, near, own, (1, 4)).items()},
            "controls": controls.responses(system, near),
            "standing": controls.idle_drift(system, trajectory_batch(system, source, few, 2)),
            "turning": controls.full_turns(system, trajectory_batch(system, source, few, 2)),
            "memory_gap": memory_gap(system, near, own),
            "action_swap": action_swap(system, near),
            "recovery": recovery(system, near, own),
            "levels": {str(level): by_level(system, near, own, level) for level in LEVELS},
        }
    with eagerly():
        found["frames_per_s"] = frames_per_second(system, near)
    found["intrinsics"] = None if system.trunk.field is None else system.trunk.field.intrinsics()
    found["worst_control"] = controls.worst_accuracy(found["controls"])
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "examination.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "examination.md").write_text(table(found))
    return found


def horizons(system: Emulator, source: WindowSource) -> list[int]:
    return [h for h in HORIZONS if len(source.windows(1, system.layout.num_frames, h))]


def at_horizons(system: Emulator, source: WindowSource, num: int, few: int) -> dict[str, dict[str, float]]:
    """Free-running and teacher-forced PSNR and the baselines; one set of windows up to 64 frames, fewer beyond."""
    found = {}
    known = horizons(system, source)
    for marks, count in (([h for h in known if h <= 64], num), ([h for h in known if h > 64], few)):
        rows: dict[int, list[dict[str, Tensor]]] = {h: [] for h in marks}
        for traj in trajectories(system, source, count, max(marks, default=1)) if marks else ():
            for step, frame in free_run(system, traj, max(marks)):
                if step in marks:
                    rows[step].append(_at_horizon(system, traj, step, frame))
        found |= {str(h): _merged(rows[h]) for h in marks}
    return found


def _at_horizon(system: Emulator, traj: Trajectories, horizon: int, frame: Tensor) -> dict[str, Tensor]:
    true, pictures = traj.target(horizon), baselines(system.data, traj, horizon)
    row = {"free": psnr(frame, true), "forced": psnr(teacher_forced(system, traj, horizon), true)}
    row |= {name: psnr(picture, true) for name, picture in pictures.items()}
    row |= {"distance": dissimilarity(frame, true), "distance_copy": dissimilarity(pictures["copy"], true)}
    row["distance_fade"] = dissimilarity(pictures["fade"], true)
    row["sharp"], row["sharp_true"] = sharpness(frame), sharpness(true)
    row["light"] = (frame - true).flatten(1).mean(1) * 127.5
    return row


def _merged(rows: list[dict[str, Tensor]]) -> dict[str, float]:
    merged = {name: torch.cat([row[name] for row in rows]).double() for name in rows[0]}
    found = {name: value.mean().item() for name, value in merged.items()}
    found["sharpness"] = found.pop("sharp") / max(found.pop("sharp_true"), 1e-9)
    found["spread"] = merged["free"].std().item() if len(merged["free"]) > 1 else 0.0
    return {name: round(value, 4) for name, value in found.items()} | {"num": len(merged["free"])}


def rollout_frames(system: Emulator, traj: Trajectories, num: int) -> list[Tensor]:
    """Predicted frames of a rollout with the recorded controls; several measurements share them."""
    return [frame for _, frame in free_run(system, traj, min(num, traj.frames_BTCHW.shape[1] - traj.before))]


def action_sensitivity(system: Emulator, traj: Trajectories, own: list[Tensor], steps: Sequence[int]) -> dict[int, float]:
    """PSNR lost at these steps with shuffled controls: about 0 means that controls are ignored."""
    others = [traj.action(s).roll(1, 0) for s in range(1, max(steps) + 1)]
    shuffled = [frame for _, frame in free_run(system, traj, min(len(others), len(own)), others)]
    return {step: _psnr_at(traj, own, step) - _psnr_at(traj, shuffled, step) for step in steps}


def by_level(system: Emulator, traj: Trajectories, own: list[Tensor], level: float) -> float:
    """PSNR after 16 frames with this noise level as input."""
    frames = [frame for _, frame in free_run(system, traj, min(16, len(own)), level=level)] if level else own
    return _psnr_at(traj, frames, 16)


def _psnr_at(traj: Trajectories, frames: list[Tensor], step: int) -> float:
    step = min(step, len(frames))
    return psnr(frames[step - 1], traj.target(step)).mean().item()


def memory_gap(system: Emulator, traj: Trajectories, own: list[Tensor]) -> dict[str, list[float]]:
    """PSNR at steps 1 to 8 with true memory, with only the newest frame predicted, and with all frames predicted."""
    rows: dict[str, list[float]] = {"true": [], "newest_own": [], "all_own": []}
    mixed = traj.memory(system)
    for step, frame in enumerate(own[:NEAR], 1):
        true, action = traj.memory(system, step), traj.action(step)
        newest, predicted = (system.predict_frame(m, action, traj.index_B, step) for m in (mixed, true))
        mixed = system.advance(true, action, predicted)
        for name, picture in zip(rows, (predicted, newest, frame), strict=True):
            rows[name].append(psnr(picture, traj.target(step)).mean().item())
    return {name: [round(v, 3) for v in values] for name, values in rows.items()}


def action_swap(system: Emulator, traj: Trajectories) -> float:
    """How much another control changes the prediction, over how much another memory does."""
    memory, action = traj.memory(system), traj.action(1)
    own = system.predict_frame(memory, action, traj.index_B, 1)
    other_action = system.predict_frame(memory, action.roll(1, 0), traj.index_B, 1)
    other_memory = system.predict_frame(memory.roll(), action, traj.index_B, 1)
    return ((other_action - own).abs().mean() / (other_memory - own).abs().mean().clamp_min(1e-9)).item()


def recovery(system: Emulator, traj: Trajectories, own: list[Tensor]) -> dict[str, float | None]:
    """After corrupted patches in the newest frame: frames until the error is within a tenth of the clean rollout's."""
    last = min(NEAR + RECOVERS, len(own))
    if last <= NEAR:
        return {}
    clean = dict(enumerate(own, 1))
    memory = traj.memory(system)
    for step in range(1, NEAR + 1):
        memory = system.advance(memory, traj.action(step), clean[step] if step < NEAR else _corrupted(clean[step]))
    back_B = torch.full((len(traj.start_B),), float("inf"), device=traj.action_BTA.device)
    for step in range(NEAR + 1, last + 1):
        memory = system.rollout_step(memory, traj.action(step), traj.index_B, step)
        corrupted_B, clean_B = ((f - traj.target(step)).abs().flatten(1).mean(1) for f in (memory.last, clean[step]))
        back_B = torch.where((corrupted_B <= 1.1 * clean_B) & back_B.isinf(), step - NEAR, back_B)
    done_B = back_B.isfinite()
    frames = back_B[done_B].median().item() if done_B.any() else None
    return {"share": done_B.float().mean().item(), "frames": frames}


def _corrupted(frame_BCHW: Tensor) -> Tensor:
    """A tenth of the patches from another window's frame, always the same ones."""
    height, width = frame_BCHW.shape[-2:]
    row_H, column_W = (torch.arange(side, device=frame_BCHW.device) // PATCH for side in (height, width))
    number_HW = row_H[:, None] * 31 + column_W * 17
    return torch.where(number_HW % 10 < 10 * CORRUPTED, frame_BCHW.roll(1, 0), frame_BCHW)


def frames_per_second(system: Emulator, traj: Trajectories, num: int = 30) -> float:
    """Speed of one rollout, memory updates included."""
    one = replace(traj, frames_BTCHW=traj.frames_BTCHW[:1], action_BTA=traj.action_BTA[:1], start_B=traj.start_B[:1])
    memory, action = one.memory(system), one.action(1)

    def time_after(num_frames: int) -> float:
        for _ in range(num_frames):
            system.advance(memory, action, system.predict_frame(memory, action, one.index_B, 1))
        if action.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    start = time_after(3)  # without the first calls, which are slower
    return round(num / (time_after(num) - start), 1)


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['num_windows']} windows of the {found['part']} part, free-running with their true controls; dB.",
        "",
        "| frames | free | forced | persistence | mean | fade | over fade | 1-SSIM | of fade | sharpness | light |",
        "|---:|" + "---:|" * 10,
    ]
    for horizon, row in found["horizons"].items():
        numbers = [row[name] for name in ("free", "forced", "copy", "mean", "fade")]
        shown = [f"{v:.2f}" for v in (*numbers, row["free"] - row["fade"])]
        shown += [f"{row['distance']:.3f}", f"{row['distance_fade']:.3f}", f"{row['sharpness']:.2f}", f"{row['light']:+.1f}"]
        lines.append(f"| {horizon} | " + " | ".join(shown) + " |")
    lines += ["", "| control | judged | right at 1 | slope | right at 8 | slope |", "|---|---|---:|---:|---:|---:|"]
    for name, row in found["controls"].items():
        cells = [_cell(row.get(f"{what}_{n}"), what) for n in controls.HELD for what in ("accuracy", "slope")]
        lines.append(f"| {name} | {row['judged']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_sentences(found)]) + "\n"


def _cell(value: float | None, what: str) -> str:
    return "" if value is None else f"{value:.1%}" if what == "accuracy" else f"{value:.2f}"


def _sentences(found: dict[str, Any]) -> list[str]:
    still, around, gap = found["standing"], found["turning"], found["memory_gap"]
    lines = [
        f"With shuffled controls {found['actions']['1']:.2f} dB are lost at 1 frame, {found['actions']['4']:.2f} at 4; "
        f"another control changes the frame {found['action_swap']:.3f} as much as another memory.",
        f"Without controls for {still['frames']} frames: level moves {still['level']:.3f}, contrast {still['contrast']:.3f}, "
        f"sharpness {still['sharpness'][0]:.2f} to {still['sharpness'][1]:.2f} of the first; "
        f"{still['share_of_windows']:.0%} of rollouts leave the bounds: {'DRIFT' if still['alarm'] else 'no alarm'}.",
        f"Steps 1 and 8: true memory {gap['true'][0]:.2f}, {gap['true'][-1]:.2f} dB; own newest frame "
        f"{gap['newest_own'][0]:.2f}, {gap['newest_own'][-1]:.2f}; all own {gap['all_own'][0]:.2f}, {gap['all_own'][-1]:.2f}.",
    ]
    if around:
        after = ", ".join(f"{v:.2f}" for v in around["psnr_after"])
        lines.append(
            f"After 1, 2, 3 full turns {after} dB to the first frame; half a turn away {around['psnr_of_half_a_circle']:.2f}."
        )
    if found["intrinsics"]:
        camera = found["intrinsics"]
        lines.append(
            f"Learned camera: {camera['across']:.0f} degrees across, {camera['down']:.0f} down; "
            f"{round(camera['shifts'], 2) + 0.0:.0%} of a pitch shifts the image, the rest rotates the view."
        )
    if found["recovery"]:
        lines.append(f"Corrupted patches: {found['recovery']['share']:.0%} recovered within {RECOVERS} frames.")
    by_input = ", ".join(f"{level}: {value:.2f}" for level, value in found["levels"].items())
    lines.append(f"At 16 frames by the noise level input: {by_input} dB. {found['frames_per_s']:.0f} frames/s.")
    return lines
