"""Layers of a transformer: norms, feed-forward blocks, positional encodings, and the cross-entropy of a linear head.

B batch, T time, H heads, C width, D head width, N rows, V padded vocabulary. Norms are computed in float32 and returned in the
dtype of the stream. A new positional encoding is a class, a line of `ENCODINGS`, and its name in the model's config.
"""

import importlib
import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn import HAS_TRITON
from seedbed.nn.init import declare, normal_

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


# ---- positions -----------------------------------------------------------------------------------------------------------

Rope = tuple[Tensor, Tensor]


class Sizes(NamedTuple):
    """The longest context, the widths of the stream and of a head, and the base of rotary angles."""

    length: int
    width: int
    head_dim: int
    rope_base: float


class NoPositions:
    """A causal model without an encoding: it can only count the tokens that it sees."""

    # How positions act on predictions; None where they do not.
    effect: Literal["absolute", "relative"] | None = None

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        """Fill the parameters, if there are any."""

    def vectors(self, positions: Tensor) -> Tensor | None:
        """What is added to the embeddings of tokens: (T, C) or (B, T, C)."""
        return None

    def rope(self, positions: Tensor) -> Rope | None:
        """By what attention turns queries and keys."""
        return None


class RotaryPositions(NoPositions):
    """Queries and keys turned by angles that grow with the position: scores depend on distances."""

    effect = "relative"

    def rope(self, positions: Tensor) -> Rope:
        return rope_table(positions, self.sizes.head_dim, self.sizes.rope_base)


class LearnedPositions(nn.Embedding):
    """A learned vector per position."""

    effect: Literal["absolute", "relative"] | None = "absolute"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.length, sizes.width)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        normal_(self.weight, std, generator)

    def vectors(self, positions: Tensor) -> Tensor:
        return self(positions)

    def rope(self, positions: Tensor) -> None:
        return None


PositionalEncoding = NoPositions | LearnedPositions


ENCODINGS: dict[str, type[PositionalEncoding]] = {"rope": RotaryPositions, "learned": LearnedPositions, "none": NoPositions}


def rope_table(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype = torch.float32) -> Rope:
    """Cosines and sines for positions of shape (T) or (B, T), ready to broadcast over heads.

    Computed on the fly rather than kept: a buffer would need its own initialisation on the meta device.
    """
    assert head_dim % 2 == 0, f"rotary embedding needs an even head width, not {head_dim}"
    half = head_dim // 2
    powers = torch.arange(half, device=positions.device, dtype=dtype) / half
    angles = positions[..., None, None].to(dtype) * base**-powers
    return angles.cos(), angles.sin()


def apply_rope(x_BTHD: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair (i, i + D/2) by its position's angle, in float32: scores depend only on relative positions."""
    cos, sin = rope
    left, right = widen(x_BTHD).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x_BTHD.dtype)


# ---- the loss of a head ----------------------------------------------------------------------------------------------------


def linear_cross_entropy(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab: int) -> Tensor:
    """Mean nats of `targets_N` under the softmax over the first `vocab` rows of `weight_VC`, in float32 or wider.

    Plain PyTorch reads the logits once for the loss, and reads and writes them again for the gradient; on CUDA one kernel does
    both while a row is still in the cache.
    """
    if cuda_ops and x_NC.is_cuda and torch.is_grad_enabled():
        return cuda_ops.linear_cross_entropy(x_NC, weight_VC.to(x_NC.dtype), targets_N, vocab)[0]
    logits_NV = mask_padding(F.linear(x_NC, weight_VC), vocab)
    return F.cross_entropy(logits_NV.to(torch.promote_types(x_NC.dtype, torch.float32)), targets_N)


def mask_padding(logits_NV: Tensor, vocab: int) -> Tensor:
    """Set the logits of padding rows to minus infinity."""
    if logits_NV.shape[-1] == vocab:
        return logits_NV
    padding_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device) >= vocab
    return logits_NV.masked_fill(padding_V, float("-inf"))
