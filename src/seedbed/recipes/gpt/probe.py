"""Probe of the gpt system for the checks, made of the code that trains it. B rows, T time, V vocabulary."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seedbed.data.text_facts import decode_row, reencode, text_of
from seedbed.recipes.gpt.model import Transformer
from seedbed.train.engine import EvalEngine
from seedbed.train.probe import Probe

if TYPE_CHECKING:
    from seedbed.recipes.gpt.system import GPT


def build_probe(system: GPT, batch: dict[str, Tensor]) -> Probe:
    """The model, the inputs that `loss` gives it, and what to expect of it."""
    model, data = system.model, system.data
    inputs_BT, targets_BT = _fed(system, batch)
    text = text_of(data)
    return Probe(
        batch={"inputs": inputs_BT, "targets": targets_BT},
        predict=lambda b: _logits(model, b["inputs"], b["targets"]),
        objective=lambda logits_BTV, b: _score(model, logits_BTV, b["targets"]),
        inputs="inputs",
        targets="targets",
        rule=lambda b: F.pad(b["inputs"][:, 1:], (0, 1), value=-1),
        ranges={name: (0, model.vocab - 1) for name in ("tokens", "inputs", "targets")},
        oracle=lambda b: 50.0 * F.one_hot(b["targets"], model.vocab).to(model.embed.weight.dtype),
        lower_bound=0.0,
        order="causal",
        positions=model.positions.effect,
        at_positions=lambda b, positions_T: model.read_out(
            model.hidden(b["inputs"], model.position_tables(b["inputs"], positions_T))
        ),
        at_init=lambda b: math.log(model.vocab),
        baselines=system.baselines,
        decode=None if data.tokenizer is None else functools.partial(decode_row, data.tokenizer),
        holds=None if text is None else lambda part: all(piece in text() for piece in part.split("\ufffd")),
        reencode=None if text is None else lambda: reencode(data),
        cached=lambda tokens_BT: _cached(model, tokens_BT),
    )


def _fed(system: GPT, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs and targets that `loss` passes to the model."""
    seen: list[Any] = []
    hook = system.model.register_forward_pre_hook(lambda module, args: seen.extend(args))
    try:
        with torch.no_grad():
            system.loss(batch, EvalEngine(system, system.config, batch["tokens"].device))
    finally:
        hook.remove()
    return seen[0], seen[1]


def _logits(model: Transformer, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """The logits of the loss, from the head's inputs in the training forward."""
    seen: list[Any] = []
    hook = model.head.register_forward_pre_hook(lambda module, args: seen.extend(args[:2]))
    try:
        model(inputs_BT, targets_BT)
    finally:
        hook.remove()
    return model.head.logits(*seen)[..., : model.vocab]


class _LinearGivesInput(TorchFunctionMode):
    """A linear layer returns its input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is F.linear else func(*args, **(kwargs or {}))


def _score(model: Transformer, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The head's loss of given logits, without its norm and its linear layer."""
    head, norm = model.head, model.head.norm
    padded = F.pad(logits_BTV, (0, len(model.head_weight) - model.vocab))
    head.norm, head.logits = nn.Identity(), lambda x_BTC, weight_VC: x_BTC  # type: ignore[method-assign]
    try:
        with _LinearGivesInput():
            return head(padded, model.head_weight, targets_BT)
    finally:
        head.norm = norm
        del head.logits


def _cached(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Logits made one token at a time through the cache."""
    cache, seen = model.new_cache(len(tokens_BT)), []
    for t in range(tokens_BT.shape[1]):
        x_B1C = model.hidden(tokens_BT[:, t : t + 1], model.position_tables(tokens_BT, cache.length_B[:, None]), cache.decode())
        cache.length_B += 1
        seen.append(model.read_out(x_B1C))
    return torch.cat(seen, dim=1)
