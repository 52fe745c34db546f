"""The whole battery: every number by which an emulator of a world is judged, as plain values, as a table and as a picture.

Shape suffixes: B windows, H W pixels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seedbed.recipes.world import controls
from seedbed.recipes.world.data import WindowsOfPlay
from seedbed.recipes.world.evaluate import HORIZONS, Walk, forced, free_run, walks
from seedbed.recipes.world.metrics import dissimilarity, psnr, sharpness

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator

# Windows looked at where each takes hundreds of frames.
NUM_LONG = {"cuda": 64, "mps": 16, "cpu": 8}
NEAR = 8
SPOILED, RECOVERS, PATCH = 0.1, 16, 4
LEVELS = (0.0, 0.02, 0.05, 0.1)


@torch.no_grad()
def examine(system: Emulator, source: WindowsOfPlay, folder: Path | None = None, num: int = 256) -> dict[str, Any]:
    """Judge `system` on `num` fixed windows of `source`; with a folder, the result is written there."""
    device = next(system.parameters()).device.type
    few = min(num, NUM_LONG[device])
    with torch.compiler.set_stance("force_eager"):
        near = one_walk(system, source, num, 4 * NEAR)
        found: dict[str, Any] = {
            "part": source.part,
            "num_windows": num,
            "horizons": at_horizons(system, source, num, few),
            "actions": {str(k): deafness(system, near, k) for k in (1, 4)},
            "controls": controls.responses(system, near),
            "standing": controls.standing(system, one_walk(system, source, few, 2)),
            "turning": controls.turning(system, one_walk(system, source, few, 2)),
            "memory_gap": memory_gap(system, near),
            "action_swap": action_swap(system, near),
            "recovery": recovery(system, near),
            "levels": {str(level): _psnr_at(system, near, 16, level) for level in LEVELS},
            "frames_per_s": frames_per_second(system, near),
        }
    found["lens"] = None if system.trunk.place is None else system.trunk.place.lens()
    found["worst_control"] = controls.worst_accuracy(found["controls"])
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "examination.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "examination.md").write_text(table(found))
    return found


def horizons(system: Emulator, source: WindowsOfPlay) -> list[int]:
    """Those for which the part has windows."""
    return [h for h in HORIZONS if len(source.windows(1, system.layout.num_frames, h))]


def one_walk(system: Emulator, source: WindowsOfPlay, num: int, horizon: int) -> Walk:
    """`num` windows at once; a shorter horizon where the recording has none so long."""
    while horizon > 1 and not len(source.windows(1, system.layout.num_frames, horizon)):
        horizon //= 2
    found = list(walks(system, source, num, horizon))
    frames, actions = torch.cat([w.frames_BTCHW for w in found]), torch.cat([w.action_BTA for w in found])
    return Walk(frames, actions, source.windows(num, system.layout.num_frames, horizon), found[0].before)


def at_horizons(system: Emulator, source: WindowsOfPlay, num: int, few: int) -> dict[str, dict[str, float]]:
    """Free-running and teacher-forced, beside the trivial predictors; one set of windows up to 64 frames, fewer beyond."""
    found = {}
    known = horizons(system, source)
    for marks, count in (([h for h in known if h <= 64], num), ([h for h in known if h > 64], few)):
        rows: dict[int, list[dict[str, Tensor]]] = {h: [] for h in marks}
        for walk in walks(system, source, count, max(marks, default=1)) if marks else ():
            for step, frame in free_run(system, walk, max(marks)):
                if step in marks:
                    rows[step].append(_at_horizon(system, walk, step, frame))
        found |= {str(h): _merged(rows[h]) for h in marks}
    return found


def _at_horizon(system: Emulator, walk: Walk, horizon: int, frame: Tensor) -> dict[str, Tensor]:
    true, pictures = walk.target(horizon), system.judge.baselines(walk, horizon)
    row = {"free": psnr(frame, true), "forced": psnr(forced(system, walk, horizon), true)}
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


def _psnr_at(system: Emulator, walk: Walk, step: int, level: float = 0.0, actions: list[Tensor] | None = None) -> float:
    step = min(step, walk.frames_BTCHW.shape[1] - walk.before)
    frame = [frame for _, frame in free_run(system, walk, step, actions, level)][-1]
    return psnr(frame, walk.target(step)).mean().item()


def deafness(system: Emulator, walk: Walk, step: int) -> float:
    """Decibels lost when windows get the controls of others: about 0 is blind."""
    other = [walk.action(s).roll(1, 0) for s in range(1, step + 1)]
    return _psnr_at(system, walk, step) - _psnr_at(system, walk, step, actions=other)


def memory_gap(system: Emulator, walk: Walk) -> dict[str, list[float]]:
    """Decibels at steps 1 to 8 with true memory, with its own newest frame in a true one, and with all its own."""
    rows: dict[str, list[float]] = {"true": [], "newest_own": [], "all_own": []}
    before: Tensor | None = None
    for step, frame in free_run(system, walk, min(NEAR, walk.frames_BTCHW.shape[1] - walk.before)):
        true, target = walk.memory(system, step), walk.target(step)
        first = forced(system, walk, step)
        mixed = first
        if before is not None:
            memory = system.onward(walk.memory(system, step - 1), walk.action(step - 1), before)
            mixed = system.dream(memory, walk.action(step), walk.index_B, step)
        rows["true"].append(psnr(first, target).mean().item())
        rows["newest_own"].append(psnr(mixed, target).mean().item())
        rows["all_own"].append(psnr(frame, target).mean().item())
        before = system.dream(true, walk.action(step), walk.index_B, step)
    return {name: [round(v, 3) for v in values] for name, values in rows.items()}


def action_swap(system: Emulator, walk: Walk) -> float:
    """How much another control changes the prediction, over how much another memory does."""
    memory, action = walk.memory(system), walk.action(1)
    own = system.dream(memory, action, walk.index_B, 1)
    other_action = system.dream(memory, action.roll(1, 0), walk.index_B, 1)
    other_memory = system.dream(memory.roll(), action, walk.index_B, 1)
    return ((other_action - own).abs().mean() / (other_memory - own).abs().mean().clamp_min(1e-9)).item()


def recovery(system: Emulator, walk: Walk) -> dict[str, float]:
    """After spoiled patches in the newest frame: how many frames until the error is within a tenth of the clean rollout's."""
    last = min(NEAR + RECOVERS, walk.frames_BTCHW.shape[1] - walk.before)
    if last <= NEAR:
        return {}
    clean = {step: frame for step, frame in free_run(system, walk, last)}
    memory = walk.memory(system)
    for step in range(1, NEAR + 1):
        memory = system.onward(memory, walk.action(step), clean[step] if step < NEAR else _spoiled(clean[step]))
    back_B = torch.full((len(walk.start_B),), float("inf"), device=walk.action_BTA.device)
    for step in range(NEAR + 1, last + 1):
        frame = system.dream(memory, walk.action(step), walk.index_B, step)
        memory = system.onward(memory, walk.action(step), frame)
        spoiled_B, clean_B = ((f - walk.target(step)).abs().flatten(1).mean(1) for f in (memory.last, clean[step]))
        back_B = torch.where((spoiled_B <= 1.1 * clean_B) & back_B.isinf(), step - NEAR, back_B)
    done_B = back_B.isfinite()
    frames = back_B[done_B].median().item() if done_B.any() else None
    return {"share": done_B.float().mean().item(), "frames": frames}  # type: ignore[dict-item]


