"""Norm and rotary embedding of queries and keys as one operation on CUDA, opaque to the compiler.

B batch, T time, H query heads, K key heads, A = H + 2K all heads of a projection, D head width, F = D/2 angles.
"""

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_norm_and_rotate(qkv_BTAD: Tensor, rope: tuple[Tensor, Tensor]) -> bool:
    """Whether `NormAndRotate` supports these: CUDA, one table for all rows of the batch, a head width that is a power of two."""
    if not (HAS_TRITON and qkv_BTAD.is_cuda and qkv_BTAD.dtype in DTYPES):
        return False
    head_dim = qkv_BTAD.shape[-1]
    return rope[0].shape == (qkv_BTAD.shape[1], 1, head_dim // 2) and head_dim >= 2 and head_dim & (head_dim - 1) == 0


class NormAndRotate(torch.autograd.Function):
    """`apply_rope(rms_norm(...))` of queries and keys, and the values, with one gradient for all three.

    Compiled code needs twice the memory traffic: it concatenates the three gradients after it has made them. Values stay a
    view, which no custom operation may return; hence an autograd function around two of them. Nothing is rounded in between.
    """

    @staticmethod
    def forward(ctx, qkv_BTAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv_BTAD, cos_T1F, sin_T1F)
        q_BTHD, k_BTKD = norm_and_rotate(qkv_BTAD, cos_T1F, sin_T1F, kv_heads)
        return q_BTHD, k_BTKD, qkv_BTAD[:, :, -kv_heads:]

    @staticmethod
    def backward(ctx, dq_BTHD: Tensor, dk_BTKD: Tensor, dv_BTKD: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return norm_and_rotate_backward(dq_BTHD, dk_BTKD, dv_BTKD, *ctx.saved_tensors), None, None, None


@torch.library.custom_op("seedbed::norm_and_rotate", mutates_args=())
def norm_and_rotate(qkv_BTAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Normed and rotated queries (B, T, H, D) and keys (B, T, K, D)."""
    from seedbed.nn import kernels

    q_BTHD, k_BTKD = _queries_and_keys(qkv_BTAD, kv_heads)
    kernels.norm_and_rotate((qkv_BTAD.contiguous(), cos_T1F.contiguous(), sin_T1F.contiguous()), (q_BTHD, k_BTKD))
    return q_BTHD, k_BTKD


@norm_and_rotate.register_fake
def _(qkv_BTAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    return _queries_and_keys(qkv_BTAD, kv_heads)


def _queries_and_keys(qkv_BTAD: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    batch, length, heads, head_dim = qkv_BTAD.shape
    q_BTHD = qkv_BTAD.new_empty(batch, length, heads - 2 * kv_heads, head_dim)
    return q_BTHD, qkv_BTAD.new_empty(batch, length, kv_heads, head_dim)


@torch.library.custom_op("seedbed::norm_and_rotate_backward", mutates_args=())
def norm_and_rotate_backward(
    dq_BTHD: Tensor, dk_BTKD: Tensor, dv_BTKD: Tensor, qkv_BTAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor
) -> Tensor:
    """The gradient of the projection from those of queries, keys and values, which may have any strides."""
    from seedbed.nn import kernels

    dqkv_BTAD = torch.empty(qkv_BTAD.shape, dtype=qkv_BTAD.dtype, device=qkv_BTAD.device)
    given = (qkv_BTAD.contiguous(), cos_T1F.contiguous(), sin_T1F.contiguous())
    kernels.norm_and_rotate_backward((dq_BTHD, dk_BTKD, dv_BTKD), given, dqkv_BTAD)
    return dqkv_BTAD


@norm_and_rotate_backward.register_fake
def _(dq_BTHD: Tensor, dk_BTKD: Tensor, dv_BTKD: Tensor, qkv_BTAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    return qkv_BTAD.new_empty(qkv_BTAD.shape)
