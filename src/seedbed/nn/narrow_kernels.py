"""Attention for narrow heads in Triton; imported only on CUDA.

B batch, T time, H heads, D head width; in a program M queries, N keys.
"""

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
# Sums outside this range are computed again, relative to each row's largest score; inside it they are accurate.
NEAR, FAR = tl.constexpr(2.0**-60), tl.constexpr(2.0**90)


class Tiles(NamedTuple):
    """Rows that one program holds and rows per iteration; its warps and pipeline stages."""

    held: int
    step: int
    warps: int
    stages: int


# By head width.
FORWARD = {16: Tiles(64, 64, 4, 3), 32: Tiles(128, 64, 4, 3)}
QUERIES = {16: Tiles(64, 64, 4, 3), 32: Tiles(128, 64, 4, 3)}
KEYS = {16: Tiles(128, 32, 4, 3), 32: Tiles(64, 64, 4, 3)}


def forward(given: tuple[Tensor, Tensor, Tensor], out: tuple[Tensor, Tensor, Tensor], scale: float) -> None:
    """Fill attention (B, T, H, D), its rounding errors, and each query's log-sum-exp in base 2.

    The latter is (B, H, P): P is T rounded up to a multiple of 16, so that several are read at once.
    """
    assert scale > 0, f"a scale of {scale} would reverse the order of the scores"
    _launch(_narrow_attention, (*given, *out[:2]), out[2:], scale, FORWARD)


