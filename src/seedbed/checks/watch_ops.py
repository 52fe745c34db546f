"""Torch modes that observe operations (broadcasting over rows, reductions, attention, activations) or round their results."""

from __future__ import annotations

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
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)


class Broadcasts(TorchFunctionMode):
    """Elementwise operations whose result has the batch size twice although no operand has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.places = size, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name in _ARITHMETIC or name in _LOSSES:
            operands = [a for a in args if isinstance(a, Tensor)]
            # Not torch.broadcast_shapes: it imports sympy, which takes seconds.
            shape = np.broadcast_shapes(*(tuple(a.shape) for a in operands)) if len(operands) > 1 else ()
            if shape.count(self.size) > 1 and all(tuple(a.shape).count(self.size) == 1 for a in operands if a.numel() > 1):
                self.places.append(caller())
        return out


class _FirstLine(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.line = ""


class Reductions(_FirstLine):
    """The line of the first floating-point operation of the recipe that reduces a tensor to a scalar."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        many = args and isinstance(args[0], Tensor) and args[0].numel() > 1 and args[0].is_floating_point()
        if many and isinstance(out, Tensor) and out.ndim == 0 and out.is_floating_point() and not self.line:
            found = caller()
            self.line = "" if found.startswith("seedbed/train/") else found
        return out


class RoundedProducts(TorchDispatchMode):
    """Matrix products, convolutions and attention in float32, forward and backward, with operands and results rounded to bf16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(word in func.overloadpacket.__name__ for word in ("mm", "convolution", "scaled_dot_product")):
            return func(*args, **(kwargs or {}))
        return tree_map(_rounded, func(*tree_map(_rounded, args), **(kwargs or {})))


def _rounded(value: Any) -> Any:
    return value.bfloat16().float() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


class Operations(TorchFunctionMode):
    """Counts calls of torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


class Attentions(_FirstLine):
    """The first line that calls attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not self.line:
            self.line = caller()
        return func(*args, **(kwargs or {}))


class ActiveDropout(_FirstLine):
    """The first line that drops values; in evaluation mode there should be none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, name, default = (4, "dropout_p", 0.0) if func is F.scaled_dot_product_attention else (1, "p", 0.5)
        words = dict(enumerate(args)) | (kwargs or {})
        is_on = (func in _DROPOUTS and words.get("training", words.get(2, True))) or func is F.scaled_dot_product_attention
        if is_on and words.get(name, words.get(place, default)) > 0 and not self.line:
            self.line = caller()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Activation:
    """One call: the share of dead or saturated units."""

    name: str
    where: str
    dead: float
    state: str


class Activations(TorchFunctionMode):
    """Calls of activation functions with the share of dead or saturated units (entries of the last axis)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Activation] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _BOUNDED or func in _HALF:
            flat = out.detach().reshape(-1, out.shape[-1]) if out.ndim else out.reshape(1, 1)
            if func in _BOUNDED:
                edge = flat.abs() > _SATURATED if _BOUNDED[func] == "tanh" else (flat > _SATURATED) | (flat < 1 - _SATURATED)
                bad, name, state = edge, _BOUNDED[func], "saturated"
            else:
                bad, name, state = flat.abs() < 1e-6, _HALF[func], "dead"
            self.calls.append(Activation(name, caller(), bad.all(0).double().mean().item(), state))
        return out


def caller() -> str:
    """The innermost source line outside torch and this package."""
    frame = sys._getframe(1)
    own = str(Path(__file__).parent)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(own) and not is_installed(name):
            return f"{short(name)}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "?"
