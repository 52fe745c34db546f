"""Torch modes that observe operations (broadcasting over rows, reductions, attention, activations) or round their results;
and modes that record the random numbers of a step and replay them: in another dtype, on another device, or for fewer rows."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from seedbed.checks.subject import is_installed, short

_ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "truediv", "true_divide", "pow", "where", "maximum", "minimum", "eq"}
_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
_BOUNDED = {torch.tanh: "tanh", torch.sigmoid: "sigmoid", Tensor.tanh: "tanh", Tensor.sigmoid: "sigmoid"}
_HALF = {F.relu: "relu", torch.relu: "relu", Tensor.relu: "relu", F.gelu: "gelu", F.silu: "silu", F.elu: "elu"}
_SATURATED = 0.999
# Operations that only draw random numbers. Kernels that draw inside (fused attention) are not covered.
_DRAWS = ("rand", "normal", "bernoulli", "uniform", "exponential", "multinomial", "poisson", "cauchy", "geometric", "random")
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)


class Watch(TorchFunctionMode):
    """Calls `see` after every torch function; `line` is that of what it looks for, `found` all that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.found = "", list[Any]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(func, args, kwargs or {}, out)
        return out

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        raise NotImplementedError


class Broadcasts(Watch):
    """Elementwise operations whose result has the batch size twice although no operand has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = getattr(func, "__name__", "").strip("_")
        if name in _ARITHMETIC or name in _LOSSES:
            operands = [a for a in args if isinstance(a, Tensor)]
            # Not torch.broadcast_shapes: it imports sympy, which takes seconds.
            shape = np.broadcast_shapes(*(tuple(a.shape) for a in operands)) if len(operands) > 1 else ()
            if shape.count(self.size) > 1 and all(tuple(a.shape).count(self.size) == 1 for a in operands if a.numel() > 1):
                self.found.append(caller())


class Reductions(Watch):
    """The line of the last operation of the recipe that reduces a tensor with a gradient to a scalar: that of the loss."""

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        many = args and isinstance(args[0], Tensor) and args[0].numel() > 1 and args[0].is_floating_point()
        if many and isinstance(out, Tensor) and out.ndim == 0 and out.requires_grad:
            found = caller()
            self.line = self.line if found.startswith("seedbed/train/") else found


class DispatchMode(TorchDispatchMode):
    """A mode whose calls do not load the compiler, which takes seconds; what it watches runs eagerly."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class RoundedProducts(DispatchMode):
    """Matrix products, convolutions and attention in float32, forward and backward, with operands and results rounded to bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(word in func.overloadpacket.__name__ for word in ("mm", "convolution", "scaled_dot_product")):
            return func(*args, **(kwargs or {}))
        return tree_map(_rounded, func(*tree_map(_rounded, args), **(kwargs or {})))


def _rounded(value: Any) -> Any:
    return value.bfloat16().float() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


class Operations(Watch):
    """Counts calls of torch functions."""

    num = 0

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.num += 1


class Lookups(Watch):
    """The rows of tables that each embedding lookup reads, and the line of the last one."""

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func is F.embedding:
            self.found.append({*args[0].flatten().tolist()})
            self.line = caller()


class Integers(TorchFunctionMode):
    """The integer tensors that functions get."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tensors += [a.clone() for a in args if isinstance(a, Tensor) and a.dtype == torch.int64]
        return func(*args, **(kwargs or {}))


class Attentions(Watch):
    """The first line that calls attention."""

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func is F.scaled_dot_product_attention and not self.line:
            self.line = caller()


class ActiveDropout(Watch):
    """The first line that drops values; in evaluation mode there should be none."""

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        place, name, default = (4, "dropout_p", 0.0) if func is F.scaled_dot_product_attention else (1, "p", 0.5)
        words = dict(enumerate(args)) | kwargs
        is_on = (func in _DROPOUTS and words.get("training", words.get(2, True))) or func is F.scaled_dot_product_attention
        if is_on and words.get(name, words.get(place, default)) > 0 and not self.line:
            self.line = caller()


@dataclass(frozen=True)
class Activation:
    """One call: the share of dead or saturated units."""

    name: str
    where: str
    dead: float
    state: str


class Activations(Watch):
    """Calls of activation functions with the share of dead or saturated units (entries of the last axis)."""

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func in _BOUNDED or func in _HALF:
            flat = out.detach().reshape(-1, out.shape[-1]) if out.ndim else out.reshape(1, 1)
            if func in _BOUNDED:
                edge = flat.abs() > _SATURATED if _BOUNDED[func] == "tanh" else (flat > _SATURATED) | (flat < 1 - _SATURATED)
                bad, name, state = edge, _BOUNDED[func], "saturated"
            else:
                bad, name, state = flat.abs() < 1e-6, _HALF[func], "dead"
            self.found.append(Activation(name, caller(), bad.all(0).double().mean().item(), state))


class RecordDraws(DispatchMode):
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


class ReplayDraws(DispatchMode):
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


def caller(own: Path = Path(__file__).parent, unknown: str = "?") -> str:
    """The innermost source line that is neither in the folder `own`, that of the checks, nor of a library."""
    frame = sys._getframe(1)
    while frame and (frame.f_code.co_filename.startswith(str(own)) or is_installed(frame.f_code.co_filename)):
        frame = frame.f_back
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_qualname}" if frame else unknown
