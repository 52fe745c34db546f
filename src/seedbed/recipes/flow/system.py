"""The flow system: the objective, evaluation on a fixed grid, and samples.

B batch, N images, C channels, H W pixels.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.image_source import ImageData, ImageSource
from seedbed.nn import eagerly
from seedbed.nn.layers import attention_scope, choose_attention
from seedbed.recipes.flow import objective
from seedbed.recipes.flow.data import TimeDistribution, draw_noise, drop_class, flow_batch
from seedbed.recipes.flow.model import PositionTables, build_model
from seedbed.recipes.flow.probe import build_probe
from seedbed.recipes.flow.show import SampleOptions, show
from seedbed.train.engine import DTYPES, EvalEngine
from seedbed.train.export_onnx import Function, OnnxNetwork
from seedbed.train.system import Batch, Request, Sample, System

NUM_BINS = 10
# Decay of the moving average of each bin: about the last hundred steps count.
BIN_DECAY = 0.99
# The fixed grid of evaluation: held-out images, and times of each image with independent noise.
NUM_EVALUATED, NUM_TIMES = 2048, 8
# Limit of an evaluation's FLOPs, seconds of a fast GPU: fewer large images.
MAX_FLOPS = 2e15
EVAL_BATCH = {"cuda": 1024, "mps": 256, "cpu": 256}
# Counters of evaluation's noise, above those of training and sampling.
FIRST_EVALUATED = 1 << 41


class Noiser(nn.Module):
    """Noise, time and class dropout of a batch; a module, so that it compiles into one pass over the images."""

    def __init__(self, seed: int, times: TimeDistribution, drop: float, null_class: int) -> None:
        super().__init__()
        self.seed, self.times, self.drop, self.null_class = seed, times, drop, null_class

    def forward(self, image_BCHW: Tensor, class_B: Tensor, index_B: Tensor) -> Batch:
        seen = flow_batch(image_BCHW, class_B, index_B, self.seed, self.times)
        if self.training and self.drop:
            seen["class"] = drop_class(class_B, index_B, self.seed, self.drop, self.null_class)
        return seen


class Flow(System):
    """A transformer that learns the velocity from noise to images."""

    auto_compile = "whole"
    sample_options = SampleOptions
    probe = build_probe

    def __init__(self, config: Config, data: ImageData) -> None:
        super().__init__()
        self.config, self.data = config, data
        shape = config.model
        self.times = TimeDistribution(shape.t_distribution, shape.t_mean, shape.t_std, config.batch if shape.stratified else 0)
        self.noiser = Noiser(config.seed, self.times, shape.drop, data.num_classes)
        self.model = build_model(shape, data.shape, data.num_classes, config.seed)
        self.register_buffer("bins", torch.zeros(2, NUM_BINS))  # decayed sums of losses and of counts, by time
        self.bins: Tensor
        self._baseline_losses: dict[str, float] = {}

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        seen = self.add_noise(batch)
        field_BCHW = self.run(seen["input"], seen["time"], seen["class"])
        error_B = self.errors(field_BCHW, seen)
        return error_B.mean(), self._measure(error_B.detach(), seen["time"], engine) if self.training else {}

    def add_noise(self, batch: Batch) -> Batch:
        """The model's inputs for a batch, and the target velocity; classes are dropped in training only."""
        return self.noiser(batch["image"], batch["class"], batch["index"])

    def run(self, x_BCHW: Tensor, time_B: Tensor, class_B: Tensor, tables: PositionTables | None = None) -> Tensor:
        with attention_scope(self.kernels()):
            return self.model(x_BCHW, time_B, class_B, tables or self.model.position_tables())

    def errors(self, field_BCHW: Tensor, seen: Batch) -> Tensor:
        return objective.errors(field_BCHW, seen["input"], seen["time"], seen["velocity"], self.config.model.predict)

    @torch.no_grad()
    def _measure(self, error_B: Tensor, time_B: Tensor, engine: EvalEngine) -> dict[str, Tensor]:
        """The loss by time, as a moving average over steps: one step has too few samples for ten bins."""
        bin_B = (time_B * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        member_BT = (bin_B[:, None] == torch.arange(NUM_BINS, device=bin_B.device)).float()
        both_2B = torch.stack((error_B.float(), torch.ones_like(error_B, dtype=torch.float32)))
        self.bins.mul_(BIN_DECAY).add_(engine.all_reduce_sum(both_2B @ member_BT))
        means = self.bins[0] / self.bins[1].clamp_min(1e-6)
        return {f"loss_t{k}": means[k] for k in range(NUM_BINS)}

    def kernels(self) -> tuple:
        """The attention kernels for a training step, fastest first; timed once, on CUDA only."""
        config, shape, model = self.config, self.config.model, self.model
        tokens = model.num_patches + model.num_context
        size = (config.micro_batch, shape.heads, tokens, shape.width // shape.heads)
        device = model.enter.weight.device
        return choose_attention(size, DTYPES[config.precision], device, causal=False, only=config.attention)

    def compile_units(self) -> Iterator[nn.Module]:
        yield from self.model.blocks

    def shard_units(self) -> Iterator[nn.Module]:
        yield from self.model.blocks

    def flops_per_item(self) -> float:
        """An item is an image."""
        return self.model.flops_per_image()

    @torch.no_grad()
    def evaluate(self, source: ImageSource, engine: EvalEngine) -> dict[str, float]:
        """The velocity error on held-out images at fixed times and noises; independent of batch size and prediction target."""
        affordable = int(MAX_FLOPS / (NUM_TIMES * self.model.forward_flops()))
        device, rows_N = self.model.enter.weight.device, source.spread(max(1, min(NUM_EVALUATED, affordable)))
        total_T, size = torch.zeros(NUM_TIMES, dtype=torch.float64), max(1, EVAL_BATCH[device.type] // NUM_TIMES)
        with eagerly():  # a shape that is used a few times is not worth compiling
            for first in engine.ranks.shard_of(range(0, len(rows_N), size)):
                error_B = self._grid_errors(*source.pick(rows_N[first : first + size]), first, device)
                total_T += error_B.double().cpu().view(-1, NUM_TIMES).sum(0)
        mean_T = engine.all_reduce_sum(total_T) / len(rows_N)
        half = NUM_TIMES // 2
        early, late = mean_T[:half].mean().item(), mean_T[half:].mean().item()
        # The noisy half is first and decides which checkpoint is best: it determines the content of an image. Near the image a
        # model that has begun to memorise gets worse on others, while its samples still improve.
        return {"loss_early": early, "loss_late": late, "loss_grid": (early + late) / 2}

    def _grid_errors(self, image_NCHW: Tensor, class_N: Tensor, first: int, device: torch.device) -> Tensor:
        """Errors of the evaluated images from number `first` on, each at all times of the grid."""
        image_BCHW = image_NCHW.to(device).repeat_interleave(NUM_TIMES, 0)
        index_B = torch.arange(len(image_BCHW), device=device) + FIRST_EVALUATED + first * NUM_TIMES
        time_B = (torch.arange(len(image_BCHW), device=device) % NUM_TIMES + 0.5) / NUM_TIMES
        noise_BCHW = draw_noise(index_B, 0, image_BCHW.shape[1:])
        velocity_BCHW = image_BCHW - noise_BCHW
        x_BCHW = noise_BCHW + time_B[:, None, None, None] * velocity_BCHW
        class_B = class_N.to(device).repeat_interleave(NUM_TIMES)
        field_BCHW = self.model(x_BCHW, time_B, class_B)
        return self.errors(field_BCHW, {"input": x_BCHW, "time": time_B, "velocity": velocity_BCHW})

    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        return show(self, request, engine)

    def onnx_network(self) -> OnnxNetwork:
        """The velocity from noise (time 0) to images (time 1), whatever the network predicts."""
        model = self.model

        def velocity(x_BCHW: Tensor, time_B: Tensor, class_B: Tensor) -> Tensor:
            return objective.velocity(model(x_BCHW, time_B, class_B), x_BCHW, time_B, model.config.predict)

        inputs = {"x": torch.zeros(2, *model.shape), "time": torch.full((2,), 0.5), "class": torch.zeros(2, dtype=torch.long)}
        image = ("batch", *(str(n) for n in model.shape))
        facts = {
            "num_classes": model.num_classes,
            "null_class": model.null_class if model.config.drop else None,
            "sampling": "start from normal noise at time 0 and integrate the velocity to time 1; pixels are in [-1, 1]",
            "cache": "none",
        }
        axes = {"x": image, "time": ("batch",), "class": ("batch",), "velocity": image}
        return OnnxNetwork(Function(model, velocity), inputs, axes, "velocity", facts)

    def describe(self) -> dict[str, Any]:
        model = self.model
        patch = f"{self.config.model.patch}x{self.config.model.patch}"
        context = f" + {model.num_context}" if model.num_context else ""
        facts = {
            "tokens": f"{model.num_patches:,}{context} of {patch} pixels",
            "matmul parameters": f"{model.token_parameters():,} per token, {model.image_parameters():,} per image",
            "GFLOP/image": f"{model.flops_per_image() / 1e9:,.2f}",
            "baseline losses": ", ".join(f"{name} {value:.3f}" for name, value in self.baseline_losses().items()),
        }
        if self.kernels():
            facts["attention"] = self.kernels()[0].name
        return facts

    def baseline_losses(self) -> dict[str, float]:
        """Losses of simple predictors in closed form, hardest last: all zeros, best per-pixel, best linear."""
        if not self._baseline_losses:
            source = self.data.train
            num = min(objective.MAX_IMAGES, objective.MAX_TOTAL // math.prod(self.data.shape))
            images, _ = source.pick(source.spread(num))
            images_ND = images.flatten(1).to(self.model.enter.weight.device)
            self._baseline_losses = objective.baseline_losses(images_ND, self.times, self.config.model.predict)
        return self._baseline_losses


def build(config: Config, data: ImageData) -> Flow:
    return Flow(config, data)
