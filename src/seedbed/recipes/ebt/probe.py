"""The ebt systems opened up for the checks, by the code that trains them.

Shape suffixes: B rows, T time, L tokens of a block, K steps of the walk, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.data.text_facts import decode_row, entropy, reencode, text_of
from seedbed.recipes.ebt.objective import cross_entropy, noised, step_sizes
from seedbed.recipes.ebt.walk import STARTS, first_candidates, take_step
from seedbed.train.probe import Probe

if TYPE_CHECKING:
    from seedbed.recipes.ebt.model import EnergyModel, Memory, PlainModel
    from seedbed.recipes.ebt.system import EnergySystem, PlainSystem

Batch = dict[str, Tensor]


def open_up(system: EnergySystem, batch: Batch) -> Probe:
    """What candidates become, step by step, from starts that the places of the batch decide, and what to expect of it."""
    model, walk = system.model, system.walk
    places_BT = system.places(batch["index"])

    def walk_on(memories: list[Memory], place_BT: Tensor) -> Tensor:
        z_BTV, seen = first_candidates(system.draw, walk, place_BT, STARTS, model.embed.weight.dtype), []
        for number in range(walk.steps):
            z_BTV = z_BTV if walk.through == "all" else z_BTV.detach()
            z_BTV = take_step(model, memories, z_BTV, number, system.alpha(), walk.space).z_BTV
            seen.append(z_BTV)
        return torch.stack(seen if walk.loss == "each" else seen[-1:], 2)

    def cached(tokens_BT: Tensor) -> Tensor:
        caches, seen = model.new_caches(len(tokens_BT)), []
        for t in range(tokens_BT.shape[1]):
            memories = model.for_landscapes([model.remember(cache, tokens_BT[:, t : t + 1]) for cache in caches])
            seen.append(walk_on(memories, places_BT[: len(tokens_BT), t : t + 1]))
        return torch.cat(seen, 1)

    return Probe(
        batch={"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:], "places": places_BT},
        predict=lambda b: walk_on(model.read(b["inputs"]), b["places"][:, : b["inputs"].shape[1]]),
        objective=lambda z_BTKV, b: torch.stack([cross_entropy(z, b["targets"]) for z in z_BTKV.unbind(2)]).mean(),
        oracle=lambda b: _oracle(b, model)[:, :, None].expand(-1, -1, walk.steps if walk.loss == "each" else 1, -1),
        at_positions=lambda b, places_T: walk_on(model.read(b["inputs"], places_T), b["places"]),
        cached=cached,
        held=None if walk.through == "all" else lambda: _held(system, batch),
        **_text_facts(system),
    )


@torch.no_grad()
def _held(system: EnergySystem, batch: Batch) -> Callable[[], Tensor]:
    """The training loss as a function of the weights alone, what each step starts from being held where it is now."""
    model = system.model
    walk, num_steps = system.calm(system.variant(0, system.config.steps)[0])
    tokens_BL, z_BTV, place_BT, *_ = system.begin(batch)
    # Held too: the step size's own gradient is made small on purpose.
    sizes = step_sizes(walk, system.alpha(), system.config.seed, place_BT)
    found: list[Tensor] = []

    def go(starts: list[Tensor] | None) -> Tensor:
        memories, nats, z = model.read(tokens_BL[:, :-1]), [], z_BTV
        for number in range(num_steps):
            if starts is None:
                found.append(noised(z, place_BT, number, walk, system.draw))
            z = take_step(model, memories, (starts or found)[number], number, sizes, walk.space).z_BTV
            nats.append(cross_entropy(z, tokens_BL[:, 1:]))
        return torch.stack(nats).mean() if walk.loss == "each" else nats[-1]

    go(None)
    return lambda: go(found)


def open_up_plain(system: PlainSystem, batch: Batch) -> Probe:
    """The control's forward pass, and what to expect of it."""
    model = system.model
    return Probe(
        batch={"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:]},
        predict=lambda b: system.logits(b["inputs"]),
        objective=lambda logits_BTV, b: cross_entropy(logits_BTV, b["targets"]),
        oracle=lambda b: _oracle(b, model),
        at_positions=lambda b, places_T: model(b["inputs"], model.rope(places_T)),
        cached=lambda tokens_BT: _plain_cached(system, tokens_BT),
        **_text_facts(system),
    )


def _text_facts(system: EnergySystem | PlainSystem) -> dict[str, Any]:
    """What holds of any next-token task on this text."""
    model, data, text = system.model, system.data, text_of(system.data)
    return {
        "inputs": "inputs",
        "targets": "targets",
        "rule": lambda b: F.pad(b["inputs"][:, 1:], (0, 1), value=-1),
        "ranges": {name: (0, model.vocab - 1) for name in ("tokens", "inputs", "targets")},
        "lower_bound": 0.0,
        "order": "causal",
        "positions": "relative",
        "baselines": lambda b: {"unigram entropy": entropy(data.train.tokens, model.vocab)},
        "decode": None if data.tokenizer is None else functools.partial(decode_row, data.tokenizer),
        "holds": None if text is None else lambda part: all(piece in text() for piece in part.split("\ufffd")),
        "reencode": None if text is None else lambda: reencode(data, text()),
    }


def _oracle(batch: Batch, model: EnergyModel | PlainModel) -> Tensor:
    return 50.0 * F.one_hot(batch["targets"], model.vocab).to(model.embed.weight.dtype)


def _plain_cached(system: PlainSystem, tokens_BT: Tensor) -> Tensor:
    cache, seen = system.model.new_cache(len(tokens_BT)), []
    for t in range(tokens_BT.shape[1]):
        seen.append(system.model(tokens_BT[:, t : t + 1], system.model.rope(cache.length_B[:, None]), cache.decode()))
        cache.length_B += 1
    return torch.cat(seen, 1)
