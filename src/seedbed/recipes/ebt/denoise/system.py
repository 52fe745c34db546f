"""Denoising of images by gradient descent on an energy, and the regressor that does it in one pass.

Images lie in [-1, 1]; PSNR is that of [0, 1] after clipping.
Shape suffixes: B batch, N images, C channels, H W pixels, K taps of a blur.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from seedbed.config import Config
from seedbed.data import grids
from seedbed.data.image_source import ImageData, ImageSource, blur, to_bytes
from seedbed.errors import UserError
from seedbed.nn import eagerly, rng
from seedbed.nn.patchify import depatchify, patchify
from seedbed.recipes.ebt.data import NUM_EVALUATED
from seedbed.recipes.ebt.denoise.model import ImageEnergy, Regressor, build_model
from seedbed.recipes.ebt.optimize import log_step_size, no_onnx_network, step_alarms
from seedbed.train.engine import EvalEngine
from seedbed.train.probe import Probe
from seedbed.train.stop_gradient import held_loss, stop_gradient
from seedbed.train.system import Batch, NoOptions, Request, Sample, System, option
from seedbed.train.watch import Alarm

Estimates = Callable[[Tensor, int], Iterable[Tensor]]  # of noisy images, after 1, 2, 3... steps

# Streams of random numbers; the images' own have 301 and 302.
_NOISE, _EVALUATION, _SIZES = range(311, 314)
# Images of an evaluation that are scored at once.
EVAL_BATCH = {"cuda": 512, "mps": 128, "cpu": 64}
CHAIN, FIRST_BETA, LAST_BETA = 1000, 1e-4, 0.02  # of a diffusion
OUT_OF_DISTRIBUTION = 2.0  # times the level of training
METRICS = ("gap", "gap_negative", "energy_first", "energy_last", "move_rms")

STEPS = [1, 2, 3, 4, 6, 8, 15, 30]
SIGMAS = (0.05, 0.1, 0.15, 0.2, 0.3)
BLURS = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.4, 2.0)


@dataclass(frozen=True)
class SampleOptions:
    """Options of `seedbed sample` on images."""

    num: int | None = option(None, "number of images (8)", low=1)
    examine: int | None = option(None, "write the curves over steps and noise levels", low=1, needs_data=True)


class Denoiser(System):
    """Base of both systems: noisy images in, estimates of the clean ones out, after any number of steps."""

    auto_compile = "whole"
    sample_options = SampleOptions
    higher_is_better = ("psnr_*", "pooled_*")
    curve_options = NoOptions
    model: ImageEnergy | Regressor

    def __init__(self, config: Config, data: ImageData) -> None:
        super().__init__()
        self.config, self.data = config, data
        self.noise, self.level = config.model.noise, config.model.level
        self.model = build_model(config.model, data.shape, config.seed)

    def noisy(self, batch: Batch) -> Tensor:
        """The batch with the noise of its sample counters."""
        return add_noise(batch["image"], batch["index"], self.config.seed, self.noise, self.level)

    def estimates(self, noisy_BCHW: Tensor, num_steps: int) -> Iterator[Tensor]:
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, source: ImageSource, engine: EvalEngine) -> dict[str, float]:
        """After as many steps as were trained: the loss, and PSNR at the level of training and at twice that."""
        steps = self.config.model.steps
        with eagerly():  # a shape that is used a few times is not worth compiling
            found = {name: self.score(source, level, [steps], engine)[0] for name, level in self.levels().items()}
        # Not called loss: training draws other noise for the same images.
        numbers = {"error": found["in"]["loss"]}
        for name, one in found.items():
            numbers |= {f"psnr_{name}": one["psnr"], f"pooled_{name}": one["pooled"]}
        return numbers

    def levels(self) -> dict[str, float]:
        """The noise in distribution, and out of it."""
        return {"in": self.level, "out": min(OUT_OF_DISTRIBUTION * self.level, 0.99)}

    @torch.no_grad()
    def score(
        self, source: ImageSource, level: float, steps: list[int], engine: EvalEngine, estimates: Estimates | None = None
    ) -> list[dict[str, float]]:
        """Loss and PSNR after each of these numbers of steps (ascending), of the system's estimates or of a baseline's; images
        and noises do not depend on the batch."""
        rows_N, estimates = source.spread(NUM_EVALUATED), estimates or self.estimates
        totals = torch.zeros(len(steps), 3, dtype=torch.float64)
        for image_BCHW, noisy_BCHW in engine.ranks.shard_of(self.pairs(source, level)):
            kept = [z_BCHW for k, z_BCHW in enumerate(estimates(noisy_BCHW, steps[-1]), 1) if k in steps]
            totals += torch.stack([measures(z_BCHW, image_BCHW) for z_BCHW in kept])
        totals = engine.all_reduce_sum(totals)
        found = []
        for loss, mean_psnr, square in (totals / len(rows_N)).tolist():
            # The PSNR of the mean error differs from the mean PSNR, so both are named.
            found.append({"loss": loss, "psnr": mean_psnr, "pooled": psnr(torch.tensor(square)).item()})
        return found

    def pairs(self, source: ImageSource, level: float) -> Iterator[tuple[Tensor, Tensor]]:
        device, rows_N = next(self.parameters()).device, source.spread(NUM_EVALUATED)
        for first in range(0, len(rows_N), EVAL_BATCH[device.type]):
            rows_B = rows_N[first : first + EVAL_BATCH[device.type]]
            image_BCHW = source.pick(rows_B)[0].to(device)
            index_B = torch.arange(first, first + len(rows_B), device=device)
            yield image_BCHW, add_noise(image_BCHW, index_B, 0, self.noise, level, evaluation=True)

    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        """Clean, noisy and denoised images side by side; `--examine N` writes the curves over steps and levels."""
        options = request.read(SampleOptions)
        return write_curves(self, request) if options.examine else show(self, request, options.num)

    def inference_curve(self, request: Request, engine: EvalEngine) -> Sample:
        """PSNR by number of steps, in and out of distribution, with baselines."""
        return write_curves(self, request)

    def probe(self, batch: Batch) -> Probe:
        return build_probe(self, batch)

    def compile_units(self) -> Iterator[nn.Module]:
        yield self.model


class RegressSystem(Denoiser):
    """The baseline: one pass to the clean image."""

    model: Regressor

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        noisy_BCHW = self.noisy(batch)
        first = smooth_l1_loss(noisy_BCHW, batch["image"])
        return smooth_l1_loss(self.model(noisy_BCHW), batch["image"]), {"loss_identity": first}

    def estimates(self, noisy_BCHW: Tensor, num_steps: int) -> Iterator[Tensor]:
        for _ in range(num_steps):
            noisy_BCHW = self.model(noisy_BCHW)
            yield noisy_BCHW

    def flops_per_item(self) -> float:
        """An item is an image; pixels have no gradient."""
        model = self.model
        inner = model.layer_flops() + model.attention_flops() + model.end_flops(model.head)
        return 3.0 * inner + 2.0 * model.end_flops(model.enter)


class EnergyDenoiser(Denoiser):
    """An energy over images, trained by differentiating through its optimisation steps."""

    model: ImageEnergy
    onnx_network = no_onnx_network

    def __init__(self, config: Config, data: ImageData) -> None:
        super().__init__(config, data)
        self.log_alpha = log_step_size(config.model.alpha, config.model.learn_alpha)

    def variant(self, step: int, num_steps: int) -> bool:
        """Whether this step is logged and needs the energy after the last step."""
        return (step + 1) % self.config.every.log == 0

    def alarms(self, measured: dict[str, float], progress: float) -> list[Alarm]:
        """The alarms that do not depend on logits."""
        known = {name: measured[name] for name in ("gap_negative", "alpha")}
        return step_alarms(known, progress, self.config.model.alpha) if progress > self.config.schedule.warmup else []

    def alpha(self) -> Tensor:
        if self.log_alpha is None:
            return torch.full((), self.config.model.alpha, device=self.model.constant.device)
        return self.log_alpha.exp()

    def sizes(self, alpha: Tensor, index_B: Tensor) -> Tensor:
        """The step size of every image; in training drawn by its counter where the config randomises it."""
        spread = self.config.model.random_alpha
        if spread == 1.0 or not self.training:
            return alpha.expand(len(index_B))
        u_B = rng.uniform(rng.keys(self.config.seed, index_B, _SIZES), 1)[:, 0].to(alpha.dtype)
        return alpha * (1.0 / spread + u_B * (spread - 1.0 / spread))

    def optimize(self, noisy_BCHW: Tensor, size: Tensor, num_steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each estimate, its change, and the energy before it."""
        z_BCHW = noisy_BCHW
        for _ in range(num_steps):
            # Gradients reach the weights through each step alone, which keeps them stable.
            z_BCHW = stop_gradient(z_BCHW)
            grad_BCHW, energy_B = self.model(z_BCHW, noisy_BCHW)
            moved_BCHW = size * grad_BCHW
            z_BCHW = z_BCHW - moved_BCHW
            yield z_BCHW, moved_BCHW, energy_B

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        image_BCHW, noisy_BCHW = batch["image"], self.noisy(batch)
        alpha = self.alpha()
        size_B111 = self.sizes(alpha, batch["index"])[:, None, None, None]
        taken = list(self.optimize(noisy_BCHW, size_B111, self.config.model.steps))
        losses = [smooth_l1_loss(z_BCHW, image_BCHW) for z_BCHW, _, _ in taken]
        missing = torch.full_like(losses[0].detach(), float("nan"))
        facts = self._energies(taken, noisy_BCHW) if engine.variant is True else {name: missing for name in METRICS}
        steps = {f"loss_{k}": loss.detach() for k, loss in enumerate(losses, 1)}
        known = {"loss_identity": smooth_l1_loss(noisy_BCHW, image_BCHW), "alpha": alpha.detach()}
        return torch.stack(losses).mean(), {**known, **steps, **facts}

    @torch.no_grad()
    def _energies(self, taken: list[tuple[Tensor, Tensor, Tensor]], noisy_BCHW: Tensor) -> dict[str, Tensor]:
        """The decrease of the energy from the first estimate to the last, and the share of images on which it rose."""
        (_, _, first_B), (z_BCHW, moved_BCHW, _) = taken[0], taken[-1]
        last_B = self.model.energy(z_BCHW, noisy_BCHW)
        gap_B, move = first_B - last_B, moved_BCHW.square().mean().sqrt()
        values = (gap_B.mean(), (gap_B < 0).float().mean(), first_B.mean(), last_B.mean(), move)
        return dict(zip(METRICS, values, strict=True))

    def estimates(self, noisy_BCHW: Tensor, num_steps: int) -> Iterator[Tensor]:
        return (z_BCHW for z_BCHW, _, _ in self.optimize(noisy_BCHW, self.alpha(), num_steps))

    def describe(self) -> dict[str, Any]:
        config = self.config.model
        learned = ", learned" if config.learn_alpha else ""
        settings = f"alpha {config.alpha:g}{learned}, observe {config.observe}"
        return {"optimisation": f"{config.steps} steps from the noisy image, {settings}"}

    def flops_per_item(self) -> float:
        """A step has a forward pass, its gradient, and a backward pass through both: six products of a layer. Attention
        multiplies two tensors that both have gradients: nine. Pixels need none."""
        model = self.model
        ends = 5.0 * model.end_flops(model.enter) + 6.0 * model.end_flops(model.head)
        return self.config.model.steps * (6.0 * model.layer_flops() + 9.0 * model.attention_flops() + ends)