def backward(dy_BTHD: Tensor, given: tuple[Tensor, ...], lse_BHP: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, from `given`: these three and the outputs of `forward`.

    Two passes over the scores: one pass would add the queries' gradient in no fixed order, and gains only 7 %.

    The gradient of a score is p (dy v - dy y): a difference that is zero for a single key, and for equal values. So dy y must
    not be rounded more than dy v: from rounded outputs it would be off by eps |dy| |y| for all keys together, and the queries'
    gradient by as much times the mean key, for any number of keys.
    """
    dq_BTHD, dk_BTHD, dv_BTHD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[:3])
    numbers = lse_BHP, torch.empty_like(lse_BHP)  # the first pass stores dy y for the second
    _launch(_narrow_attention_queries, (*given, dy_BTHD, dq_BTHD), numbers, scale, QUERIES)
    _launch(_narrow_attention_keys, (*given[:3], dy_BTHD, dk_BTHD, dv_BTHD), numbers, scale, KEYS)
    return dq_BTHD, dk_BTHD, dv_BTHD


def _launch(kernel, rows: tuple[Tensor, ...], numbers: tuple[Tensor, ...], scale: float, tiles: dict[int, Tiles]) -> None:
    """One program for each `held` rows of each head; `rows` may have any strides in which a head's row is contiguous."""
    rows = tuple(x if x.stride(3) == 1 else x.contiguous() for x in rows)
    batch, length, heads, head_dim = rows[0].shape
    assert length * max(x.stride(1) for x in rows) < 1 << 31, f"{length} rows are too far apart"
    held, step, num_warps, num_stages = tiles[head_dim]
    grid = (triton.cdiv(length, held), heads, batch)
    options = {"dim": head_dim, "held": held, "step": step, "num_warps": num_warps, "num_stages": num_stages}
    # Allow fused multiply-add: newer versions of Triton need the option.
    options["enable_fp_fusion"] = True
    strides = tuple(x.stride()[:3] for x in rows)
    kernel[grid](rows, strides, numbers, length, numbers[0].shape[2], scale, **options)


@triton.jit
def _narrow_attention(rows, strides, numbers, length, padded, scale, dim: tl.constexpr, held: tl.constexpr, step: tl.constexpr):
    # First without subtracting a maximum, whose search would cost as much as the sum: the range of float32 and bfloat16
    # suffices unless scores are very large. Programs that exceed it start again; float16 always subtracts it.
    first = tl.program_id(0) * held
    q_MD = _held(_head(rows[0], strides[0]), strides[0][1], first, length, held, dim)
    small: tl.constexpr = rows[0].dtype.element_ty == tl.float16
    acc_MD, total_M, top_M = _sweep(q_MD, rows, strides, length, scale, small, dim, held, step)
    if not small:
        fine_M = (total_M > NEAR) & (total_M < FAR)
        if tl.min(fine_M.to(tl.int32), 0) == 0:
            acc_MD, total_M, top_M = _sweep(q_MD, rows, strides, length, scale, True, dim, held, step)
    y_MD = acc_MD / total_M[:, None]
    _put(_head(rows[3], strides[3]), strides[3][1], first, length, y_MD, held, dim)
    rest_MD = y_MD - y_MD.to(rows[3].dtype.element_ty).to(tl.float32)
    _put(_head(rows[4], strides[4]), strides[4][1], first, length, rest_MD, held, dim)
    row_M = first + tl.arange(0, held)
    tl.store(_numbers(numbers[0], padded) + row_M, top_M + tl.log2(total_M), mask=row_M < length)


@triton.jit
def _sweep(q_MD, rows, strides, length, scale, careful: tl.constexpr, dim: tl.constexpr, held: tl.constexpr, step: tl.constexpr):
    # Over all keys: weighted values, sums of weights, and the maxima that were subtracted.
    k, v = _head(rows[1], strides[1]), _head(rows[2], strides[2])
    acc_MD = tl.zeros((held, dim), tl.float32)
    top_M = tl.full((held,), float("-inf") if careful else 0.0, tl.float32)
    total_M = tl.zeros((held,), tl.float32)
    full = length // step * step
    for start in range(0, full, step):
        k_ND = _tile(k, strides[1][1], start, length, step, dim, False)
        v_ND = _tile(v, strides[2][1], start, length, step, dim, False)
        s_MN = _dot(q_MD, tl.trans(k_ND))
        acc_MD, total_M, top_M = _gather(s_MN, v_ND, acc_MD, total_M, top_M, scale, careful)
    if full < length:
        k_ND = _tile(k, strides[1][1], full, length, step, dim, True)
        v_ND = _tile(v, strides[2][1], full, length, step, dim, True)
        s_MN = tl.where((full + tl.arange(0, step) < length)[None, :], _dot(q_MD, tl.trans(k_ND)), float("-inf"))
        acc_MD, total_M, top_M = _gather(s_MN, v_ND, acc_MD, total_M, top_M, scale, careful)
    return acc_MD, total_M, top_M


@triton.jit
def _gather(s_MN, v_ND, acc_MD, total_M, top_M, scale, careful: tl.constexpr):
    if careful:
        higher_M = tl.maximum(top_M, tl.max(s_MN, 1) * (scale * LOG2E))
        p_MN = tl.exp2(s_MN * (scale * LOG2E) - higher_M[:, None])
        shrink_M = tl.exp2(top_M - higher_M)
        acc_MD *= shrink_M[:, None]
        total_M *= shrink_M
        top_M = higher_M
    else:
        p_MN = tl.exp2(s_MN * (scale * LOG2E))
    # The sum is of the rounded weights that values are multiplied by: outputs are exact means of values.
    p_MN = p_MN.to(v_ND.dtype)
    return _dot(p_MN, v_ND, acc_MD), total_M + tl.sum(p_MN.to(tl.float32), 1), top_M


@triton.jit
def _narrow_attention_queries(
    rows, strides, numbers, length, padded, scale, dim: tl.constexpr, held: tl.constexpr, step: tl.constexpr
):
    # Rows: queries, keys, values, outputs, their rounding errors, their gradient, and the queries' gradient (output).
    first = tl.program_id(0) * held
    q_MD = _held(_head(rows[0], strides[0]), strides[0][1], first, length, held, dim)
    dy_MD = _held(_head(rows[5], strides[5]), strides[5][1], first, length, held, dim)
    row_M = first + tl.arange(0, held)
    lse_M = tl.load(_numbers(numbers[0], padded) + row_M, mask=row_M < length, other=float("inf"))
    y_MD = _held(_head(rows[3], strides[3]), strides[3][1], first, length, held, dim)
    rest_MD = _held(_head(rows[4], strides[4]), strides[4][1], first, length, held, dim)
    delta_M = tl.sum((y_MD.to(tl.float32) + rest_MD.to(tl.float32)) * dy_MD.to(tl.float32), 1)
    tl.store(_numbers(numbers[1], padded) + row_M, delta_M, mask=row_M < length)
    k, v = _head(rows[1], strides[1]), _head(rows[2], strides[2])
    dq_MD = tl.zeros((held, dim), tl.float32)
    full = length // step * step
    for start in range(0, full, step):
        k_ND = _tile(k, strides[1][1], start, length, step, dim, False)
        v_ND = _tile(v, strides[2][1], start, length, step, dim, False)
        p_MN = tl.exp2(_dot(q_MD, tl.trans(k_ND)) * (scale * LOG2E) - lse_M[:, None])
        ds_MN = p_MN * (_dot(dy_MD, tl.trans(v_ND)) - delta_M[:, None])
        dq_MD = _dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD)
    if full < length:
        k_ND = _tile(k, strides[1][1], full, length, step, dim, True)
        v_ND = _tile(v, strides[2][1], full, length, step, dim, True)
        s_MN = _dot(q_MD, tl.trans(k_ND)) * (scale * LOG2E) - lse_M[:, None]
        p_MN = tl.exp2(tl.where((full + tl.arange(0, step) < length)[None, :], s_MN, float("-inf")))
        ds_MN = p_MN * (_dot(dy_MD, tl.trans(v_ND)) - delta_M[:, None])
        dq_MD = _dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD)
    _put(_head(rows[6], strides[6]), strides[6][1], first, length, dq_MD * scale, held, dim)


