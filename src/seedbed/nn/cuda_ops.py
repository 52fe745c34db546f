"""Operations on CUDA as kernels of our own, opaque to the compiler. Imported only where Triton is installed.

B batch, T time, P the same rounded up to a multiple of 16, H query heads, K key heads, A = H + 2K all heads of a projection,
D head width, F = D/2 angles; N rows, C width, V padded vocabulary.
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW_WIDTHS, NARROW_DTYPES = (16, 32), (torch.bfloat16, torch.float16)


def can_norm_and_rotate(qkv_BTAD: Tensor, rope: tuple[Tensor, Tensor]) -> bool:
    """Whether `NormAndRotate` supports these: CUDA, one table for all rows of the batch, a head width that is a power of two."""
    if not (qkv_BTAD.is_cuda and qkv_BTAD.dtype in DTYPES):
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

    q_BTHD, k_BTKD = _queries_and_keys(qkv_BTAD, cos_T1F, sin_T1F, kv_heads)
    kernels.norm_and_rotate((qkv_BTAD.contiguous(), cos_T1F.contiguous(), sin_T1F.contiguous()), (q_BTHD, k_BTKD))
    return q_BTHD, k_BTKD


@norm_and_rotate.register_fake
def _queries_and_keys(qkv_BTAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    batch, length, heads, head_dim = qkv_BTAD.shape
    q_BTHD = qkv_BTAD.new_empty(batch, length, heads - 2 * kv_heads, head_dim)
    return q_BTHD, qkv_BTAD.new_empty(batch, length, kv_heads, head_dim)


@torch.library.custom_op("seedbed::norm_and_rotate_backward", mutates_args=())
def norm_and_rotate_backward(
    dq_BTHD: Tensor, dk_BTKD: Tensor, dv_BTKD: Tensor, qkv_BTAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor
) -> Tensor:
    """The gradient of the projection from those of queries, keys and values, which may have any strides."""
    from seedbed.nn import kernels

    dqkv_BTAD = qkv_BTAD.new_empty(qkv_BTAD.shape)
    given = (qkv_BTAD.contiguous(), cos_T1F.contiguous(), sin_T1F.contiguous())
    kernels.norm_and_rotate_backward((dq_BTHD, dk_BTKD, dv_BTKD), given, dqkv_BTAD)
    return dqkv_BTAD


@norm_and_rotate_backward.register_fake
def _(dq_BTHD: Tensor, dk_BTKD: Tensor, dv_BTKD: Tensor, qkv_BTAD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    return qkv_BTAD.new_empty(qkv_BTAD.shape)


# There exponentials cost more than matrix products; torch's kernels are optimised for the products.


def suits_narrow(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a kernel for such heads: CUDA, a 16-bit dtype and a supported width."""
    return device.type == "cuda" and dtype in NARROW_DTYPES and head_dim in NARROW_WIDTHS


def can_be_narrow(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> bool:
    """Whether `narrow_attention` supports these: `suits_narrow`, and as many keys and values as queries."""
    alike = q_BTHD.shape == k_BTHD.shape == v_BTHD.shape and q_BTHD.dtype == k_BTHD.dtype == v_BTHD.dtype
    return alike and suits_narrow(q_BTHD.shape[3], q_BTHD.dtype, q_BTHD.device)


@torch.library.custom_op("seedbed::narrow_attention", mutates_args=())
def narrow_attention(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Every query attends to every key. Also returns what the backward pass needs: the rounding errors of the outputs
    (B, T, H, D), and the log-sum-exps (B, H, P)."""
    from seedbed.nn import narrow_kernels

    outputs = _outputs(q_BTHD, k_BTHD, v_BTHD, scale)
    narrow_kernels.forward((q_BTHD, k_BTHD, v_BTHD), outputs, scale)
    return outputs


@narrow_attention.register_fake
def _outputs(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
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


def _keep_attention(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *qkv, ctx.scale = inputs
    ctx.set_materialize_grads(False)  # only the first output has a gradient
    ctx.save_for_backward(*qkv, *output)


def _attention_backward(ctx, dy_BTHD: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    assert others == (None, None), "the other outputs are for the backward pass only"
    return *narrow_attention_backward(dy_BTHD, *ctx.saved_tensors, ctx.scale), None


narrow_attention.register_autograd(_attention_backward, setup_context=_keep_attention)


# ---- cross-entropy of a linear head: the gradient overwrites the logits -----------------------------------------------------


@torch.library.custom_op("seedbed::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The mean loss, and the gradient of the summed loss with respect to the logits."""
    from seedbed.nn.kernels import softmax_minus_onehot_

    logits_NV = x_NC @ weight_VC.T
    nats_N = softmax_minus_onehot_(logits_NV, targets_N, vocab)
    return nats_N.mean(), logits_NV


@linear_cross_entropy.register_fake
def _(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    return x_NC.new_empty((), dtype=torch.float32), x_NC.new_empty(len(x_NC), len(weight_VC))


def _keep_logits(ctx, inputs, output) -> None:
    x_NC, weight_VC, _, _ = inputs
    ctx.save_for_backward(x_NC, weight_VC, output[1])
    ctx.mark_non_differentiable(output[1])


def _cross_entropy_backward(ctx, grad_loss: Tensor, _grad_logits: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
    """Scaled last: 1/N before the products would underflow in half precision."""
    x_NC, weight_VC, grad_NV = ctx.saved_tensors
    scale = (grad_loss / len(x_NC)).float()
    return ((grad_NV @ weight_VC) * scale).to(x_NC.dtype), ((grad_NV.T @ x_NC) * scale).to(weight_VC.dtype), None, None


linear_cross_entropy.register_autograd(_cross_entropy_backward, setup_context=_keep_logits)
