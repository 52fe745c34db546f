"""Denoising of images by gradient descent on an energy, and the regressor that does it in one pass.

Images lie in [-1, 1]; PSNR is that of [0, 1] after clipping. Shape suffixes: B batch, N images, C channels, H W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from seedbed.config import Config
from seedbed.data.image_source import ImageData, ImageSource
from seedbed.nn import eagerly, rng
from seedbed.nn.patchify import depatchify, patchify
from seedbed.recipes.ebt.alarms import optimization_alarms
from seedbed.recipes.ebt.denoise.curves import psnr, show, squared_errors, write_curves
from seedbed.recipes.ebt.denoise.data import add_noise
from seedbed.recipes.ebt.denoise.model import ImageEnergy, Regressor, build_model
from seedbed.recipes.ebt.optimize import log_step_size
from seedbed.train.engine import EvalEngine
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, NoOptions, Request, Sample, System, option, own_share
from seedbed.train.watch import Alarm

_SIZES = 313
# Held-out images of an evaluation, and how many of them at once.
NUM_EVALUATED = 1024
EVAL_BATCH = {"cuda": 512, "mps": 128, "cpu": 64}
OUT_OF_DISTRIBUTION = 2.0  # times the level of training
METRICS = ("gap", "gap_negative", "energy_first", "energy_last", "move_rms")


@dataclass(frozen=True)
class SampleOptions:
    """Options of `seedbed sample` on images."""

    num: int | None = option(None, "number of images (8)", low=1)
    examine: int | None = option(None, "write the curves over steps and noise levels", low=1, needs_data=True)


class Denoiser(System):
    """Base of both systems: noisy images in, estimates of the clean ones out, after any number of steps."""

    auto_compile = "whole"
    sample_options = SampleOptions
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
        """The estimate after each of `num_steps` steps."""
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
    def score(self, source: ImageSource, level: float, steps: list[int], engine: EvalEngine) -> list[dict[str, float]]:
        """Loss and PSNR after each of these numbers of steps (ascending); images and noises do not depend on the batch."""
        rows_N = source.spread(NUM_EVALUATED)
        totals = torch.zeros(len(steps), 3, dtype=torch.float64)
        pairs = self.pairs(source, level)
        for image_BCHW, noisy_BCHW in own_share(pairs, engine):
            kept = [z_BCHW for k, z_BCHW in enumerate(self.estimates(noisy_BCHW, steps[-1]), 1) if k in steps]
            totals += torch.stack([measures(z_BCHW, image_BCHW) for z_BCHW in kept])
        totals = engine.all_reduce_sum(totals)
        found = []
        for loss, mean_psnr, square in (totals / len(rows_N)).tolist():
            # The PSNR of the mean error differs from the mean PSNR, so both are named.
            found.append({"loss": loss, "psnr": mean_psnr, "pooled": psnr(torch.tensor(square)).item()})
        return found

    def pairs(self, source: ImageSource, level: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Clean and noisy images of an evaluation."""
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

    def __init__(self, config: Config, data: ImageData) -> None:
        super().__init__(config, data)
        self.log_alpha = log_step_size(config.model.alpha, config.model.learn_alpha)

    def variant(self, step: int, num_steps: int) -> bool:
        """Whether this step is logged and needs the energy after the last step."""
        return (step + 1) % self.config.every.log == 0

    def alarms(self, measured: dict[str, float], progress: float) -> list[Alarm]:
        """The alarms that do not depend on logits."""
        known = {name: measured[name] for name in ("gap_negative", "alpha")}
        return optimization_alarms(known, self.config.model.alpha) if progress > self.config.schedule.warmup else []

    def alpha(self) -> Tensor:
        if self.log_alpha is None:
            return torch.full((), self.config.model.alpha, device=self.model.constant.device)
        return self.log_alpha.exp()

    def sizes(self, alpha: Tensor, index_B: Tensor) -> Tensor:
        """The step size of every image, drawn by its counter where the config randomises it."""
        spread = self.config.model.random_alpha
        if spread == 1.0:
            return alpha.expand(len(index_B))
        u_B = rng.uniform(rng.keys(self.config.seed, index_B, _SIZES), 1)[:, 0].to(alpha.dtype)
        return alpha * (1.0 / spread + u_B * (spread - 1.0 / spread))

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        image_BCHW, noisy_BCHW = batch["image"], self.noisy(batch)
        alpha = self.alpha()
        size_B111 = self.sizes(alpha, batch["index"])[:, None, None, None]
        z_BCHW, losses, first, move = noisy_BCHW, [], None, noisy_BCHW.new_zeros(())
        for _ in range(self.config.model.steps):
            # Detached: gradients reach the weights through each step alone, which keeps them stable.
            grad_BCHW, energy_B = self.model(z_BCHW.detach(), noisy_BCHW)
            first = energy_B if first is None else first
            moved_BCHW = size_B111 * grad_BCHW
            move = moved_BCHW.detach().square().mean().sqrt()
            z_BCHW = z_BCHW.detach() - moved_BCHW
            losses.append(smooth_l1_loss(z_BCHW, image_BCHW))
        assert first is not None
        missing = torch.full_like(losses[0].detach(), float("nan"))
        energies = (first.detach(), z_BCHW.detach(), noisy_BCHW, move)
        facts = self._energies(*energies) if engine.variant is True else {name: missing for name in METRICS}
        steps = {f"loss_{k}": loss.detach() for k, loss in enumerate(losses, 1)}
        known = {"loss_identity": smooth_l1_loss(noisy_BCHW, image_BCHW), "alpha": alpha.detach()}
        return torch.stack(losses).mean(), {**known, **steps, **facts}

    @torch.no_grad()
    def _energies(self, first_B: Tensor, z_BCHW: Tensor, noisy_BCHW: Tensor, move: Tensor) -> dict[str, Tensor]:
        """The decrease of the energy from the first estimate to the last, and the share of images on which it rose."""
        last_B = self.model.energy(z_BCHW, noisy_BCHW)
        gap_B = first_B - last_B
        values = (gap_B.mean(), (gap_B < 0).float().mean(), first_B.mean(), last_B.mean(), move)
        return dict(zip(METRICS, values, strict=True))

    def estimates(self, noisy_BCHW: Tensor, num_steps: int) -> Iterator[Tensor]:
        z_BCHW, alpha = noisy_BCHW, self.alpha().detach()
        for _ in range(num_steps):
            z_BCHW = z_BCHW - alpha * self.model(z_BCHW, noisy_BCHW)[0]
            yield z_BCHW

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


