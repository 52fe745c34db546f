"""Denoising curves: PSNR by number of steps and noise level, in and out of distribution, with baselines.

Shape suffixes: B batch, N images, C channels, H W pixels, K taps of a blur.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.data import grids
from seedbed.data.image_source import ImageSource, to_bytes
from seedbed.errors import UserError
from seedbed.nn import eagerly
from seedbed.train.engine import EvalEngine
from seedbed.train.system import Request, Sample

if TYPE_CHECKING:
    from seedbed.recipes.ebt.denoise.system import Denoiser

STEPS = [1, 2, 3, 4, 6, 8, 15, 30]
SIGMAS = (0.05, 0.1, 0.15, 0.2, 0.3)
BLURS = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.4, 2.0)


def write_curves(system: Denoiser, request: Request) -> Sample:
    """The curves as a table, a picture and JSON."""
    found = curves(system)
    text = table(found)
    if request.write:
        request.write(text + "\n")
    request.folder.mkdir(parents=True, exist_ok=True)
    numbers = request.folder / "denoise.json"
    numbers.write_text(json.dumps(found, indent=1))
    return Sample(text=text, files=(draw(found, request.folder / "denoise.png"), numbers))


@torch.no_grad()
def curves(system: Denoiser) -> dict[str, Any]:
    """By part of the data and level of noise: PSNR after each number of steps, of the identity and of the best blur."""
    parts = {"held out": system.data.valid, "never seen pairs": system.data.test}
    with eagerly():
        found = {name: part_curves(system, source) for name, source in parts.items() if isinstance(source, ImageSource)}
    settings = {"kind": system.config.model.kind, "observe": system.config.model.observe, "noise": system.noise}
    return {**settings, "trained_level": system.level, "trained_steps": system.config.model.steps, "steps": STEPS, "parts": found}


def part_curves(system: Denoiser, source: ImageSource) -> dict[str, Any]:
    found, engine = {}, EvalEngine(system, system.config, next(system.parameters()).device)
    for level in sorted({*SIGMAS, *system.levels().values()}):
        by_step = system.score(source, level, STEPS, engine)
        row: dict[str, Any] = {name: [one[name] for one in by_step] for name in ("psnr", "pooled")}
        row["identity"] = _baseline(system, source, level, None)
        # The width is chosen on training images: a baseline, not an oracle.
        width = max(BLURS, key=lambda width: _baseline(system, system.data.train, level, width))
        found[f"{level:g}"] = {**row, "blur": _baseline(system, source, level, width)}
    return found


def _baseline(system: Denoiser, source: ImageSource, level: float, width: float | None) -> float:
    total, num = 0.0, 0
    for image_BCHW, noisy_BCHW in system.pairs(source, level):
        estimate = noisy_BCHW if width is None else blur(noisy_BCHW, width)
        total += psnr(squared_errors(estimate, image_BCHW)).sum().item()
        num += len(image_BCHW)
    return total / num


def squared_errors(estimate_BCHW: Tensor, image_BCHW: Tensor) -> Tensor:
    """(B,) mean squared error of each image on [0, 1], after clipping, in float64."""
    return (estimate_BCHW.double().clamp(-1, 1) - image_BCHW.double()).div(2).square().mean((1, 2, 3))


def psnr(square: Tensor) -> Tensor:
    """Decibels of mean squared errors on [0, 1]; a perfect image counts as 100."""
    return -10.0 * square.clamp_min(1e-10).log10()


def blur(image_BCHW: Tensor, width: float) -> Tensor:
    """A Gaussian of this standard deviation in pixels, edges continued."""
    reach = max(1, round(3 * width))
    at_K = torch.arange(-reach, reach + 1, device=image_BCHW.device, dtype=image_BCHW.dtype)
    taps_K = torch.exp(-0.5 * (at_K / width).square())
    taps_K = taps_K / taps_K.sum()
    x = F.pad(image_BCHW, (reach,) * 4, mode="replicate")
    channels = x.shape[1]
    x = F.conv2d(x, taps_K.view(1, 1, 1, -1).expand(channels, 1, 1, -1), groups=channels)
    return F.conv2d(x, taps_K.view(1, 1, -1, 1).expand(channels, 1, -1, 1), groups=channels)


def table(found: dict[str, Any]) -> str:
    """PSNR in decibels, the mean over images; the trained level and depth are marked."""
    lines = [f"{found['kind']}, observe {found['observe']}, trained at {found['noise']} {found['trained_level']:g}"]
    head = ["level", "identity", "blur", *(f"{'*' if k == found['trained_steps'] else ''}k={k}" for k in found["steps"])]
    for name, levels in found["parts"].items():
        lines += [f"{name}: PSNR in dB after k steps", "  ".join(f"{word:>8}" for word in head)]
        for level, one in levels.items():
            mark = "*" if float(level) == found["trained_level"] else ""
            numbers = [one["identity"], one["blur"], *one["psnr"]]
            lines.append("  ".join([f"{mark + level:>8}", *(f"{value:>8.2f}" for value in numbers)]))
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> Path:
    """The curves as one picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found["parts"]), 4), layout="constrained")
    axes = figure.subplots(1, len(found["parts"]), squeeze=False)[0]
    for axis, (name, levels) in zip(axes, found["parts"].items(), strict=True):
        for level, one in levels.items():
            (line,) = axis.plot(found["steps"], one["psnr"], marker="o", label=f"{found['noise']} {level}")
            axis.axhline(one["identity"], color=line.get_color(), linestyle=":")
        axis.set(title=name, xlabel="steps", ylabel="PSNR (dB), dotted: the noisy image", xscale="log")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path


@torch.no_grad()
def show(system: Denoiser, request: Request, num: int | None) -> Sample:
    """Clean, noisy and denoised images at both levels, as one PNG."""
    num_held_out = system.data.valid.num_items
    if num and num > num_held_out:
        raise UserError(f"--num {num} is more than the {num_held_out} held-out images")
    num = num or min(8, num_held_out)
    steps, panels, words = system.config.model.steps, [], []
    with eagerly():
        for name, level in system.levels().items():
            image_BCHW, noisy_BCHW = (x[:num] for x in next(system.pairs(system.data.valid, level)))
            cleaned_BCHW = list(system.estimates(noisy_BCHW, steps))[-1]
            rows = {"clean": image_BCHW, "noisy": noisy_BCHW, "cleaned": cleaned_BCHW}
            panels += [(f"{row} {level:g}", grids.tile(to_bytes(x[:, :3]).cpu().numpy(), 2)) for row, x in rows.items()]
            before, after = (psnr(squared_errors(x, image_BCHW)).mean().item() for x in (noisy_BCHW, cleaned_BCHW))
            place = {"in": "in distribution", "out": "out of distribution"}[name]
            words.append(f"{place}, {system.noise} {level:g}: {before:.2f} -> {after:.2f} dB")
    text = "\n".join(words)
    if request.write:
        request.write(text + "\n")
    return Sample(text=text, files=(grids.save(grids.beside(panels), request.folder / "cleaned.png"),))