@functools.cache
def noise_scales(noise: str, level: float) -> tuple[float, float]:
    """The factors of the image and of the normal noise, for images in [-1, 1]."""
    if noise == "sigma":
        return 1.0, 2.0 * level
    betas = (FIRST_BETA + (LAST_BETA - FIRST_BETA) * n / (CHAIN - 1) for n in range(round(CHAIN * level)))
    kept = math.prod(1.0 - beta for beta in betas)
    return math.sqrt(kept), math.sqrt(1.0 - kept)


def add_noise(image_BCHW: Tensor, index_B: Tensor, seed: int, noise: str, level: float, evaluation: bool = False) -> Tensor:
    """The image with the noise of its sample counter; evaluation has its own noise, the same at every level."""
    keys = rng.keys(seed, index_B, _EVALUATION if evaluation else _NOISE)
    normal_BCHW = rng.normal(keys, image_BCHW[0].numel()).view_as(image_BCHW)
    signal, spread = noise_scales(noise, level)
    return signal * image_BCHW + spread * normal_BCHW


def measures(estimate_BCHW: Tensor, image_BCHW: Tensor) -> Tensor:
    """Sums over images of the loss, of PSNR, and of the squared error on [0, 1] after clipping; in float64."""
    loss_B = smooth_l1_loss(estimate_BCHW, image_BCHW, reduction="none").mean((1, 2, 3))
    square_B = squared_errors(estimate_BCHW, image_BCHW)
    return torch.stack((loss_B.double().sum(), psnr(square_B).sum(), square_B.sum())).cpu()