@triton.jit
def _narrow_attention_keys(
    rows, strides, numbers, length, padded, scale, dim: tl.constexpr, held: tl.constexpr, step: tl.constexpr
):
    # Rows: queries, keys, values, the outputs' gradient, then those of keys and values (outputs). Scores are transposed, as
    # the next product needs them. Here keys are held: N of them, M queries.
    first = tl.program_id(0) * held
    k, v = _head(rows[1], strides[1]), _head(rows[2], strides[2])
    k_ND = _held(k, strides[1][1], first, length, held, dim)
    v_ND = _held(v, strides[2][1], first, length, held, dim)
    lse, delta = _numbers(numbers[0], padded), _numbers(numbers[1], padded)
    dk_ND, dv_ND = tl.zeros((held, dim), tl.float32), tl.zeros((held, dim), tl.float32)
    full = length // step * step
    for start in range(0, full, step):
        sums = (dk_ND, dv_ND)
        dk_ND, dv_ND = _from_queries((k_ND, v_ND), sums, rows, strides, (lse, delta), start, length, scale, step, False)
    if full < length:
        sums = (dk_ND, dv_ND)
        dk_ND, dv_ND = _from_queries((k_ND, v_ND), sums, rows, strides, (lse, delta), full, length, scale, step, True)
    _put(_head(rows[4], strides[4]), strides[4][1], first, length, dk_ND * scale, held, dim)
    _put(_head(rows[5], strides[5]), strides[5][1], first, length, dv_ND, held, dim)


@triton.jit
def _from_queries(kept, sums, rows, strides, numbers, start, length, scale, step: tl.constexpr, masked: tl.constexpr):
    k_ND, v_ND = kept
    dk_ND, dv_ND = sums
    dim: tl.constexpr = k_ND.shape[1]
    q_MD = _tile(_head(rows[0], strides[0]), strides[0][1], start, length, step, dim, masked)
    dy_MD = _tile(_head(rows[3], strides[3]), strides[3][1], start, length, step, dim, masked)
    row_M = start + tl.arange(0, step)
    lse, delta = numbers
    if masked:  # a query beyond the end is zero and has no gradient: it adds nothing
        lse_M = tl.load(lse + row_M, mask=row_M < length, other=0.0)
        delta_M = tl.load(delta + row_M, mask=row_M < length, other=0.0)
    else:
        lse_M, delta_M = tl.load(lse + row_M), tl.load(delta + row_M)
    p_NM = tl.exp2(_dot(k_ND, tl.trans(q_MD)) * (scale * LOG2E) - lse_M[None, :])
    dv_ND = _dot(p_NM.to(dy_MD.dtype), dy_MD, dv_ND)
    ds_NM = (p_NM * (_dot(v_ND, tl.trans(dy_MD)) - delta_M[None, :])).to(q_MD.dtype)
    return _dot(ds_NM, q_MD, dk_ND), dv_ND


@triton.jit
def _head(x, strides):
    # Where this program's head of this row of the batch begins.
    return x + tl.program_id(2).to(tl.int64) * strides[0] + tl.program_id(1) * strides[2]


@triton.jit
def _numbers(x, padded):
    return x + (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * padded


@triton.jit
def _tile(x, stride, start, length, num: tl.constexpr, dim: tl.constexpr, masked: tl.constexpr):
    row = start + tl.arange(0, num)[:, None]
    at = x + row * stride + tl.arange(0, dim)[None, :]
    if masked:
        return tl.load(at, mask=row < length, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _held(x, stride, start, length, num: tl.constexpr, dim: tl.constexpr):
    # Beyond the end the last row is repeated: its values are finite, and its results are not stored.
    row = tl.minimum(start + tl.arange(0, num), length - 1)[:, None]
    return tl.load(x + row * stride + tl.arange(0, dim)[None, :])


@triton.jit
def _put(x, stride, start, length, values, num: tl.constexpr, dim: tl.constexpr):
    row = start + tl.arange(0, num)[:, None]
    tl.store(x + row * stride + tl.arange(0, dim)[None, :], values.to(x.dtype.element_ty), mask=row < length)


@triton.jit
def _dot(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # has a meaning for float32 only
