"""The walk of candidates downhill: where it begins, one step of it, and its noise, all by counters.

Shape suffixes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seedbed.nn import dice
from seedbed.recipes.ebt.model import EnergyModel, Memory
from seedbed.recipes.ebt.presets import WalkConfig

# Names of uses of random numbers. Noise has one per step; evaluation has one per draw of the start.
COUNT, STARTS, SIZES, REPLAY, NOISE, EVALUATION, GENERATION = 1, 2, 3, 4, 1000, 100_000, 200_000


class Step(NamedTuple):
    """One step: where it led, and what it saw where it began."""

    z_BTV: Tensor
    p_BTV: Tensor
    slope_BTV: Tensor
    energy_BT: Tensor


class Draw(nn.Module):
    """Normal numbers that follow from (seed, place, stream); a module, so that it can be compiled into one kernel."""

    def __init__(self, seed: int, vocab: int) -> None:
        super().__init__()
        self.seed, self.vocab = seed, vocab

    def forward(self, place_BT: Tensor, stream: int) -> Tensor:
        return dice.normal(dice.keys(self.seed, place_BT, stream), self.vocab)


class Apart(torch.autograd.Function):
    """The identity; its gradient is clipped alone and made too small to count in the norm of all, which Adam does not mind.

    Clipped is the mean over ranks, not each rank's own: `mean` gives it.
    """

    SHARE = 1e-3

    @staticmethod
    def forward(ctx, x: Tensor, mean: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        ctx.mean = mean
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0] if ctx.mean is None else ctx.mean(grads[0])
        return grad.clamp(-1.0, 1.0) * Apart.SHARE, None


def take_step(model: EnergyModel, memories: list[Memory], z_BTV: Tensor, number: int, alpha: Tensor | float, space: str) -> Step:
    """Step `number`, counted from 0, downhill; walks longer than there are landscapes stay in the last one."""
    landscape = min(number, len(memories) - 1)
    p_BTV, slope_BTV, energy_BT = model(z_BTV, memories[landscape], landscape)
    if space == "prob":
        moved_BTV = p_BTV - alpha * slope_BTV
    elif space == "mirror":
        moved_BTV = z_BTV - alpha * slope_BTV
    else:
        moved_BTV = z_BTV - alpha * along_logits(p_BTV, slope_BTV)
    return Step(moved_BTV, p_BTV, slope_BTV, energy_BT)


def along_logits(p_BTV: Tensor, slope_BTV: Tensor) -> Tensor:
    """The slope along logits, from the slope along probabilities."""
    return p_BTV * (slope_BTV - (p_BTV * slope_BTV).sum(-1, keepdim=True))


def walk(
    model: EnergyModel, memories: list[Memory], z_BTV: Tensor, num_steps: int, alpha: Tensor | float, space: str
) -> Iterator[Step]:
    """A walk without noise and without a graph: what evaluation and generation do."""
    with torch.no_grad():
        for number in range(num_steps):
            step = take_step(model, memories, z_BTV, number, alpha, space)
            z_BTV = step.z_BTV
            yield step


def first_candidates(draw: Draw, config: WalkConfig, place_BT: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Logits to start from at these places."""
    if config.start == "zeros":
        return torch.zeros(*place_BT.shape, draw.vocab, dtype=dtype, device=place_BT.device)
    return draw(place_BT, stream).to(dtype)