def build_probe(system: Denoiser, batch: Batch) -> Probe:
    """Noisy patches in, clean patches out: an estimate after each of the trained steps."""
    patch, steps = system.config.model.patch, system.config.model.steps
    _, height, width = system.data.shape

    def image(x_BNK: Tensor) -> Tensor:
        return depatchify(x_BNK, patch, height, width)

    def error_of_input(b: Batch) -> float:
        return smooth_l1_loss(image(b["patches"]), image(b["clean"])).item()

    return Probe(
        batch={"patches": patchify(system.noisy(batch), patch), "clean": patchify(batch["image"], patch)},
        predict=lambda b: torch.stack([patchify(z, patch) for z in system.estimates(image(b["patches"]), steps)], 2),
        objective=lambda y_BNSK, b: torch.stack([smooth_l1_loss(image(y), image(b["clean"])) for y in y_BNSK.unbind(2)]).mean(),
        inputs="patches",
        targets="clean",
        ranges={"image": (-1.0, 1.0), "class": (0, system.data.num_classes - 1)},
        oracle=lambda b: b["clean"][:, :, None].expand(-1, -1, steps, -1),
        held=lambda: held_loss(system, batch),
        lower_bound=0.0,
        order="full",
        positions="absolute",
        at_init=error_of_input,
        baselines=lambda b: {"the noisy image itself": error_of_input(b)},
    )


