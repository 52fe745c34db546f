"""Normalisation computed in float32 and returned in the dtype of the stream."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn.groups import declare

EPS = 1e-7


def widen(x: Tensor) -> Tensor:
    """At least float32: half-precision numbers are too coarse to average."""
    return x.float() if x.dtype.itemsize < 4 else x


def rms_norm(x: Tensor, weight_D: Tensor | None = None, eps: float = EPS) -> Tensor:
    """Divide by the root mean square of the last axis. Written out: it fuses when compiled and differentiates twice."""
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
