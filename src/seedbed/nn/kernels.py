"""Kernels in Triton, imported only where there is a CUDA device to run them."""

import torch
import triton
import triton.language as tl
from torch import Tensor


# A row of up to this many logits is kept in registers; a longer one is read twice.
MAX_KEPT = 65536


def softmax_minus_onehot_(logits_NV: Tensor, targets_N: Tensor, vocab: int) -> Tensor:
    """Replace logits by the gradient of their summed cross-entropy, in place; returns each row's loss in float32."""
    num_rows, padded = logits_NV.shape
    nats_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    block = triton.next_power_of_2(padded)
    if block <= MAX_KEPT:
        kernel, num_warps = _kept, min(32, max(1, block // 512))
    else:
        kernel, block, num_warps = _read_twice, 8192, 16
    kernel[(num_rows,)](logits_NV, targets_N, nats_N, logits_NV.stride(0), vocab, padded, block=block, num_warps=num_warps)
    return nats_N


@triton.jit
def _kept(logits, targets, nats, stride, vocab, padded, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * stride
    target = tl.load(targets + row)
    column = tl.arange(0, block)
    x = tl.load(first + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    power = tl.exp(x - top)
    total = tl.sum(power, 0)
    at_target = tl.sum(tl.where(column == target, x, 0.0), 0)
    tl.store(nats + row, top + tl.log(total) - at_target)
    gradient = power / total - tl.where(column == target, 1.0, 0.0)
    tl.store(first + column, gradient.to(logits.dtype.element_ty), mask=column < padded)


@triton.jit
def _read_twice(logits, targets, nats, stride, vocab, padded, block: tl.constexpr):
    # First for the normaliser, then, while the row is still in the cache, for the gradient.
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * stride
    target = tl.load(targets + row)
    at_target = tl.load(first + target).to(tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, padded, block):
        column = start + tl.arange(0, block)
        x = tl.load(first + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    normaliser = top + tl.log(total)
    tl.store(nats + row, normaliser - at_target)
    for start in range(0, padded, block):
        column = start + tl.arange(0, block)
        x = tl.load(first + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - normaliser) - tl.where(column == target, 1.0, 0.0)
        tl.store(first + column, gradient.to(logits.dtype.element_ty), mask=column < padded)