def write_curves(system: Denoiser, request: Request) -> Sample:
    found = curves(system)
    text = table(found)
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

    def blurred(source: ImageSource, level: float, width: float) -> float:
        return system.score(source, level, [1], engine, lambda noisy, _: [blur(noisy, width)])[0]["psnr"]

    for level in sorted({*SIGMAS, *system.levels().values()}):
        by_step = system.score(source, level, STEPS, engine)
        row: dict[str, Any] = {name: [one[name] for one in by_step] for name in ("psnr", "pooled")}
        row["identity"] = system.score(source, level, [1], engine, lambda noisy, _: [noisy])[0]["psnr"]
        # The width is chosen on training images: a baseline, not an oracle.
        width = max(BLURS, key=lambda width: blurred(system.data.train, level, width))
        found[f"{level:g}"] = {**row, "blur": blurred(source, level, width)}
    return found


def squared_errors(estimate_BCHW: Tensor, image_BCHW: Tensor) -> Tensor:
    """(B,) mean squared error of each image on [0, 1], after clipping, in float64."""
    return (estimate_BCHW.double().clamp(-1, 1) - image_BCHW.double()).div(2).square().mean((1, 2, 3))


def psnr(square: Tensor) -> Tensor:
    """Decibels of mean squared errors on [0, 1]; a perfect image counts as 100."""
    return -10.0 * square.clamp_min(1e-10).log10()


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
    return Sample(text=text, files=(grids.save(grids.beside(panels), request.folder / "cleaned.png"),))
