"""Records the random numbers of a step and replays them in another dtype, on another device, or for fewer rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that only draw random numbers. Kernels that draw inside (fused attention) are not covered.
_DRAWS = ("rand", "normal", "bernoulli", "uniform", "exponential", "multinomial", "poisson", "cauchy", "geometric", "random")


class RecordDraws(TorchDispatchMode):
    """Records every random draw; computation is unchanged."""

    def __init__(self, draws: list[Tensor]) -> None:
        super().__init__()
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_dropout(func):
            self.draws.append(out[1].clone())
        elif is_random(func) and isinstance(out, Tensor):
            self.draws.append(out.clone())
        return out


class ReplayDraws(TorchDispatchMode):
    """Replays recorded draws; of draws with a row per item, only `rows` of `num_rows`."""

    def __init__(self, draws: list[Tensor], rows: list[int] | None = None, num_rows: int = 0) -> None:
        super().__init__()
        self.draws, self.rows, self.num_rows, self.position = draws, rows, num_rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_dropout(func) and (mask := self._next(args[0].shape)) is not None:
            mask = mask.to(args[0].device)
            return args[0] * mask * (1.0 / max(1.0 - args[1], 1e-12)), mask
        out = func(*args, **(kwargs or {}))
        if is_random(func) and isinstance(out, Tensor) and (drawn := self._next(out.shape)) is not None:
            out.copy_(drawn)
        return out

    def _next(self, shape: torch.Size) -> Tensor | None:
        """The next draw in the wanted shape; None, hence a new draw, when the execution differs from the recorded one."""
        if self.position >= len(self.draws):
            return None
        drawn = self.draws[self.position]
        self.position += 1
        if self.rows is not None and drawn.ndim and len(drawn) == self.num_rows:
            drawn = drawn[self.rows]
        return drawn if drawn.shape == shape else None


def is_random(func: Any) -> bool:
    """Whether an operation's result consists of random numbers alone."""
    name = func._schema.name.removeprefix("aten::")
    return torch.Tag.nondeterministic_seeded in func.tags and name.startswith((*_DRAWS, "log_normal"))


def is_dropout(func: Any) -> bool:
    return func._schema.name == "aten::native_dropout"
