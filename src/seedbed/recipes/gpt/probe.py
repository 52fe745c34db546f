"""Probe of the gpt system for the checks, made of the code that trains it. B rows, T time, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seedbed.data.text_facts import next_token_facts
from seedbed.recipes.gpt.model import Transformer
from seedbed.train.engine import EvalEngine
from seedbed.train.probe import Probe

if TYPE_CHECKING:
    from seedbed.recipes.gpt.system import GPT


def build_probe(system: GPT, batch: dict[str, Tensor]) -> Probe:
    """The model, the inputs that `loss` gives it, and what to expect of it."""
    model = system.model
    engine = EvalEngine(system, system.config, batch["tokens"].device)
    with torch.no_grad():
        inputs_BT, targets_BT, *_ = _given_to(model, lambda: system.loss(batch, engine))
    from seedbed.recipes.gpt import definitions

    return Probe(
        definitions={"model": lambda: definitions.model(system)},
        batch={"inputs": inputs_BT, "targets": targets_BT},
        predict=lambda b: _logits(model, b["inputs"], b["targets"]),
        objective=lambda logits_BTV, b: _score(model, logits_BTV, b["targets"]),
        positions=model.positions.effect,
        at_positions=lambda b, positions_T: model.read_out(
            model.hidden(b["inputs"], model.position_tables(b["inputs"], positions_T))
        ),
        at_init=lambda b: math.log(model.vocab),
        cached=lambda tokens_BT: _cached(model, tokens_BT),
        **next_token_facts(system.data, model),
    )


def _given_to(module: nn.Module, run: Callable[[], Any]) -> list[Any]:
    """The arguments that a module is called with in `run`."""
    given: list[Any] = []
    hook = module.register_forward_pre_hook(lambda module, args: given.extend(args))
    try:
        run()
    finally:
        hook.remove()
    return given


def _logits(model: Transformer, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """The logits of the loss, from the head's inputs in the training forward."""
    x_BTC, weight_VC, _ = _given_to(model.head, lambda: model(inputs_BT, targets_BT))
    return model.head.logits(x_BTC, weight_VC)[..., : model.vocab]


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
