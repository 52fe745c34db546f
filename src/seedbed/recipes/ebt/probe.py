"""Probes of the ebt systems for the checks, made of the code that trains them.

Shape suffixes: B rows, T time, L tokens of a block, K optimisation steps, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.data.text_facts import decode_row, reencode, text_of
from seedbed.recipes.ebt.objective import add_langevin_noise, cross_entropy, step_sizes
from seedbed.recipes.ebt.optimize import INITIAL, SeparateClip, initial_predictions, optimize_step
from seedbed.train.probe import Probe

if TYPE_CHECKING:
    from seedbed.recipes.ebt.model import Context, EnergyModel, PlainModel
    from seedbed.recipes.ebt.system import EnergySystem, PlainSystem

Batch = dict[str, Tensor]
# Finite-difference step of the logarithm of the step size.
PROBED = 1e-3


def build_probe(system: EnergySystem, batch: Batch) -> Probe:
    """Predictions after each step, from initial ones that the counters of the batch decide, and what to expect of them."""
    model, mcmc = system.model, system.mcmc
    counter_BT = system.counters(batch["index"])

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

    return Probe(
        batch={"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:], "counters": counter_BT},
        predict=lambda b: run_steps(model.encode_context(b["inputs"]), b["counters"][:, : b["inputs"].shape[1]]),
        objective=lambda z_BTKV, b: torch.stack([cross_entropy(z, b["targets"]) for z in z_BTKV.unbind(2)]).mean(),
        oracle=lambda b: _oracle(b, model)[:, :, None].expand(-1, -1, mcmc.num_steps if mcmc.loss == "each" else 1, -1),
        at_positions=lambda b, positions_T: run_steps(model.encode_context(b["inputs"], positions_T), b["counters"]),
        cached=cached,
        held=None if mcmc.backprop_through == "all" else lambda: _held(system, batch),
        **_text_facts(system),
    )


@torch.no_grad()
def _held(system: EnergySystem, batch: Batch) -> Callable[[], Tensor]:
    """The training loss as a function of the weights alone, with the input of each step held at its present value."""
    model, alpha = system.model, system.alpha()
    mcmc, num_steps = system.mcmc_settings(system.variant(0, system.config.steps)[0])
    tokens_BL, z_BTV, counter_BT, *_ = system.initial_batch(batch)
    inputs: list[Tensor] = []

    def go(held: list[Tensor] | None, factor: float = 1.0) -> Tensor:
        sizes = step_sizes(mcmc, factor * alpha, system.config.seed, counter_BT)
        contexts, nats, z = model.encode_context(tokens_BL[:, :-1]), [], z_BTV
        for number in range(num_steps):
            if held is None:
                inputs.append(add_langevin_noise(z, counter_BT, number, mcmc, system.noise))
            z = optimize_step(model, contexts, (held or inputs)[number], number, sizes, mcmc.space).z_BTV
            nats.append(cross_entropy(z, tokens_BL[:, 1:]))
        return torch.stack(nats).mean() if mcmc.loss == "each" else nats[-1]

    go(None)
    log_alpha = system.log_alpha
    if log_alpha is None:
        return lambda: go(inputs)
    # The step size is held too: its gradient is clipped and scaled on purpose (`SeparateClip`). A linear term replaces it.
    slope = (go(inputs, math.exp(PROBED)) - go(inputs, math.exp(-PROBED))) / (2 * PROBED)
    size, slope = log_alpha.detach().clone(), SeparateClip.SCALE * slope.clamp(-1.0, 1.0)
    return lambda: go(inputs) + slope * (log_alpha - size)


def build_plain_probe(system: PlainSystem, batch: Batch) -> Probe:
    """The plain transformer's forward pass, and what to expect of it."""
    model = system.model
    return Probe(
        batch={"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:]},
        predict=lambda b: system.logits(b["inputs"]),
        objective=lambda logits_BTV, b: cross_entropy(logits_BTV, b["targets"]),
        oracle=lambda b: _oracle(b, model),
        at_positions=lambda b, positions_T: model(b["inputs"], model.rope(positions_T)),
        cached=lambda tokens_BT: _plain_cached(system, tokens_BT),
        **_text_facts(system),
    )


def _text_facts(system: EnergySystem | PlainSystem) -> dict[str, Any]:
    """The properties of any next-token task on this text."""
    model, data, text = system.model, system.data, text_of(system.data)
    return {
        "inputs": "inputs",
        "targets": "targets",
        "rule": lambda b: F.pad(b["inputs"][:, 1:], (0, 1), value=-1),
        "ranges": {name: (0, model.vocab - 1) for name in ("tokens", "inputs", "targets")},
        "lower_bound": 0.0,
        "order": "causal",
        # A landscape that is the context's first token has position 0, so positions are absolute.
        "positions": "absolute" if getattr(model, "num_prefix", 0) else "relative",
        "baselines": lambda b: {"unigram entropy": data.unigram_entropy()},
        "decode": None if data.tokenizer is None else functools.partial(decode_row, data.tokenizer),
        "holds": None if text is None else lambda part: all(piece in text() for piece in part.split("\ufffd")),
        "reencode": None if text is None else lambda: reencode(data),
    }


def _oracle(batch: Batch, model: EnergyModel | PlainModel) -> Tensor:
    return 50.0 * F.one_hot(batch["targets"], model.vocab).to(model.embed.weight.dtype)


def _plain_cached(system: PlainSystem, tokens_BT: Tensor) -> Tensor:
    cache, seen = system.model.new_cache(len(tokens_BT)), []
    for t in range(tokens_BT.shape[1]):
        seen.append(system.model(tokens_BT[:, t : t + 1], system.model.rope(cache.length_B[:, None]), cache.decode()))
        cache.length_B += 1
    return torch.cat(seen, 1)
