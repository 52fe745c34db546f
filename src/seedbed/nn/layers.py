"""Norms, computed in float32 and returned in the dtype of the stream, and feed-forward blocks."""

import importlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn import HAS_TRITON
from seedbed.nn.groups import declare
from seedbed.nn.init import normal_

EPS = 1e-7
cuda_ops = importlib.import_module("seedbed.nn.cuda_ops") if HAS_TRITON else None


def widen(x: Tensor) -> Tensor:
    """At least float32: half precision is too coarse for means."""
    return x.float() if x.dtype.itemsize < 4 else x


def rms_norm(x: Tensor, weight_D: Tensor | None = None, eps: float = EPS) -> Tensor:
    """RMS norm over the last axis, in basic operations: it fuses when compiled and can be differentiated twice."""
    wide = widen(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight_D is None else wide * weight_D).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, without a weight unless asked."""

    def __init__(self, width: int, *, weighted: bool = False) -> None:
        super().__init__()
        self.weight = declare(nn.Parameter(torch.ones(width)), "scalar") if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class LayerNorm(nn.Module):
    """Layer norm with a weight and no bias, in the stream's dtype also under autocast, which would return float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = declare(nn.Parameter(torch.ones(width)), "scalar")

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(widen(x), self.weight.shape, widen(self.weight)).to(x.dtype)


HIDDEN_MULTIPLE = 64


class MLP(nn.Module):
    """Two matmuls around a nonlinearity; SwiGLU is two thirds as wide because it has two inner matrices."""

    def __init__(self, width: int, kind: str, hidden: int = 0) -> None:
        super().__init__()
        self.kind = kind
        if not hidden:
            # Rounded up to full tiles of matrix units.
            hidden = -(-8 * width // (3 * HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE if kind == "swiglu" else 4 * width
        inner = (hidden, hidden) if kind == "swiglu" else (hidden,)
        self.up = nn.Linear(width, sum(inner), bias=False)
        declare(self.up.weight, "matrix", rows=inner)
        self.down = nn.Linear(hidden, width, bias=False)

    def init_weights(self, in_std: float, out_std: float, generator: torch.Generator) -> None:
        normal_(self.up.weight, in_std, generator)
        normal_(self.down.weight, out_std, generator)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "swiglu":
            gate, value = h.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)
        if self.kind == "relu2":
            h = F.relu(h)
            return self.down(h * h)  # not h.square(): that is a power, which autocast on CUDA computes in float32
        return self.down(gelu(h))


def gelu(x: Tensor) -> Tensor:
    """GELU as GPT-2 and DiT compute it. The tanh is written as a sigmoid: compiled, that takes a third of the instructions of
    tanh or erf, and the kernel becomes memory-bound."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    slope = math.sqrt(8 / math.pi)
    return x * torch.sigmoid(slope * (x + 0.044715 * (x * x * x)))  # not x**3, which autocast on CUDA computes in float32
