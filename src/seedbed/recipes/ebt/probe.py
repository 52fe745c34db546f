"""Probes of the ebt systems for the checks, made of the code that trains them.

Shape suffixes: B rows, T time, L tokens of a block, K optimisation steps, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from seedbed.data.text_facts import next_token_facts
from seedbed.nn.decoding import Sampling
from seedbed.recipes.ebt.objective import cross_entropy
from seedbed.recipes.ebt.optimize import INITIAL, ReplayBuffer, SeparateClip, initial_predictions, optimize_step
from seedbed.train.engine import EvalEngine
from seedbed.train.probe import Probe
from seedbed.train.stop_gradient import held

if TYPE_CHECKING:
    from seedbed.recipes.ebt.model import Context
    from seedbed.recipes.ebt.system import EnergySystem, PlainSystem

Batch = dict[str, Tensor]
# Finite-difference step of the logarithm of the step size.
PROBED = 1e-3


def build_probe(system: EnergySystem, batch: Batch) -> Probe:
    """Predictions after each step, from initial ones that the counters of the batch decide, and what to expect of them."""
    model, mcmc = system.model, system.mcmc
    counter_BT = system.counters(batch["index"])
    is_varied = bool(mcmc.langevin_noise or mcmc.replay_buffer or len(mcmc.counts()) > 1)
    facts = next_token_facts(system.data, model)
    oracle = facts.pop("oracle")

    def run_steps(contexts: list[Context], counter_BT: Tensor) -> Tensor:
        z_BTV, seen = initial_predictions(system.noise, mcmc, counter_BT, INITIAL, model.embed.weight.dtype), []
        for number in range(mcmc.num_steps):
            z_BTV = z_BTV if mcmc.backprop_through == "all" else z_BTV.detach()
            z_BTV = optimize_step(model, contexts, z_BTV, number, system.alpha(), mcmc.space).z_BTV
            seen.append(z_BTV)
        return torch.stack(seen if mcmc.loss == "each" else seen[-1:], 2)

    def cached(tokens_BT: Tensor) -> Tensor:
        caches, seen = model.new_caches(len(tokens_BT)), []
        for t in range(tokens_BT.shape[1]):
            contexts = model.per_landscape([model.decode_token(cache, tokens_BT[:, t : t + 1]) for cache in caches])
            seen.append(run_steps(contexts, counter_BT[: len(tokens_BT), t : t + 1]))
        return torch.cat(seen, 1)

    from seedbed.recipes.ebt import definitions

    return Probe(
        definitions=definitions.of(system),
        batch={"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:], "counters": counter_BT},
        predict=lambda b: run_steps(model.encode_context(b["inputs"]), b["counters"][:, : b["inputs"].shape[1]]),
        objective=lambda z_BTKV, b: torch.stack([cross_entropy(z, b["targets"]) for z in z_BTKV.unbind(2)]).mean(),
        at_positions=lambda b, positions_T: run_steps(model.encode_context(b["inputs"], positions_T), b["counters"]),
        cached=cached,
        # A landscape that is the context's first token has position 0, so positions are absolute.
        positions="absolute" if model.num_prefix else "relative",
        held=lambda: _held(system, batch),
        trains_at_end=system.config.model.control,
        options=_options(system, batch["tokens"].tolist()) if mcmc.initial_condition == "normal" else None,
        calls=None if is_varied or mcmc.initial_condition == "zeros" else {"model": ("noise", mcmc.num_steps)},
        oracle=lambda b: oracle(b)[:, :, None].expand(-1, -1, mcmc.num_steps if mcmc.loss == "each" else 1, -1),
        **facts,
    )


def _options(system: EnergySystem, prompts: list[list[int]]) -> dict[str, tuple[tuple[float, ...], Callable[[Any], Tensor]]]:
    """More initial predictions: a lower energy of the next token. Earlier stops: fewer steps."""

    def next_token(column: str, **options: Any) -> Tensor:
        asked = dict.fromkeys(("optimize_steps", "best_of", "early_stop")) | options
        decoder: Any = system.decoder(prompts, 1, Sampling(0.0), 1, False, **asked)
        next(iter(decoder.run(1, 1)))
        return getattr(decoder.initial, column).sum(1)  # zero but for this token

    return {
        "best_of": ((1, 2, 8), lambda num: next_token("energy_BL", best_of=num)),
        "early_stop": ((0.0, 0.1, 1e9), lambda drop: next_token("steps_BL", optimize_steps=8, early_stop=drop)),
    }


@torch.no_grad()
def _held(system: EnergySystem, batch: Batch) -> Callable[[], Tensor]:
    """The training loss as a function of the weights alone; the input of each step is held where gradients stop there."""
    alpha, rows, log_alpha = system.alpha(), system.initial_batch(batch), system.log_alpha
    engine = EvalEngine(system, system.config, alpha.device)
    engine.variant = (system.variant(0, system.config.steps)[0], False)

    def loss(factor: float = 1.0) -> Tensor:
        known = {"alpha": lambda mean: factor * alpha, "initial_batch": lambda batch: rows}
        with patch.multiple(system, **known), patch.object(ReplayBuffer, "store"):
            return system.loss(batch, engine)[0]

    fixed = held(loss)
    if log_alpha is None:
        return fixed
    # The step size is held too: its gradient is clipped and scaled on purpose (`SeparateClip`). A linear term replaces it.
    slope = (fixed(math.exp(PROBED)) - fixed(math.exp(-PROBED))) / (2 * PROBED)
    size, slope = log_alpha.detach().clone(), SeparateClip.SCALE * slope.clamp(-1.0, 1.0)
    return lambda: fixed() + slope * (log_alpha - size)


def build_plain_probe(system: PlainSystem, batch: Batch) -> Probe:
    """The plain transformer's forward pass, and what to expect of it."""
    model = system.model

    def cached(tokens_BT: Tensor) -> Tensor:
        cache, seen = model.new_cache(len(tokens_BT)), []
        for t in range(tokens_BT.shape[1]):
            seen.append(model(tokens_BT[:, t : t + 1], model.rope(cache.length_B[:, None]), cache.decode()))
            cache.length_B += 1
        return torch.cat(seen, 1)

    return Probe(
        batch={"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:]},
        predict=lambda b: system.logits(b["inputs"]),
        objective=lambda logits_BTV, b: cross_entropy(logits_BTV, b["targets"]),
        at_positions=lambda b, positions_T: model(b["inputs"], model.rope(positions_T)),
        cached=cached,
        positions="relative",
        **next_token_facts(system.data, model),
    )
