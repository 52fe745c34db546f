"""An exponential moving average of the weights, updated on the device and swapped in for evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from seedbed.dist import local


class Ema:
    """Averaged weights; `decay` is reached by a warm-up, so that a short run does not average over its initialisation."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = {n: local(p) for n, p in module.named_parameters() if p.requires_grad}
        self.shadow = {n: p.detach().clone() for n, p in self.live.items()}

    def weight(self, step: int) -> float:
        """The share of the new weights after `step` steps: 1 - min(decay, (1 + step) / (10 + step))."""
        return 1.0 - min(self.decay, (1.0 + step) / (10.0 + step))

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        shadow = list(self.shadow.values())
        change = torch._foreach_sub(list(self.live.values()), shadow)
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(shadow, change)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the live parameters hold the average, by value: captured graphs keep their addresses."""
        kept = {n: p.detach().clone() for n, p in self.live.items()}
        self._fill(self.shadow)
        try:
            yield
        finally:
            self._fill(kept)

    @torch.no_grad()
    def _fill(self, values: dict[str, Tensor]) -> None:
        torch._foreach_copy_(list(self.live.values()), list(values.values()))
