"""Where gradients stop on purpose, and the loss as a function of the weights with what passes there held."""

from collections.abc import Callable, Hashable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from seedbed.train.engine import EvalEngine

_replaced: Callable[[Tensor], Tensor] | None = None


def stop_gradient(x: Tensor) -> Tensor:
    """The same values, of which the weights get no gradient."""
    return x.detach() if _replaced is None else _replaced(x)


@torch.no_grad()
def held(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss with what `stop_gradient` returns at its present values: its slope is the gradient that training uses."""
    seen: list[Tensor] = []

    def record(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    def replayed(*given: float) -> Tensor:
        values = iter(seen)
        with patch(f"{__name__}._replaced", lambda x: next(values)):
            return loss(*given)

    with patch(f"{__name__}._replaced", record):
        loss()
    return replayed


def held_loss(system: Any, batch: dict[str, Tensor], variant: Hashable = None) -> Callable[[], Tensor]:
    """`held` of a system's training loss on a batch."""
    engine = EvalEngine(system, system.config, next(system.parameters()).device)
    engine.variant = variant
    return held(lambda: system.loss(batch, engine)[0])
