"""Attention for narrow heads as a custom operation on CUDA, opaque to the compiler.

B batch, T time, P the same rounded up to a multiple of 16, H heads, D head width. With narrow heads, exponentials cost more
than matrix products; torch's kernels are optimised for the products.
"""

import torch
from torch import Tensor

from seedbed.nn.fused import HAS_TRITON

WIDTHS = (16, 32)
DTYPES = (torch.bfloat16, torch.float16)


def suits_narrow(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a kernel for such heads: CUDA, a 16-bit dtype and a supported width."""
    return HAS_TRITON and device.type == "cuda" and dtype in DTYPES and head_dim in WIDTHS


def can_be_narrow(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> bool:
    """Whether `narrow_attention` supports these: `suits_narrow`, and as many keys and values as queries."""
    alike = q_BTHD.shape == k_BTHD.shape == v_BTHD.shape and q_BTHD.dtype == k_BTHD.dtype == v_BTHD.dtype
    return alike and suits_narrow(q_BTHD.shape[3], q_BTHD.dtype, q_BTHD.device)


@torch.library.custom_op("seedbed::narrow_attention", mutates_args=())
def narrow_attention(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Every query attends to every key. Also returns what the backward pass needs: the rounding errors of the outputs
    (B, T, H, D), and the log-sum-exps (B, H, P)."""
    from seedbed.nn import narrow_kernels

    outputs = _outputs(q_BTHD)
    narrow_kernels.forward((q_BTHD, k_BTHD, v_BTHD), outputs, scale)
    return outputs


@narrow_attention.register_fake
def _(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(q_BTHD)


def _outputs(q_BTHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, _ = q_BTHD.shape
    lse_BHP = q_BTHD.new_empty(batch, heads, -(-length // 16) * 16, dtype=torch.float32)
    return q_BTHD.new_empty(q_BTHD.shape), q_BTHD.new_empty(q_BTHD.shape), lse_BHP


@torch.library.custom_op("seedbed::narrow_attention_backward", mutates_args=())
def narrow_attention_backward(
    dy_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    y_BTHD: Tensor,
    rest_BTHD: Tensor,
    lse_BHP: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    from seedbed.nn import narrow_kernels

    return narrow_kernels.backward(dy_BTHD, (q_BTHD, k_BTHD, v_BTHD, y_BTHD, rest_BTHD), lse_BHP, scale)


@narrow_attention_backward.register_fake
def _(dy_BTHD: Tensor, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, *_given) -> tuple[Tensor, Tensor, Tensor]:
    return q_BTHD.new_empty(q_BTHD.shape), k_BTHD.new_empty(k_BTHD.shape), v_BTHD.new_empty(v_BTHD.shape)


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *qkv, ctx.scale = inputs
    ctx.set_materialize_grads(False)  # only the first output has a gradient
    ctx.save_for_backward(*qkv, *output)


def _backward(ctx, dy_BTHD: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    assert others == (None, None), "the other outputs are for the backward pass only"
    return *narrow_attention_backward(dy_BTHD, *ctx.saved_tensors, ctx.scale), None


narrow_attention.register_autograd(_backward, setup_context=_keep)
