"""Layers of a transformer: norms, feed-forward, attention, positional encodings, and the cross-entropy of a linear head.

B batch, T time, H heads, K key heads, C width, D head width, N rows, V padded vocabulary. Norms are computed in float32 and
returned in the dtype of the stream. A new positional encoding is a class and a line of `ENCODINGS`.
"""

import contextlib
import enum
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from seedbed.nn import HAS_TRITON
from seedbed.nn.init import declare, normal_

if TYPE_CHECKING:
    from seedbed.nn.decoding import Decode, Prefill

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


def stream_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of the residual stream of a model with this weight: autocast's inside autocast, else the weight's own."""
    kind = weight.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)  # meta has no autocast; torch 2.11 cannot trace the question
    return torch.get_autocast_dtype(kind) if on else weight.dtype


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x)


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


# ---- attention -----------------------------------------------------------------------------------------------------------

QK_SCALE = 1.2


class Own(enum.Enum):
    """Kernels that are not torch's."""

    NARROW = "narrow"


Kernel = SDPBackend | Own

# Whether a scope has chosen the kernel for narrow heads; process-wide, as torch's own choice is.
_narrow_first = False


class Attention(nn.Module):
    """Self-attention with optional grouped keys, query-key norm, per-head gate and values read from the embedding."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int = 0,
        qk_norm: bool = True,
        dropout: float = 0.0,
        gate: bool = False,
        values_x0: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        assert width % heads == 0, f"width {width} does not divide into {heads} heads"
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads or heads, width // heads
        assert heads % self.kv_heads == 0, f"{heads} heads do not share {self.kv_heads} key heads evenly"
        self.qk_norm, self.dropout, self.causal = qk_norm, dropout, causal
        # Normed queries and keys should both be multiplied by 1.2; the scale of their product does it for free.
        self.scale = self.head_dim**-0.5 * (QK_SCALE**2 if qk_norm else 1.0)
        rows = (width, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        # One matmul for queries, keys and values; `rows` tells an optimizer that works per matrix where the three are.
        self.qkv = nn.Linear(width, sum(rows), bias=False)
        declare(self.qkv.weight, "matrix", rows=rows)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, heads, bias=False) if gate else None
        if self.gate:
            declare(self.gate.weight, "scalar")
        self.values_x0 = nn.Linear(width, rows[2], bias=False) if values_x0 else None

    def init_weights(self, in_std: float, out_std: float, generator: torch.Generator) -> None:
        normal_(self.qkv.weight, in_std, generator)
        normal_(self.out.weight, out_std, generator)
        if self.gate:
            normal_(self.gate.weight, 0.0, generator)  # twice a sigmoid of 0: every gate starts open at 1
        if self.values_x0:
            normal_(self.values_x0.weight, in_std, generator)

    def forward(
        self, x_BTC: Tensor, rope: "Rope | None" = None, x0_BTC: Tensor | None = None, cache: "Prefill | Decode | None" = None
    ) -> Tensor:
        q_BHTD, k_BKTD, v_BKTD = self._project(x_BTC, rope, x0_BTC)
        mask = None
        if cache is not None:
            k_BKTD, v_BKTD, mask = cache.update(k_BKTD, v_BKTD)
        y_BHTD = attend(
            q_BHTD,
            k_BKTD,
            v_BKTD,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
            scale=self.scale,
            enable_gqa=self.kv_heads != self.heads,
        )
        y_BTHD = y_BHTD.transpose(1, 2)
        if self.gate:
            y_BTHD = y_BTHD * (2.0 * torch.sigmoid(self.gate(x_BTC)))[..., None]
        return self.out(y_BTHD.flatten(2))

    def _project(self, x_BTC: Tensor, rope: "Rope | None", x0_BTC: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        batch, num_tokens, _ = x_BTC.shape
        heads_BTHD = self.qkv(x_BTC).view(batch, num_tokens, -1, self.head_dim)
        qk, v = heads_BTHD.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        if cuda_ops and rope is not None and self.qk_norm and cuda_ops.can_norm_and_rotate(heads_BTHD, rope):
            q, k, v = cuda_ops.NormAndRotate.apply(heads_BTHD, *rope, self.kv_heads)
        else:
            if self.qk_norm:
                qk = rms_norm(qk)
            if rope is not None:
                qk = apply_rope(qk, rope)
            q, k = qk.split((self.heads, self.kv_heads), dim=2)
        if self.values_x0:
            v = v + self.values_x0(x0_BTC).view(v.shape)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def attend(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, scale: float | None = None, **how: Any) -> Tensor:
    """torch's attention with its options, or the kernel for narrow heads where the scope prefers it and it supports them."""
    plain = how.get("attn_mask") is None and not how.get("dropout_p") and not how.get("is_causal")
    if cuda_ops and _narrow_first and plain:
        q_BTHD, k_BTHD, v_BTHD = (x.transpose(1, 2) for x in (q_BHTD, k_BKTD, v_BKTD))
        if cuda_ops.can_be_narrow(q_BTHD, k_BTHD, v_BTHD):
            y_BTHD, *_ = cuda_ops.narrow_attention(q_BTHD, k_BTHD, v_BTHD, scale or q_BTHD.shape[3] ** -0.5)
            return y_BTHD.transpose(1, 2)
    return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, scale=scale, **how)


def choose_attention(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    kv_heads: int = 0,
    dropout: float = 0.0,
    causal: bool = True,
    only: str = "auto",
) -> tuple[Kernel, ...]:
    """The attention kernels that run (B, H, T, D) forward and backward on `device`, fastest first, timed once.

    Empty where there is no choice, that is anywhere but on CUDA. `only` names one of them, or raises where it cannot run.
    """
    if only == "auto" and device.type != "cuda":
        return ()
    from seedbed.nn import attention_choice

    return attention_choice.choose(shape, dtype, device, kv_heads or shape[1], dropout, causal, only)


@contextlib.contextmanager
def attention_scope(kernels: Sequence[Kernel]) -> Iterator[None]:
    """Run attention with the first of `kernels` that supports the inputs; with none given, torch decides."""
    global _narrow_first
    before, theirs = _narrow_first, [k for k in kernels if isinstance(k, SDPBackend)]
    with sdpa_kernel(theirs, set_priority=True) if theirs else contextlib.nullcontext():
        if kernels:
            _narrow_first = kernels[0] is Own.NARROW
        try:
            yield
        finally:
            _narrow_first = before


def current_kernels() -> list[Kernel]:
    """The kernels that attention may use now, first choice first."""
    return [*([Own.NARROW] if _narrow_first else []), *_cur_sdpa_kernel_backends(with_priority=True)]


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


class LearnedPositions(nn.Embedding, NoPositions):
    """A learned vector per position."""

    effect = "absolute"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.length, sizes.width)

    def init_weights(self, std: float, generator: torch.Generator) -> None:
        normal_(self.weight, std, generator)

    def vectors(self, positions: Tensor) -> Tensor:
        return self(positions)


ENCODINGS: dict[str, type[NoPositions]] = {"rope": RotaryPositions, "learned": LearnedPositions, "none": NoPositions}


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
