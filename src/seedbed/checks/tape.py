"""The random numbers of a step on a tape: recorded once, played back in another dtype, on another device, for fewer rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What draws numbers and gives nothing else. Kernels that draw inside (fused attention) keep their own dice.
_DRAWS = ("rand", "normal", "bernoulli", "uniform", "exponential", "multinomial", "poisson", "cauchy", "geometric", "random")


def draws(func: Any) -> bool:
    """Whether an operation's result is made of random numbers alone."""
    name = func._schema.name.removeprefix("aten::")
    return torch.Tag.nondeterministic_seeded in func.tags and name.startswith((*_DRAWS, "log_normal"))


def is_dropout(func: Any) -> bool:
    return func._schema.name == "aten::native_dropout"


class Recorder(TorchDispatchMode):
    """Copies every draw onto the tape; what is computed stays as it is."""

    def __init__(self, tape: list[Tensor]) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_dropout(func):
            self.tape.append(out[1].clone())
        elif draws(func) and isinstance(out, Tensor):
            self.tape.append(out.clone())
        return out


class Player(TorchDispatchMode):
    """Gives the draws of a tape instead of new ones; of draws with a row per item, only `rows` of `num_rows`."""

    def __init__(self, tape: list[Tensor], rows: list[int] | None = None, num_rows: int = 0) -> None:
        super().__init__()
        self.tape, self.rows, self.num_rows, self.turn = tape, rows, num_rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_dropout(func) and (mask := self._next(args[0].shape)) is not None:
            mask = mask.to(args[0].device)
            return args[0] * mask * (1.0 / max(1.0 - args[1], 1e-12)), mask
        out = func(*args, **(kwargs or {}))
        if draws(func) and isinstance(out, Tensor) and (drawn := self._next(out.shape)) is not None:
            out.copy_(drawn)
        return out

    def _next(self, shape: torch.Size) -> Tensor | None:
        """The next draw in the wanted shape; None, hence a new draw, when the course has left the tape."""
        if self.turn >= len(self.tape):
            return None
        drawn = self.tape[self.turn]
        self.turn += 1
        if self.rows is not None and drawn.ndim and len(drawn) == self.num_rows:
            drawn = drawn[self.rows]
        return drawn if drawn.shape == shape else None
