"""The loss of a walk: candidates go downhill, and what they become is compared with the next token.

Shape suffixes: B batch, T time, V vocabulary, K steps of the walk.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.nn import dice
from seedbed.recipes.ebt.model import EnergyModel, Memory
from seedbed.recipes.ebt.presets import WalkConfig
from seedbed.recipes.ebt.walk import NOISE, SIZES, Draw, Step, take_step


class Outcome(NamedTuple):
    """A walk of training: its loss, the mean nats after each step, where it began and ended, its last step."""

    loss: Tensor
    nats_K: list[Tensor]
    first_BTV: Tensor
    last: Step


def cross_entropy(z_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean nats of the targets under logits."""
    return F.cross_entropy(z_BTV.flatten(0, -2), targets_BT.flatten())


def step_sizes(config: WalkConfig, alpha: Tensor, seed: int, place_BT: Tensor) -> Tensor:
    """A step size for every candidate, uniform around alpha; alpha itself where nothing is drawn."""
    if config.spread == 1.0:
        return alpha
    low, high = 1.0 / config.spread, config.spread
    return alpha * (low + (high - low) * dice.uniform(dice.keys(seed, place_BT, SIZES), 1)).to(alpha.dtype)


def walk_to_loss(
    model: EnergyModel,
    memories: list[Memory],
    z_BTV: Tensor,
    targets_BT: Tensor,
    place_BT: Tensor,
    *,
    config: WalkConfig,
    alpha: Tensor,
    num_steps: int,
    draw: Draw,
) -> Outcome:
    """Walk `num_steps` from `z_BTV`; steps that carry no loss leave no graph."""
    first_BTV, nats_K, step = z_BTV, [], None
    for number in range(num_steps):
        is_last = number == num_steps - 1
        carries = is_last or config.loss == "each" or config.through == "all"
        with contextlib.nullcontext() if carries else torch.no_grad():
            z_BTV = noised(z_BTV, place_BT, number, config, draw)
            step = take_step(model, memories, z_BTV, number, alpha, config.space)
            z_BTV = step.z_BTV
            nats_K.append(cross_entropy(z_BTV, targets_BT))
    assert step is not None, "a walk has at least one step"
    loss = torch.stack(nats_K).mean() if config.loss == "each" else nats_K[-1]
    return Outcome(loss, nats_K, first_BTV, step)


def noised(z_BTV: Tensor, place_BT: Tensor, number: int, config: WalkConfig, draw: Draw) -> Tensor:
    """Candidates as step `number` of training finds them."""
    z_BTV = z_BTV if config.through == "all" else z_BTV.detach()
    return z_BTV + config.langevin * draw(place_BT, NOISE + number).to(z_BTV.dtype) if config.langevin else z_BTV


@torch.no_grad()
def energy_facts(model: EnergyModel, memories: list[Memory], outcome: Outcome, alpha: Tensor) -> dict[str, Tensor]:
    """What the walk did to the energy, both ends judged in the last landscape, and how far a step moves."""
    last = len(memories) - 1
    before_BT, after_BT = (
        model.energy(z_BTV.softmax(-1), memories[last], last) for z_BTV in (outcome.first_BTV, outcome.last.z_BTV)
    )
    p_BTV, slope_BTV = outcome.last.z_BTV.softmax(-1), outcome.last.slope_BTV
    entropy_BT = -(p_BTV * p_BTV.clamp_min(1e-30).log()).sum(-1)
    return {
        "energy_first": before_BT.mean(),
        "energy_last": after_BT.mean(),
        "gap": (before_BT - after_BT).mean(),
        "gap_negative": (after_BT >= before_BT).float().mean(),
        "slope_rms": slope_BTV.square().mean().sqrt(),
        "move_rms": (alpha * slope_BTV).square().mean().sqrt(),
        "entropy": entropy_BT.mean(),
    }


FACTS = ("energy_first", "energy_last", "gap", "gap_negative", "slope_rms", "move_rms", "entropy")
