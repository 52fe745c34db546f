"""The training loss: predictions are optimised on the energy and compared with the next token.

Shape suffixes: B batch, T time, V vocabulary, K optimisation steps.
"""

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.nn import rng
from seedbed.recipes.ebt.model import Context, EnergyModel
from seedbed.recipes.ebt.optimize import NOISE, STEP_SIZE, CounterNormal, Step, optimize_step
from seedbed.recipes.ebt.presets import MCMCConfig
from seedbed.train.stop_gradient import stop_gradient


class Outcome(NamedTuple):
    """The loss, the mean nats after each step, the initial predictions, and the last step."""

    loss: Tensor
    nats_K: list[Tensor]
    first_BTV: Tensor
    last: Step


def cross_entropy(z_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(z_BTV.flatten(0, -2), targets_BT.flatten())


def step_sizes(config: MCMCConfig, alpha: Tensor, seed: int, counter_BT: Tensor) -> Tensor:
    """A step size for every prediction, uniform around alpha; alpha itself where nothing is randomised."""
    if config.random_alpha == 1.0:
        return alpha
    low, high = 1.0 / config.random_alpha, config.random_alpha
    return alpha * (low + (high - low) * rng.uniform(rng.keys(seed, counter_BT, STEP_SIZE), 1)).to(alpha.dtype)


def optimize_to_loss(
    model: EnergyModel,
    contexts: list[Context],
    z_BTV: Tensor,
    targets_BT: Tensor,
    counter_BT: Tensor,
    *,
    config: MCMCConfig,
    alpha: Tensor,
    num_steps: int,
    noise: CounterNormal,
) -> Outcome:
    """Take `num_steps` from `z_BTV`; steps without a loss leave no graph."""
    first_BTV, nats_K, step = z_BTV, [], None
    for number in range(num_steps):
        is_last = number == num_steps - 1
        has_loss = is_last or config.loss == "each" or config.backprop_through == "all"
        with contextlib.nullcontext() if has_loss else torch.no_grad():
            z_BTV = add_langevin_noise(z_BTV, counter_BT, number, config, noise)
            step = optimize_step(model, contexts, z_BTV, number, alpha, config.space)
            z_BTV = step.z_BTV
            nats_K.append(cross_entropy(z_BTV, targets_BT))
    assert step is not None, "at least one step"
    loss = torch.stack(nats_K).mean() if config.loss == "each" else nats_K[-1]
    return Outcome(loss, nats_K, first_BTV, step)


def add_langevin_noise(z_BTV: Tensor, counter_BT: Tensor, number: int, config: MCMCConfig, noise: CounterNormal) -> Tensor:
    """The input of step `number` in training: detached unless gradients pass all steps, with Langevin noise."""
    z_BTV = z_BTV if config.backprop_through == "all" else stop_gradient(z_BTV)
    return z_BTV + config.langevin_noise * noise(counter_BT, NOISE + number).to(z_BTV.dtype) if config.langevin_noise else z_BTV


@torch.no_grad()
def energy_metrics(model: EnergyModel, contexts: list[Context], outcome: Outcome, alpha: Tensor) -> dict[str, Tensor]:
    """Energies of the first and the last predictions, both in the last landscape, and the size of a step."""
    last = len(contexts) - 1
    before_BT, after_BT = (
        model.energy(z_BTV.softmax(-1), contexts[last], last) for z_BTV in (outcome.first_BTV, outcome.last.z_BTV)
    )
    p_BTV, grad_BTV = outcome.last.z_BTV.softmax(-1), outcome.last.grad_BTV
    entropy_BT = -(p_BTV * p_BTV.clamp_min(1e-30).log()).sum(-1)
    return {
        "energy_first": before_BT.mean(),
        "energy_last": after_BT.mean(),
        "gap": (before_BT - after_BT).mean(),
        "gap_negative": (after_BT >= before_BT).float().mean(),
        "slope_rms": grad_BTV.square().mean().sqrt(),
        "move_rms": (alpha * grad_BTV).square().mean().sqrt(),
        "entropy": entropy_BT.mean(),
    }


METRICS = ("energy_first", "energy_last", "gap", "gap_negative", "slope_rms", "move_rms", "entropy")
