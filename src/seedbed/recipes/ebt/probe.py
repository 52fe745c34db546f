"""The ebt systems opened up for the checks, by the code that trains them.

Shape suffixes: B rows, T time, L tokens of a block, K steps of the walk, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.data.text_facts import decode_row, entropy, reencode, text_of
from seedbed.recipes.ebt.objective import cross_entropy
from seedbed.recipes.ebt.walk import STARTS, first_candidates, take_step
from seedbed.train.probe import Probe

if TYPE_CHECKING:
    from seedbed.recipes.ebt.model import Memory
    from seedbed.recipes.ebt.system import EnergySystem, PlainSystem

Batch = dict[str, Tensor]


def open_up(system: EnergySystem, batch: Batch) -> Probe:
    """What candidates become, step by step, from starts that lie in the batch, and what to expect of it."""
    model, walk = system.model, system.walk
    start_BTV = first_candidates(system.draw, walk, system.places(batch["index"]), STARTS, model.embed.weight.dtype)
    opened = {"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:], "start": start_BTV}

    def steps(memories: list[Memory], z_BTV: Tensor) -> Tensor:
        seen, alpha = [], system.alpha()
        for number in range(walk.steps):
            z_BTV = take_step(
                model, memories, z_BTV if walk.through == "all" else z_BTV.detach(), number, alpha, walk.space
            ).z_BTV
            seen.append(z_BTV)
        return torch.stack(seen if walk.loss == "each" else seen[-1:], 2)

    return Probe(
        batch=opened,
        predict=lambda b: steps(model.read(b["inputs"]), b["start"]),
        objective=lambda z_BTKV, b: torch.stack([cross_entropy(z, b["targets"]) for z in z_BTKV.unbind(2)]).mean(),
        oracle=lambda b: _oracle(b, model.vocab)[:, :, None].expand(-1, -1, walk.steps if walk.loss == "each" else 1, -1),
        at_positions=lambda b, places_T: steps(model.read(b["inputs"], places_T), b["start"]),
        cached=lambda tokens_BT: _cached(system, tokens_BT, start_BTV, steps),
        **_text_facts(system),
    )


def open_up_plain(system: PlainSystem, batch: Batch) -> Probe:
    """The control's forward pass, and what to expect of it."""
    model = system.model
    return Probe(
        batch={"inputs": batch["tokens"][:, :-1], "targets": batch["tokens"][:, 1:]},
        predict=lambda b: system.logits(b["inputs"]),
        objective=lambda logits_BTV, b: cross_entropy(logits_BTV, b["targets"]),
        oracle=lambda b: _oracle(b, model.vocab),
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


def _oracle(batch: Batch, vocab: int) -> Tensor:
    return 50.0 * F.one_hot(batch["targets"], vocab).to(batch["start"].dtype if "start" in batch else torch.float32)


def _cached(system: EnergySystem, tokens_BT: Tensor, start_BTV: Tensor, steps: Any) -> Tensor:
    """The same, one token at a time through the caches that generation uses."""
    model, seen = system.model, []
    caches = model.new_caches(len(tokens_BT))
    for t in range(tokens_BT.shape[1]):
        memories = model.for_landscapes([model.remember(cache, tokens_BT[:, t : t + 1]) for cache in caches])
        seen.append(steps(memories, start_BTV[: len(tokens_BT), t : t + 1]))
    return torch.cat(seen, 1)


def _plain_cached(system: PlainSystem, tokens_BT: Tensor) -> Tensor:
    cache, seen = system.model.new_cache(len(tokens_BT)), []
    for t in range(tokens_BT.shape[1]):
        seen.append(system.model(tokens_BT[:, t : t + 1], system.model.rope(cache.length_B[:, None]), cache.decode()))
        cache.length_B += 1
    return torch.cat(seen, 1)
