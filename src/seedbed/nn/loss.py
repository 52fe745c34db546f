"""Fused cross-entropy of a linear head over a large vocabulary: the gradient overwrites the logits.

N rows, C width, V padded vocabulary. Plain PyTorch reads the logits once for the loss, and reads and writes them again for
the gradient; on CUDA one kernel does both while a row is still in the cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.nn.fused import HAS_TRITON


def linear_cross_entropy(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab: int) -> Tensor:
    """Mean nats of `targets_N` under the softmax over the first `vocab` rows of `weight_VC`, in float32 or wider."""
    if x_NC.is_cuda and HAS_TRITON and torch.is_grad_enabled():
        return _fused(x_NC, weight_VC.to(x_NC.dtype), targets_N, vocab)[0]
    logits_NV = mask_padding(F.linear(x_NC, weight_VC), vocab)
    return F.cross_entropy(logits_NV.to(torch.promote_types(x_NC.dtype, torch.float32)), targets_N)


def mask_padding(logits_NV: Tensor, vocab: int) -> Tensor:
    """Set the logits of padding rows to minus infinity."""
    if logits_NV.shape[-1] == vocab:
        return logits_NV
    padding_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device) >= vocab
    return logits_NV.masked_fill(padding_V, float("-inf"))


@torch.library.custom_op("seedbed::linear_cross_entropy", mutates_args=())
def _fused(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The mean loss, and the gradient of the summed loss with respect to the logits."""
    from seedbed.nn.kernels import softmax_minus_onehot_

    logits_NV = x_NC @ weight_VC.T
    nats_N = softmax_minus_onehot_(logits_NV, targets_N, vocab)
    return nats_N.mean(), logits_NV


@_fused.register_fake
def _(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    return x_NC.new_empty((), dtype=torch.float32), x_NC.new_empty(len(x_NC), len(weight_VC))


def _keep(ctx, inputs, output) -> None:
    x_NC, weight_VC, _, _ = inputs
    ctx.save_for_backward(x_NC, weight_VC, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_loss: Tensor, _grad_logits: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
    """Scaled last: 1/N before the products would underflow in half precision."""
    x_NC, weight_VC, grad_NV = ctx.saved_tensors
    scale = (grad_loss / len(x_NC)).float()
    return ((grad_NV @ weight_VC) * scale).to(x_NC.dtype), ((grad_NV.T @ x_NC) * scale).to(weight_VC.dtype), None, None


_fused.register_autograd(_backward, setup_context=_keep)
