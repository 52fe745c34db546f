"""Triton kernels of the cross-entropy and of norm with rotation; imported only on CUDA."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from seedbed.nn.layers import EPS

# The fastest of the sizes tried on an H200 at 65,536 x 50,304.
BLOCK, NUM_WARPS = 4096, 16
LOG2E = tl.constexpr(1.4426950408889634)
# Larger sums are computed relative to the largest logit instead: their reciprocals would be subnormal.
FAR = tl.constexpr(1e30)


def softmax_minus_onehot_(logits_NV: Tensor, targets_N: Tensor, vocab: int) -> Tensor:
    """Replace logits by the gradient of their summed cross-entropy, in place; returns each row's loss in float32."""
    num_rows, padded = logits_NV.shape
    nats_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    block = min(BLOCK, triton.next_power_of_2(padded))
    num_warps = max(1, NUM_WARPS * block // BLOCK)
    launch = _kernel[(num_rows,)]  # pyright: ignore[reportIndexIssue]
    launch(logits_NV, targets_N, nats_N, logits_NV.stride(0), vocab, padded, block=block, num_warps=num_warps)
    return nats_N


@triton.jit
def _kernel(logits, targets, nats, stride, vocab, padded, block: tl.constexpr):
    # First pass: the sum, per lane and relative to the target's logit, so that no block waits for a maximum. Second pass, last
    # block first while the row is in the cache: the gradient. Differences are taken before products: logits equal to the base
    # give exactly 1, and rounding grows with the distance from it, not with the size of the logits.
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * stride
    target = tl.load(targets + row)
    at_target = tl.load(first + target).to(tl.float32)
    lane = tl.arange(0, block)
    full = vocab // block * block
    last = _columns(first, full + lane, vocab, padded)
    base = at_target
    sums = _power(last, base)
    for start in range(0, full, block):
        sums += _power(tl.load(first + start + lane).to(tl.float32), base)
    total = tl.sum(sums, 0)
    if not total < FAR:  # some logit is far above the target's, or is NaN
        base, total = _careful(first, vocab, padded, block)
    tl.store(nats + row, tl.log(total) + (base - at_target))
    share = 1.0 / total
    column = full + lane
    tl.store(first + column, (_power(last, base) * share).to(logits.dtype.element_ty), mask=column < padded)
    for before in range(block, full + block, block):
        here = first + (full - before) + lane
        tl.store(here, (_power(tl.load(here).to(tl.float32), base) * share).to(logits.dtype.element_ty))
    tl.debug_barrier()  # the target's column is overwritten last
    tl.store(first + target, (_power(at_target, base) * share - 1.0).to(logits.dtype.element_ty))


@triton.jit
def _power(x, base):
    return tl.exp2((x - base) * LOG2E)


@triton.jit
def _careful(first, vocab, padded, block: tl.constexpr):
    # The largest logit and the sum of exponentials relative to it, online.
    top = float("-inf")
    total = 0.0
    for start in range(0, padded, block):
        x = _columns(first, start + tl.arange(0, block), vocab, padded)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    return top, total


@triton.jit
def _columns(first, column, vocab, padded):
    # The mask is the padded width, a multiple of 16: with another vocabulary size every load would be of two bytes.
    x = tl.load(first + column, mask=column < padded, other=float("-inf")).to(tl.float32)
    return tl.where(column < vocab, x, float("-inf"))


# Heads of one program, and its warps.
ROTATE_BLOCK, ROTATE_WARPS = 32, 4

Three = tuple[Tensor, Tensor, Tensor]


def norm_and_rotate(given: Three, out: tuple[Tensor, Tensor]) -> None:
    """Fill queries and keys from `given`: all heads (B, T, H + 2K, D), cosines and sines. Everything is contiguous."""
    q_BTHD, k_BTKD = out
    launch = _rotate[(_num_programs(q_BTHD), 2)]  # pyright: ignore[reportIndexIssue]
    launch(given, out, q_BTHD.shape[0] * q_BTHD.shape[1], q_BTHD.shape[1], **_sizes(q_BTHD, k_BTKD))


def norm_and_rotate_backward(grads: Three, given: Three, dqkv_BTAD: Tensor) -> None:
    """Fill the gradient of all heads from those of queries, keys and values, which may have any strides."""
    dq_BTHD, dk_BTKD, dv_BTKD = (g if g.stride(3) == 1 else g.contiguous() for g in grads)
    strides = tuple(g.stride()[:3] for g in (dq_BTHD, dk_BTKD, dv_BTKD))
    launch = _rotate_backward[(_num_programs(dq_BTHD), 3)]  # pyright: ignore[reportIndexIssue]
    num_rows, length = dq_BTHD.shape[0] * dq_BTHD.shape[1], dq_BTHD.shape[1]
    launch((dq_BTHD, dk_BTKD, dv_BTKD), strides, given, dqkv_BTAD, num_rows, length, **_sizes(dq_BTHD, dk_BTKD))


def _num_programs(q_BTHD: Tensor) -> int:
    return triton.cdiv(q_BTHD.numel() // q_BTHD.shape[3], ROTATE_BLOCK)


def _sizes(q_BTHD: Tensor, k_BTKD: Tensor) -> dict[str, int | float]:
    heads, kv_heads, half = q_BTHD.shape[2], k_BTKD.shape[2], q_BTHD.shape[3] // 2
    return {"heads": heads, "kv_heads": kv_heads, "half": half, "eps": EPS, "block": ROTATE_BLOCK, "num_warps": ROTATE_WARPS}


@triton.jit
def _rotate(
    given, out, num_rows, length,
    heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, eps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    total: tl.constexpr = heads + 2 * kv_heads
    if tl.program_id(1) == 0:
        _rotate_heads(given, out[0], num_rows, length, 0, heads, total, half, eps, block)
    else:
        _rotate_heads(given, out[1], num_rows, length, heads, kv_heads, total, half, eps, block)


@triton.jit
def _rotate_heads(
    given, out, num_rows, length, first: tl.constexpr, heads: tl.constexpr, total: tl.constexpr,
    half: tl.constexpr, eps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    n, row, head, here = _places(num_rows, heads, block)
    d = tl.arange(0, half)[None, :]
    left, right, _, c, s = _normed(given, row, row * total + first + head, length, here, half, eps)
    put = out + n.to(tl.int64) * (2 * half) + d
    tl.store(put, (left * c - right * s).to(out.dtype.element_ty), mask=here)
    tl.store(put + half, (left * s + right * c).to(out.dtype.element_ty), mask=here)


@triton.jit
def _places(num_rows, heads: tl.constexpr, block: tl.constexpr):
    # Heads are numbered across all rows, so that every lane has work even if their number is not a power of two.
    n = (tl.program_id(0) * block + tl.arange(0, block))[:, None]
    return n, (n // heads).to(tl.int64), n % heads, n < num_rows * heads


@triton.jit
def _normed(given, row, place, length, here, half: tl.constexpr, eps: tl.constexpr):
    # Both halves of the normed heads, the norm factors, and the cosines and sines.
    x, cos, sin = given
    d = tl.arange(0, half)[None, :]
    at = place * (2 * half) + d
    left = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    right = tl.load(x + at + half, mask=here, other=0.0).to(tl.float32)
    turn = (row % length) * half + d
    c = tl.load(cos + turn, mask=here, other=0.0)
    s = tl.load(sin + turn, mask=here, other=0.0)
    scale = (1.0 / tl.sqrt(tl.sum(left * left + right * right, 1) / (2 * half) + eps))[:, None]
    return left * scale, right * scale, scale, c, s


@triton.jit
def _rotate_backward(
    grads, strides, given, out, num_rows, length,
    heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, eps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    total: tl.constexpr = heads + 2 * kv_heads
    part = tl.program_id(1)
    if part == 0:
        _rotate_heads_backward(grads[0], strides[0], given, out, num_rows, length, 0, heads, total, half, eps, block)
    elif part == 1:
        _rotate_heads_backward(grads[1], strides[1], given, out, num_rows, length, heads, kv_heads, total, half, eps, block)
    else:
        _copy_heads(grads[2], strides[2], out, num_rows, length, heads + kv_heads, kv_heads, total, 2 * half, block)


@triton.jit
def _rotate_heads_backward(
    grad, strides, given, out, num_rows, length, first: tl.constexpr, heads: tl.constexpr, total: tl.constexpr,
    half: tl.constexpr, eps: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    _, row, head, here = _places(num_rows, heads, block)
    d = tl.arange(0, half)[None, :]
    place = row * total + first + head
    left, right, scale, c, s = _normed(given, row, place, length, here, half, eps)
    get = grad + (row // length) * strides[0] + (row % length) * strides[1] + head * strides[2] + d
    grad_left = tl.load(get, mask=here, other=0.0).to(tl.float32)
    grad_right = tl.load(get + half, mask=here, other=0.0).to(tl.float32)
    # Rotated back by the same angle, then minus the component along the head, which the norm removes.
    back_left, back_right = grad_left * c + grad_right * s, grad_right * c - grad_left * s
    along = (tl.sum(back_left * left + back_right * right, 1) / (2 * half))[:, None]
    put = out + place * (2 * half) + d
    tl.store(put, ((back_left - left * along) * scale).to(out.dtype.element_ty), mask=here)
    tl.store(put + half, ((back_right - right * along) * scale).to(out.dtype.element_ty), mask=here)


@triton.jit
def _copy_heads(
    grad, strides, out, num_rows, length, first: tl.constexpr, heads: tl.constexpr, total: tl.constexpr,
    head_dim: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    _, row, head, here = _places(num_rows, heads, block)
    d = tl.arange(0, head_dim)[None, :]
    get = grad + (row // length) * strides[0] + (row % length) * strides[1] + head * strides[2] + d
    tl.store(out + (row * total + first + head) * head_dim + d, tl.load(get, mask=here), mask=here)
