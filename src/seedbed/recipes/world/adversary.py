"""The adversary: a critic that sees a candidate with its memory and control, trained against pairs, with penalties on its slope.

Shape suffixes: B pairs, A control axes, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn.cells import init_conv, leaky
from seedbed.nn.groups import declare

REMEMBERED = 2  # frames of the memory that the critic sees
CHANNELS, MOST = 32, 256
ONE_IN = 8  # rows of a batch that it judges: with its slopes it costs many times what the generator does


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

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.short(x_BCHW) + self.second(leaky(self.first(leaky(x_BCHW))))
        return F.avg_pool2d(x_BCHW, 2)


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

    def forward(self, frame_B3HW: Tensor, memory_BMHW: Tensor, action_BA: Tensor) -> Tensor:
        recent = memory_BMHW[:, -3 * REMEMBERED :]
        planes = action_BA[:, :, None, None].expand(-1, -1, *frame_B3HW.shape[-2:])
        # Candidates differ by little from the last frame: the critic is given the difference.
        x = self.enter(torch.cat((frame_B3HW - recent[:, -3:], recent, planes), dim=1))
        for block in self.blocks:
            x = block(x)
        return self.score(leaky(x)).mean((1, 2, 3))


def critic_loss(critic: Critic, real: Tensor, fake: Tensor, memory: Tensor, action: Tensor, gamma: float) -> dict[str, Tensor]:
    """Relativistic logistic loss of pairs, and penalties on the slope at real and at dreamed frames (R1, R2)."""
    real, fake = real.detach().requires_grad_(), fake.detach().requires_grad_()
    real_B, fake_B = critic(real, memory, action), critic(fake, memory, action)
    (slope_real,) = torch.autograd.grad(real_B.sum(), real, create_graph=True)
    (slope_fake,) = torch.autograd.grad(fake_B.sum(), fake, create_graph=True)
    r1, r2 = (slope.square().sum((1, 2, 3)).mean() for slope in (slope_real, slope_fake))
    margin_B = real_B - fake_B
    loss = F.softplus(-margin_B).mean() + 0.5 * gamma * (r1 + r2)
    won = (margin_B > 0).float().mean()
    return {"loss_critic": loss, "critic_won": won, "critic_margin": margin_B.mean(), "r1": r1, "r2": r2}


def generator_loss(critic: Critic, real: Tensor, fake: Tensor, memory: Tensor, action: Tensor) -> Tensor:
    """What the generator wants: that its frame looks more real than the true one."""
    return F.softplus(critic(real, memory, action) - critic(fake, memory, action)).mean()


def held_weight(
    error: Tensor,
    adversarial: Tensor,
    frame: Tensor,
    judged: slice,
    share: float,
    ratio: float,
    together: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The weight at which the adversary pulls `ratio` times as hard as the error does, and the pull unweighted.

    Measured where both meet, at the `judged` frames themselves: nothing of the generator has to be gone through twice. They are
    a `share` of the frames of which the error is the mean, and pull for all of them. `together` sums over ranks.
    """
    (slope_error,) = torch.autograd.grad(error, frame, retain_graph=True)
    (slope_adversarial,) = torch.autograd.grad(adversarial, frame, retain_graph=True)
    pull, push = (together(slope[judged].square().sum()).sqrt() for slope in (slope_adversarial, slope_error))
    against = share * pull / push.clamp_min(1e-12)
    return (ratio / against.clamp_min(1e-6)).detach(), against.detach()
