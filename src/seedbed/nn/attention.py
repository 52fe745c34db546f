"""Self-attention, and the choice of the kernel that runs it. B batch, T time, H heads, K key heads, D head width."""

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

from seedbed.nn.decoding import Decode, Prefill
from seedbed.nn.init import declare, normal_
from seedbed.nn.layers import Rope, apply_rope, cuda_ops, rms_norm

QK_SCALE = 1.2


class Own(enum.Enum):
    """Kernels that are not torch's."""

    NARROW = "narrow"


Kernel = SDPBackend | Own
NAMED: dict[str, Kernel] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "narrow": Own.NARROW,
}
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
        self, x_BTC: Tensor, rope: Rope | None = None, x0_BTC: Tensor | None = None, cache: Prefill | Decode | None = None
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

    def _project(self, x_BTC: Tensor, rope: Rope | None, x0_BTC: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
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


def attend(
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's attention, or the kernel for narrow heads where the scope prefers it and the shapes allow it."""
    if cuda_ops and _narrow_first and attn_mask is None and not dropout_p and not is_causal:
        q_BTHD, k_BTHD, v_BTHD = (x.transpose(1, 2) for x in (q_BHTD, k_BKTD, v_BKTD))
        if cuda_ops.can_be_narrow(q_BTHD, k_BTHD, v_BTHD):
            y_BTHD, *_ = cuda_ops.narrow_attention(q_BTHD, k_BTHD, v_BTHD, scale or q_BTHD.shape[3] ** -0.5)
            return y_BTHD.transpose(1, 2)
    how: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, attn_mask, **how)


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

    Empty where there is no choice, that is anywhere but on CUDA. `only` selects one of NAMED, or raises where it cannot run.
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
