"""Fused cross-entropy of a linear head over a large vocabulary: the gradient overwrites the logits.

N rows, C width, V padded vocabulary. Plain PyTorch reads the logits once for the loss, and reads and writes them again for
the gradient; on CUDA one kernel does both while a row is still in the cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.nn.layers import cuda_ops


def linear_cross_entropy(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab: int) -> Tensor:
    """Mean nats of `targets_N` under the softmax over the first `vocab` rows of `weight_VC`, in float32 or wider."""
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
