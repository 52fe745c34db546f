"""The critic (discriminator): scores a frame given memory and control; relativistic pairing loss with R1 and R2 penalties.

Shape suffixes: B pairs, A control axes, H W pixels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from seedbed.nn.init import declare, module_list
from seedbed.recipes.world.cells import init_layers, leaky

REMEMBERED = 2  # frames of the memory that the critic sees
CHANNELS, MOST = 32, 256
ONE_IN = 8  # the critic scores one in so many rows: with its penalties it costs many times what the generator does


class Block(nn.Module):
    """A residual block that halves the size; the residual branch is zero at initialisation, no normalisation."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.short = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.short(x) + self.second(leaky(self.first(leaky(x)))), 2)


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
        for part in (*self.blocks, self.enter, self.score):
            init_layers(part, generator)

    def forward(self, frame_B3HW: Tensor, memory_BMHW: Tensor, action_BA: Tensor) -> Tensor:
        recent = memory_BMHW[:, -3 * REMEMBERED :]
        planes = action_BA[:, :, None, None].expand(-1, -1, *frame_B3HW.shape[-2:])
        # Frames differ little from the last one: the critic gets the difference.
        x = self.enter(torch.cat((frame_B3HW - recent[:, -3:], recent, planes), dim=1))
        for block in self.blocks:
            x = block(x)
        return self.score(leaky(x)).mean((1, 2, 3))


def critic_loss(critic: Critic, real: Tensor, fake: Tensor, memory: Tensor, action: Tensor, gamma: float) -> dict[str, Tensor]:
    """Relativistic logistic loss of pairs, and gradient penalties at real and at predicted frames (R1, R2).

    The penalty's gradient equals that of the scores' directional derivative along the fixed input gradient, computed in forward
    mode. Double backward would give the same, by convolutions with kernels as large as the image.
    """
    both, known = torch.cat((real, fake)).detach().requires_grad_(), (memory.repeat(2, 1, 1, 1), action.repeat(2, 1))
    (slope,) = torch.autograd.grad(critic(both, *known).sum(), both)
    with warnings.catch_warnings(action="ignore"), forward_ad.dual_level():  # its first use loads torch.jit, which warns
        score, change = forward_ad.unpack_dual(critic(forward_ad.make_dual(both.detach(), slope), *known))
    r1, r2 = slope.square().sum((1, 2, 3)).view(2, -1).mean(1)
    real_B, fake_B = score.chunk(2)
    margin_B = real_B - fake_B
    assert change is not None
    along = 2.0 * change.mean()  # the means over real and predicted frames; its value is r1 + r2
    loss = F.softplus(-margin_B).mean() + 0.5 * gamma * (r1 + r2) + gamma * (along - along.detach())
    won = (margin_B > 0).float().mean()
    return {"loss_critic": loss, "critic_won": won, "critic_margin": margin_B.mean(), "r1": r1, "r2": r2}


def generator_loss(critic: Critic, real: Tensor, fake: Tensor, memory: Tensor, action: Tensor) -> Tensor:
    """The generator's adversarial loss: its frame should score higher than the true one."""
    real_B, fake_B = critic(torch.cat((real, fake)), memory.repeat(2, 1, 1, 1), action.repeat(2, 1)).chunk(2)
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
