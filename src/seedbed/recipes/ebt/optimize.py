"""Optimisation of predictions on the energy: initial predictions, one step, and noise, all from counters.

Shape suffixes: B batch, T time, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seedbed.nn import rng
from seedbed.nn.init import declare
from seedbed.recipes.ebt.model import Context, EnergyModel
from seedbed.recipes.ebt.presets import MCMCConfig

# Streams of random numbers. Noise has one per step; evaluation has one per sample of the initial prediction.
NUM_STEPS, INITIAL, STEP_SIZE, REPLAY, NOISE, EVALUATION, GENERATION = 1, 2, 3, 4, 1000, 100_000, 200_000
ALPHA_RATE = 3.0


class Step(NamedTuple):
    """One step: the new logits; and probabilities, gradient and energy at the old ones."""

    z_BTV: Tensor
    p_BTV: Tensor
    grad_BTV: Tensor
    energy_BT: Tensor


class CounterNormal(nn.Module):
    """Normal numbers from (seed, counter, stream); a module, so that it can be compiled into one kernel."""

    def __init__(self, seed: int, vocab: int) -> None:
        super().__init__()
        self.seed, self.vocab = seed, vocab

    def forward(self, counter_BT: Tensor, stream: int) -> Tensor:
        return rng.normal(rng.keys(self.seed, counter_BT, stream), self.vocab)


def log_step_size(alpha: float, learned: bool) -> nn.Parameter | None:
    """The learned step size; none where it is fixed.

    Stored as a logarithm: it stays positive, and one learning rate changes it by the same factor at any size.
    """
    if not learned:
        return None
    return declare(nn.Parameter(torch.tensor(math.log(alpha))), "scalar", lr_scale=ALPHA_RATE, decay=False)


class SeparateClip(torch.autograd.Function):
    """The identity; its gradient is clipped alone and scaled down so that it does not count in the global norm.

    Adam is invariant to the scale. What is clipped is the mean over ranks, computed by `mean`.
    """

    SCALE = 1e-3

    @staticmethod
    def forward(ctx, x: Tensor, mean: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        ctx.mean = mean
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0] if ctx.mean is None else ctx.mean(grads[0])
        return grad.clamp(-1.0, 1.0) * SeparateClip.SCALE, None


def optimize_step(
    model: EnergyModel, contexts: list[Context], z_BTV: Tensor, number: int, alpha: Tensor | float, space: str
) -> Step:
    """Gradient-descent step `number`, counted from 0; steps beyond the number of landscapes use the last one."""
    landscape = min(number, len(contexts) - 1)
    p_BTV, grad_BTV, energy_BT = model(z_BTV, contexts[landscape], landscape)
    slope_BTV = logit_gradient(p_BTV, grad_BTV) if space == "logit" else grad_BTV
    return Step((p_BTV if space == "prob" else z_BTV) - alpha * slope_BTV, p_BTV, grad_BTV, energy_BT)


def logit_gradient(p_BTV: Tensor, grad_BTV: Tensor) -> Tensor:
    """The gradient with respect to logits, from that with respect to probabilities."""
    return p_BTV * (grad_BTV - (p_BTV * grad_BTV).sum(-1, keepdim=True))


def optimize(
    model: EnergyModel, contexts: list[Context], z_BTV: Tensor, num_steps: int, alpha: Tensor | float, space: str
) -> Iterator[Step]:
    """Steps without noise and without a graph, as evaluation and generation take them."""
    with torch.no_grad():
        for number in range(num_steps):
            step = optimize_step(model, contexts, z_BTV, number, alpha, space)
            z_BTV = step.z_BTV
            yield step


def initial_predictions(noise: CounterNormal, config: MCMCConfig, counter_BT: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Logits to start from."""
    if config.initial_condition == "zeros":
        return torch.zeros(*counter_BT.shape, noise.vocab, dtype=dtype, device=counter_BT.device)
    return noise(counter_BT, stream).to(dtype)