def _spoiled(frame_BCHW: Tensor) -> Tensor:
    """A tenth of the patches from another window's picture, always the same ones."""
    height, width = frame_BCHW.shape[-2:]
    number_HW = torch.arange(height, device=frame_BCHW.device)[:, None] // PATCH * 31 + (
        torch.arange(width, device=frame_BCHW.device)[None] // PATCH * 17
    )
    return torch.where(number_HW % 10 < 10 * SPOILED, frame_BCHW.roll(1, 0), frame_BCHW)


def frames_per_second(system: Emulator, walk: Walk, num: int = 30) -> float:
    """Of one walk, the memory's upkeep included."""
    one = Walk(walk.frames_BTCHW[:1], walk.action_BTA[:1], walk.start_B[:1], walk.before)
    memory, action, index = one.memory(system), one.action(1), one.index_B
    cuda = walk.action_BTA.is_cuda
    return round(
        controls.speed(
            lambda: system.onward(memory, action, system.dream(memory, action, index, 1)),
            num,
            torch.cuda.synchronize if cuda else lambda: None,
        ),
        1,
    )


# ---- words ---------------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """The battery for a person."""
    lines = [f"{found['num_windows']} windows of the {found['part']} part, free-running with their true controls; dB."]
    lines += ["", "| frames | free | forced | copy-last | mean frame | fade | over fade | 1-SSIM | of fade | sharpness | light |"]
    lines += ["|---:|" + "---:|" * 10]
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
        f"With the controls of others {found['actions']['1']:.2f} dB are lost at 1 frame, {found['actions']['4']:.2f} at 4; "
        f"another control changes the picture {found['action_swap']:.3f} as much as another memory.",
        f"Standing still for {still['frames']} frames: level moves {still['level']:.3f}, contrast {still['contrast']:.3f}, "
        f"sharpness {still['sharpness'][0]:.2f} to {still['sharpness'][1]:.2f} of the first; "
        f"{still['share_of_windows']:.0%} of walks leave the bounds: {'DRIFT' if still['alarm'] else 'no alarm'}.",
        f"Steps 1 and 8: true memory {gap['true'][0]:.2f}, {gap['true'][-1]:.2f} dB; own newest frame "
        f"{gap['newest_own'][0]:.2f}, {gap['newest_own'][-1]:.2f}; all own {gap['all_own'][0]:.2f}, {gap['all_own'][-1]:.2f}.",
    ]
    if around:
        after = ", ".join(f"{v:.2f}" for v in around["psnr_after"])
        lines.append(
            f"After 1, 2, 3 full turns {after} dB to the first frame; half a turn away {around['psnr_of_half_a_circle']:.2f}."
        )
    if found["lens"]:
        lens = found["lens"]
        lines.append(
            f"The lens as it was learned: {lens['across']:.0f} degrees across, {lens['down']:.0f} down; "
            f"{round(lens['shifts'], 2) + 0.0:.0%} of looking up or down shifts the picture, the rest turns it."
        )
    if found["recovery"]:
        lines.append(f"Spoiled patches: {found['recovery']['share']:.0%} recovered within {RECOVERS} frames.")
    told = ", ".join(f"{level}: {value:.2f}" for level, value in found["levels"].items())
    lines.append(f"At 16 frames by the level of noise that the network is told: {told} dB. {found['frames_per_s']:.0f} frames/s.")
    return lines
