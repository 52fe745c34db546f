"""The adversary: a critic that sees a candidate with its memory and control, trained against pairs, with penalties on its slope.

Shape suffixes: B pairs, A control axes, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn.cells import SLOPE, init_conv, leaky
from seedbed.nn.groups import declare

REMEMBERED = 2  # frames of the memory that the critic sees
CHANNELS, MOST = 32, 256
ONE_IN = 8  # rows of a batch that it judges: with its slopes it costs many times what the generator does


class Dual(NamedTuple):
    """Numbers, and how they change along a direction in which the frame is moved, where somebody asks."""

    x: Tensor
    along: Tensor | None

    def through(self, conv: nn.Module) -> Dual:
        assert isinstance(conv, nn.Conv2d)
        along = None if self.along is None else F.conv2d(self.along, conv.weight, padding=conv.padding)  # type: ignore[arg-type]
        return Dual(conv(self.x), along)

    def bent(self) -> Dual:
        return Dual(leaky(self.x), None if self.along is None else torch.where(self.x > 0, self.along, SLOPE * self.along))

    def halved(self) -> Dual:
        return Dual(F.avg_pool2d(self.x, 2), None if self.along is None else F.avg_pool2d(self.along, 2))

    def plus(self, other: Dual) -> Dual:
        return Dual(self.x + other.x, None if self.along is None or other.along is None else self.along + other.along)


class Block(nn.Module):
    """Two convolutions beside a short cut, at half the size after; silent at birth, no norms."""

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
    """One number per candidate: how real it looks after this memory and this control."""

    def __init__(self, num_axes: int, num_scales: int, rate: float) -> None:
        super().__init__()
        widths = [min(CHANNELS * 2**k, MOST) for k in range(num_scales + 1)]
        self.enter = nn.Conv2d(3 * (1 + REMEMBERED) + num_axes, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(Block(a, b) for a, b in pairwise(widths))
        self.score = nn.Conv2d(widths[-1], 1, 1, bias=False)  # only differences of scores are ever used
        for param in self.parameters():
            declare(param, "scalar", lr_scale=rate)

    def init_weights(self, generator: torch.Generator) -> None:
        for block in self.blocks:
            block.init_weights(generator)  # type: ignore[operator]
        init_conv(self.enter, generator)
        init_conv(self.score, generator)

    def forward(self, frame_B3HW: Tensor, memory_BMHW: Tensor, action_BA: Tensor, along: Tensor | None = None) -> Dual:
        """(B,) scores, and how they change when the frames are moved along a direction."""
        recent = memory_BMHW[:, -3 * REMEMBERED :]
        planes = action_BA[:, :, None, None].expand(-1, -1, *frame_B3HW.shape[-2:])
        # Candidates differ by little from the last frame: the critic is given the difference.
        x = torch.cat((frame_B3HW - recent[:, -3:], recent, planes), dim=1)
        dual = Dual(x, None if along is None else F.pad(along, (0, 0, 0, 0, 0, x.shape[1] - 3))).through(self.enter)
        for block in self.blocks:
            dual = block(dual)
        x, along = dual.bent().through(self.score)
        return Dual(x.mean((1, 2, 3)), None if along is None else along.mean((1, 2, 3)))


def critic_loss(critic: Critic, real: Tensor, fake: Tensor, memory: Tensor, action: Tensor, gamma: float) -> dict[str, Tensor]:
    """Relativistic logistic loss of pairs, and penalties on the slope at real and at dreamed frames (R1, R2).

    The penalty's gradient is that of the scores' change along the slope, the slope held fixed, which is carried beside the
    scores. Twice backward would give the same by convolutions whose kernels are as large as the picture.
    """
    both, known = torch.cat((real, fake)).detach().requires_grad_(), (memory.repeat(2, 1, 1, 1), action.repeat(2, 1))
    (slope,) = torch.autograd.grad(critic(both, *known).x.sum(), both)
    score, change = critic(both.detach(), *known, slope)
    r1, r2 = slope.square().sum((1, 2, 3)).view(2, -1).mean(1)
    real_B, fake_B = score.chunk(2)
    margin_B = real_B - fake_B
    along = 2.0 * change.mean()  # the means over real and dreamed frames; its value is r1 + r2
    loss = F.softplus(-margin_B).mean() + 0.5 * gamma * (r1 + r2) + gamma * (along - along.detach())
    won = (margin_B > 0).float().mean()
    return {"loss_critic": loss, "critic_won": won, "critic_margin": margin_B.mean(), "r1": r1, "r2": r2}


def generator_loss(critic: Critic, real: Tensor, fake: Tensor, memory: Tensor, action: Tensor) -> Tensor:
    """What the generator wants: that its frame looks more real than the true one."""
    real_B, fake_B = critic(torch.cat((real, fake)), memory.repeat(2, 1, 1, 1), action.repeat(2, 1)).x.chunk(2)
    return F.softplus(real_B - fake_B).mean()


def held_weight(
    error: Tensor,
    adversarial: Tensor,
    frame: Tensor,
    judged: slice,
    share: float,
    ratio: float,
    together: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The weight at which the adversary pulls `ratio` times as hard as the error does, the pull unweighted, and its slope.

    Measured where both meet, at the `judged` frames themselves: nothing of the generator has to be gone through twice. They are
    a `share` of the frames of which the error is the mean, and pull for all of them. `together` sums over ranks.
    """
    (slope_error,) = torch.autograd.grad(error, frame, retain_graph=True)
    (slope_adversarial,) = torch.autograd.grad(adversarial, frame)
    pull, push = (together(slope[judged].square().sum()).sqrt() for slope in (slope_adversarial, slope_error))
    against = share * pull / push.clamp_min(1e-12)
    return (ratio / against.clamp_min(1e-6)).detach(), against.detach(), slope_adversarial
