"""What varies from batch to batch, as tensors: live latents, supervised steps, the plan, and where gradients stop.

Settings of a run are `Dials`; one batch's draw from them is a `Setting`. T steps; both are safe under vmap and capture.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seedbed.nn import dice
from seedbed.recipes.thinker.plan import LOOKUP, OUTPUT, READ, STATIC, WRITE
from seedbed.recipes.thinker.presets import ModelConfig

# Names of uses of random numbers; the tasks' own are below these.
SHAPE, PLAN, PLACES, CUT, NOISE, PERTURB = 1000, 1001, 1002, 1003, 1004, 2000
# Evaluation looks at fresh noise, and at several draws of it.
EVALUATION = 100_000
FIXED, RANDOM, PROGRESSIVE = range(3)
MODES = {"all": FIXED, "last": FIXED, "random": RANDOM, "progressive": PROGRESSIVE}

Dials = dict[str, Tensor]


class Setting(NamedTuple):
    """One batch's draw. None stands for all latents, no cut, no perturbation: that part of the computation is left out.

    Gradients reach back to step `first`; `group` neighbouring samples share one draw of places; `stream` tells evaluation's
    noise from training's.
    """

    seed: Tensor
    plan_T5: Tensor
    weight_T: Tensor
    sigma: Tensor
    perturb: Tensor | None = None
    memory: Tensor | None = None
    latents: Tensor | None = None
    cut: Tensor | None = None
    first: int = 0
    group: int = 1
    stream: int = 0


def dials_of(config: ModelConfig, seed: int, num_steps: int, device: torch.device) -> Dials:
    """A run's settings as tensors, its tables `num_steps` rows long; what lies beyond its own steps is 0, which means off."""
    latents, steps, plan = config.latents, config.steps, config.parsed_plan()
    table = torch.zeros(num_steps, 5)
    if plan is not None:
        rows = plan.rows(steps.high)
        table[: len(rows)] = torch.tensor(rows, dtype=torch.float32)
    raw = torch.zeros(num_steps)
    for step in (steps.high,) if config.loss.steps == "last" else steps.values():
        # Relative to the top: base^t itself would overflow long before its share did.
        raw[step - 1] = config.loss.base ** (step - steps.high)
    whole = {
        "seed": seed,
        "latent_low": latents.low,
        "latent_stride": latents.stride,
        "latent_count": len(latents.values()),
        "step_low": steps.low,
        "step_stride": steps.stride,
        "step_count": len(steps.values()),
        "step_top": steps.high,
        "mode": MODES[config.loss.steps],
        "random_plan": int(plan is None),
        "static": int(config.static_memory > 0),
        "memory": config.n_memory,
        "reach": config.loss.backprop_steps or num_steps + steps.high,
    }
    numbers = {"sigma": torch.tensor(config.noise), "perturb": torch.tensor(config.perturb), "plan": table, "raw": raw}
    tensors = {name: torch.tensor(value, dtype=torch.int64) for name, value in whole.items()} | numbers
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def draw_shape(dials: Dials, step: Tensor) -> tuple[Tensor, Tensor]:
    """How many latents live and how many steps are taken in this step of training."""
    bits_3 = dice.bits(dice.keys(dials["seed"], step, SHAPE), 3)
    at = bits_3[0] * dials["latent_count"] >> 32
    latents = dials["latent_low"] + dials["latent_stride"] * at
    some = dials["step_low"] + dials["step_stride"] * (bits_3[1] * dials["step_count"] >> 32)
    top = dials["step_top"]
    skipped = bits_3[1] * top >> 32
    ahead = skipped + 1 + (bits_3[2] * (top - skipped) >> 32)
    steps = torch.where(dials["mode"] == RANDOM, some, torch.where(dials["mode"] == PROGRESSIVE, ahead, top))
    return latents, steps


def settle(dials: Dials, turn: Tensor, num_steps: int, latents: Tensor | None, steps: Tensor) -> Setting:
    """Everything else that the batch of step `turn` needs, for an unroll of `num_steps` of which `steps` count."""
    count_T = torch.arange(1, num_steps + 1, device=turn.device)
    end_T = count_T == steps
    plan_T5 = _plan(dials, turn, num_steps, end_T)
    progressive = torch.where(dials["mode"] == PROGRESSIVE, _cut(dials, turn, num_steps, steps), 0)
    cut = torch.maximum(progressive, steps - dials["reach"])
    raw_T = torch.where(dials["mode"] == FIXED, dials["raw"][:num_steps], end_T.to(dials["raw"].dtype))
    weight_T = raw_T * plan_T5[:, OUTPUT] * (count_T > cut)
    weight_T = weight_T / weight_T.sum().clamp_min(1e-30)
    return Setting(dials["seed"], plan_T5, weight_T, dials["sigma"], dials["perturb"], dials["memory"], latents, cut)


def _plan(dials: Dials, turn: Tensor, num_steps: int, end_T: Tensor) -> Tensor:
    """The run's own table, or one drawn for this batch: independent columns, repaired until they make sense."""
    coins_T5 = dice.bits(dice.keys(dials["seed"], turn, PLAN), num_steps * 5).view(num_steps, 5) >> 31
    first_T = torch.arange(num_steps, device=turn.device) == 0
    write_T = coins_T5[:, WRITE]
    columns = {
        READ: coins_T5[:, READ] | first_T,
        LOOKUP: coins_T5[:, LOOKUP] * (write_T.cumsum(0) - write_T > 0),
        WRITE: write_T * (dials["memory"] > 0),
        STATIC: coins_T5[:, STATIC] * dials["static"],
        OUTPUT: coins_T5[:, OUTPUT] | end_T,
    }
    drawn_T5 = torch.stack([columns[c] for c in range(5)], -1).to(dials["plan"].dtype)
    return torch.where(dials["random_plan"] > 0, drawn_T5, dials["plan"][:num_steps])


def _cut(dials: Dials, turn: Tensor, num_steps: int, steps: Tensor) -> Tensor:
    """After how many steps the progressive loss lets go of the past, given how many are taken.

    With n uniform in 0..T-1 and k uniform in 1..T-n, n given n+k has odds 1 / (T - n).
    """
    n_T = torch.arange(num_steps, device=turn.device)
    odds_T = torch.where(n_T < steps, 1.0 / (dials["step_top"] - n_T).clamp_min(1), 0.0)
    mark = dice.uniform(dice.keys(dials["seed"], turn, CUT), 1)[0] * odds_T.sum()
    return (odds_T.cumsum(0) <= mark).sum().clamp_max(steps - 1)
