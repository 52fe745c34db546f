"""The critic (discriminator): scores a frame given memory and control; relativistic pairing loss with R1 and R2 penalties.

Shape suffixes: B pairs, A control axes, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn.init import declare, module_list
from seedbed.recipes.world.cells import SLOPE, init_conv, leaky

REMEMBERED = 2  # frames of the memory that the critic sees
CHANNELS, MOST = 32, 256
ONE_IN = 8  # the critic scores one in so many rows: with its penalties it costs many times what the generator does


class Dual(NamedTuple):
    """Forward-mode derivative: values, and their change along a direction of the frame where one is given."""

    x: Tensor
    along: Tensor | None

    def through(self, conv: nn.Conv2d) -> Dual:
        along = None if self.along is None else F.conv2d(self.along, conv.weight, padding=conv.padding)  # type: ignore[arg-type]
        return Dual(conv(self.x), along)

    def bent(self) -> Dual:
        return Dual(leaky(self.x), None if self.along is None else torch.where(self.x > 0, self.along, SLOPE * self.along))

    def halved(self) -> Dual:
        return Dual(F.avg_pool2d(self.x, 2), None if self.along is None else F.avg_pool2d(self.along, 2))

    def plus(self, other: Dual) -> Dual:
        return Dual(self.x + other.x, None if self.along is None or other.along is None else self.along + other.along)


class Block(nn.Module):
    """A residual block that halves the size; the residual branch is zero at initialisation, no normalisation."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.short = nn.Conv2d(channels, out, 1)

    def init_weights(self, generator: torch.Generator) -> None:
        init_conv(self.first, generator)
        init_conv(self.second, generator, 0.0)
        init_conv(self.short, generator)

    def forward(self, x: Dual) -> Dual:
        return x.through(self.short).plus(x.bent().through(self.first).bent().through(self.second)).halved()


class Critic(nn.Module):
    """One score per frame: how real it is, given memory and control."""

    def __init__(self, num_axes: int, num_scales: int, rate: float) -> None:
        super().__init__()
        widths = [min(CHANNELS * 2**k, MOST) for k in range(num_scales + 1)]
        self.enter = nn.Conv2d(3 * (1 + REMEMBERED) + num_axes, widths[0], 3, padding=1)
        self.blocks = module_list(Block(a, b) for a, b in pairwise(widths))
        self.score = nn.Conv2d(widths[-1], 1, 1, bias=False)  # only score differences are used
        for param in self.parameters():
            declare(param, "scalar", lr_scale=rate)

    def init_weights(self, generator: torch.Generator) -> None:
        for block in self.blocks:
            block.init_weights(generator)
        init_conv(self.enter, generator)
        init_conv(self.score, generator)

    def forward(self, frame_B3HW: Tensor, memory_BMHW: Tensor, action_BA: Tensor, along: Tensor | None = None) -> Dual:
        """(B,) scores, and their change along a direction of the frames."""
        recent = memory_BMHW[:, -3 * REMEMBERED :]
        planes = action_BA[:, :, None, None].expand(-1, -1, *frame_B3HW.shape[-2:])
        # Frames differ little from the last one: the critic gets the difference.
        x = torch.cat((frame_B3HW - recent[:, -3:], recent, planes), dim=1)
        dual = Dual(x, None if along is None else F.pad(along, (0, 0, 0, 0, 0, x.shape[1] - 3))).through(self.enter)
        for block in self.blocks:
            dual = block(dual)
        x, along = dual.bent().through(self.score)
        return Dual(x.mean((1, 2, 3)), None if along is None else along.mean((1, 2, 3)))


def critic_loss(critic: Critic, real: Tensor, fake: Tensor, memory: Tensor, action: Tensor, gamma: float) -> dict[str, Tensor]:
    """Relativistic logistic loss of pairs, and gradient penalties at real and at predicted frames (R1, R2).

    The penalty's gradient equals that of the scores' directional derivative along the fixed input gradient, computed in forward
    mode. Double backward would give the same, by convolutions with kernels as large as the image.
    """
    both, known = torch.cat((real, fake)).detach().requires_grad_(), (memory.repeat(2, 1, 1, 1), action.repeat(2, 1))
    (slope,) = torch.autograd.grad(critic(both, *known).x.sum(), both)
    score, change = critic(both.detach(), *known, slope)
    r1, r2 = slope.square().sum((1, 2, 3)).view(2, -1).mean(1)
    real_B, fake_B = score.chunk(2)
    margin_B = real_B - fake_B
    along = 2.0 * change.mean()  # the means over real and predicted frames; its value is r1 + r2
    loss = F.softplus(-margin_B).mean() + 0.5 * gamma * (r1 + r2) + gamma * (along - along.detach())
    won = (margin_B > 0).float().mean()
    return {"loss_critic": loss, "critic_won": won, "critic_margin": margin_B.mean(), "r1": r1, "r2": r2}


def generator_loss(critic: Critic, real: Tensor, fake: Tensor, memory: Tensor, action: Tensor) -> Tensor:
    """The generator's adversarial loss: its frame should score higher than the true one."""
    real_B, fake_B = critic(torch.cat((real, fake)), memory.repeat(2, 1, 1, 1), action.repeat(2, 1)).x.chunk(2)
    return F.softplus(real_B - fake_B).mean()


def adversarial_weight(
    error: Tensor,
    adversarial: Tensor,
    frame: Tensor,
    scored: slice,
    share: float,
    ratio: float,
    together: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The weight at which the adversarial gradient has `ratio` times the norm of the error's, their ratio, and the gradient.

    Measured at the `scored` frames, so the generator's backward pass runs once. They are a `share` of the frames of which
    the error is the mean. `together` sums over ranks.
    """
    (slope_error,) = torch.autograd.grad(error, frame, retain_graph=True)
    (slope_adversarial,) = torch.autograd.grad(adversarial, frame)
    pull, push = (together(slope[scored].square().sum()).sqrt() for slope in (slope_adversarial, slope_error))
    against = share * pull / push.clamp_min(1e-12)
    return (ratio / against.clamp_min(1e-6)).detach(), against.detach(), slope_adversarial