def measures(estimate_BCHW: Tensor, image_BCHW: Tensor) -> Tensor:
    """Sums over images of the loss, of PSNR, and of the squared error on [0, 1] after clipping; in float64."""
    loss_B = smooth_l1_loss(estimate_BCHW, image_BCHW, reduction="none").mean((1, 2, 3))
    square_B = squared_errors(estimate_BCHW, image_BCHW)
    return torch.stack((loss_B.double().sum(), psnr(square_B).sum(), square_B.sum())).cpu()


def build_probe(system: Denoiser, batch: Batch) -> Probe:
    """Noisy patches in, clean patches out, after the trained number of steps."""
    patch, steps = system.config.model.patch, system.config.model.steps
    _, height, width = system.data.shape

    def image(x_BNK: Tensor) -> Tensor:
        return depatchify(x_BNK, patch, height, width)

    def error_of_input(b: Batch) -> float:
        return smooth_l1_loss(image(b["patches"]), image(b["clean"])).item()

    return Probe(
        batch={"patches": patchify(system.noisy(batch), patch), "clean": patchify(batch["image"], patch)},
        predict=lambda b: patchify(list(system.estimates(image(b["patches"]), steps))[-1], patch),
        objective=lambda y_BNK, b: smooth_l1_loss(image(y_BNK), image(b["clean"])),
        inputs="patches",
        targets="clean",
        ranges={"image": (-1.0, 1.0), "class": (0, system.data.num_classes - 1)},
        oracle=lambda b: b["clean"],
        lower_bound=0.0,
        order="full",
        positions="absolute",
        at_init=error_of_input,
        baselines=lambda b: {"the noisy image itself": error_of_input(b)},
    )
