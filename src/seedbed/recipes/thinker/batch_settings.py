"""Settings that vary from batch to batch: live latents, supervised steps, the program, and where gradients stop.

`SettingsTensors` are those of a run; `BatchSettings` is one batch's draw from them. Both work under vmap and capture. T steps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from seedbed.nn import rng
from seedbed.recipes.thinker.presets import ModelConfig
from seedbed.recipes.thinker.program import LOOKUP, OUTPUT, READ, STATIC, WRITE

# Streams of random numbers; the tasks' own are below these.
SHAPE, PROGRAM, POSITIONS, CUT, NOISE, PERTURB = 1000, 1001, 1002, 1003, 1004, 2000
# Evaluation has its own noise, and several draws of it.
EVALUATION = 100_000
FIXED, RANDOM, PROGRESSIVE = range(3)
MODES = {"all": FIXED, "last": FIXED, "random": RANDOM, "progressive": PROGRESSIVE}

SettingsTensors = dict[str, Tensor]


class BatchSettings(NamedTuple):
    """One batch's draw. None means all latents, no cut, no perturbation: that part of the computation is left out.

    Gradients reach back to step `first`; `group` neighbouring samples share one draw of positions; `stream` separates the noise
    of evaluation from that of training.
    """

    seed: Tensor
    program_T5: Tensor
    weight_T: Tensor
    sigma: Tensor
    perturb: Tensor | None = None
    memory: Tensor | None = None
    latents: Tensor | None = None
    cut: Tensor | None = None
    first: int = 0
    group: int = 1
    stream: int = 0


def settings_tensors(config: ModelConfig, seed: int, num_steps: int, device: torch.device) -> SettingsTensors:
    """A run's settings as tensors, its tables `num_steps` rows long; rows beyond its own steps are 0, which means off."""
    latents, steps, program = config.latents, config.steps, config.parsed_program()
    table = torch.zeros(num_steps, 5)
    if program is not None:
        rows = program.rows(steps.high)
        table[: len(rows)] = torch.tensor(rows, dtype=torch.float32)
    raw = torch.zeros(num_steps)
    for step in (steps.high,) if config.loss.steps == "last" else steps.values():
        # Relative to the last step, so that base^t does not overflow.
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
        "random_program": int(program is None),
        "static": int(config.static_memory > 0),
        "memory": config.n_memory,
        "reach": config.loss.backprop_steps or num_steps + steps.high,
    }
    numbers = {"sigma": torch.tensor(config.noise), "perturb": torch.tensor(config.perturb), "program": table, "raw": raw}
    tensors = {name: torch.tensor(value, dtype=torch.int64) for name, value in whole.items()} | numbers
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def draw_shape(settings: SettingsTensors, step: Tensor) -> tuple[Tensor, Tensor]:
    """The number of live latents and of steps in this training step."""
    bits_3 = rng.bits(rng.keys(settings["seed"], step, SHAPE), 3)
    at = bits_3[0] * settings["latent_count"] >> 32
    latents = settings["latent_low"] + settings["latent_stride"] * at
    some = settings["step_low"] + settings["step_stride"] * (bits_3[1] * settings["step_count"] >> 32)
    top = settings["step_top"]
    skipped = bits_3[1] * top >> 32
    ahead = skipped + 1 + (bits_3[2] * (top - skipped) >> 32)
    steps = torch.where(settings["mode"] == RANDOM, some, torch.where(settings["mode"] == PROGRESSIVE, ahead, top))
    return latents, steps


def draw_settings(
    settings: SettingsTensors, turn: Tensor, num_steps: int, latents: Tensor | None, steps: Tensor
) -> BatchSettings:
    """Everything else that the batch of step `turn` needs, for an unroll of `num_steps` of which `steps` count."""
    count_T = torch.arange(1, num_steps + 1, device=turn.device)
    end_T = count_T == steps
    # The run's own table, or one drawn for this batch: independent columns, corrected to be valid.
    coins_T5 = rng.bits(rng.keys(settings["seed"], turn, PROGRAM), num_steps * 5).view(num_steps, 5) >> 31
    first_T = torch.arange(num_steps, device=turn.device) == 0
    write_T = coins_T5[:, WRITE]
    columns = {
        READ: coins_T5[:, READ] | first_T,
        LOOKUP: coins_T5[:, LOOKUP] * (write_T.cumsum(0) - write_T > 0),
        WRITE: write_T * (settings["memory"] > 0),
        STATIC: coins_T5[:, STATIC] * settings["static"],
        OUTPUT: coins_T5[:, OUTPUT] | end_T,
    }
    drawn_T5 = torch.stack([columns[c] for c in range(5)], -1).to(settings["program"].dtype)
    program_T5 = torch.where(settings["random_program"] > 0, drawn_T5, settings["program"][:num_steps])
    progressive = torch.where(settings["mode"] == PROGRESSIVE, _cut(settings, turn, num_steps, steps), 0)
    cut = torch.maximum(progressive, steps - settings["reach"])
    raw_T = torch.where(settings["mode"] == FIXED, settings["raw"][:num_steps], end_T.to(settings["raw"].dtype))
    weight_T = raw_T * program_T5[:, OUTPUT] * (count_T > cut)
    weight_T = weight_T / weight_T.sum().clamp_min(1e-30)
    return BatchSettings(
        settings["seed"], program_T5, weight_T, settings["sigma"], settings["perturb"], settings["memory"], latents, cut
    )


def _cut(settings: SettingsTensors, turn: Tensor, num_steps: int, steps: Tensor) -> Tensor:
    """The number of steps without gradient of the progressive loss, given the number of all steps.

    With n uniform in 0..T-1 and k uniform in 1..T-n, n given n+k has odds 1 / (T - n).
    """
    n_T = torch.arange(num_steps, device=turn.device)
    odds_T = torch.where(n_T < steps, 1.0 / (settings["step_top"] - n_T).clamp_min(1), 0.0)
    mark = rng.uniform(rng.keys(settings["seed"], turn, CUT), 1)[0] * odds_T.sum()
    return (odds_T.cumsum(0) <= mark).sum().clamp_max(steps - 1)
