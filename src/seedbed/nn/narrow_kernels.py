"""Attention for narrow heads in Triton, imported only where there is a CUDA device to run it.

B batch, T time, H heads, D head width; in a program M queries, N keys.
"""

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
# Sums outside of these are taken again, against each row's largest score: within them nothing that counts was lost.
NEAR, FAR = tl.constexpr(2.0**-60), tl.constexpr(2.0**90)


class Tiles(NamedTuple):
    """What one program holds still and what it takes at a time, in rows; its warps, and how many loads are under way."""

    held: int
    step: int
    warps: int
    stages: int


# By head width.
FORWARD = {16: Tiles(64, 64, 4, 3), 32: Tiles(128, 64, 4, 3)}
QUERIES = {16: Tiles(64, 64, 4, 3), 32: Tiles(128, 64, 4, 3)}
KEYS = {16: Tiles(128, 32, 4, 3), 32: Tiles(64, 64, 4, 3)}
# One pass over the scores backward instead of two, whose parts of the queries' gradient are added in no fixed order.
SINGLE_PASS = False
# Of four exponentials, how many are computed by multiplications: the units that know exponentials are the bottleneck here.
SHARE = 0
# Whether a matrix product sums the rows of exponentials.
SUM_BY_PRODUCT = False


def _mixed(share: int) -> str:
    """Assembly for four powers of 2, `share` of them without the unit for exponentials.

    Adding 1.5 * 2^23 leaves the nearest integer in the lowest bits, which become the exponent; a cubic, right to 7.5e-5 of
    its value, makes the rest. That is a twentieth of what a bfloat16 rounds away.
    """
    shift, cubic = "0f4B400000", ("0f3D61FBB0", "0f3E786F0D", "0f3F31798D", "0f3F7FFB49")
    lines = ["{", ".reg .f32 x, r, p;", ".reg .b32 n, m;"]
    for i in range(share):
        lines += [f"max.ftz.f32 x, ${4 + i}, 0fC2FC0000;", "min.ftz.f32 x, x, 0f42FE0000;"]  # -126 to 127
        lines += [f"add.ftz.f32 r, x, {shift};", "mov.b32 n, r;", f"sub.ftz.f32 r, r, {shift};", "sub.ftz.f32 x, x, r;"]
        lines += [f"fma.rn.ftz.f32 p, x, {cubic[0]}, {cubic[1]};"]
        lines += [f"fma.rn.ftz.f32 p, p, x, {c};" for c in cubic[2:]]
        lines += ["shl.b32 n, n, 23;", "mov.b32 m, p;", "add.s32 n, n, m;", f"mov.b32 ${i}, n;"]
    lines += [f"ex2.approx.ftz.f32 ${i}, ${4 + i};" for i in range(share, 4)]
    return "\n".join([*lines, "}"])


MIXED_1, MIXED_2 = tl.constexpr(_mixed(1)), tl.constexpr(_mixed(2))


def forward(given: tuple[Tensor, Tensor, Tensor], out: tuple[Tensor, Tensor], scale: float) -> None:
    """Fill attention (B, T, H, D) and each query's logarithm, base 2, of its summed exponentials from queries, keys, values.

    Logarithms are (B, H, P): P is T rounded up to a multiple of 16, so that several are read at once.
    """
    assert scale > 0, f"a scale of {scale} would turn the order of the scores"
    how = {"share": SHARE, "by_product": SUM_BY_PRODUCT}
    _launch(_narrow_attention, (*given, out[0]), out[1:], scale, FORWARD, **how)


def backward(dy_BTHD: Tensor, given: tuple[Tensor, ...], lse_BHP: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, from `given`: these three and what `forward` made of them."""
    numbers = lse_BHP, torch.empty_like(lse_BHP)
    if not SINGLE_PASS:
        return backward_queries(dy_BTHD, given, numbers, scale), *backward_keys(dy_BTHD, given, numbers, scale)
    _launch(_narrow_attention_deltas, (dy_BTHD, given[3]), numbers[1:], scale, KEYS)
    wide_BTHD = torch.zeros(dy_BTHD.shape, dtype=torch.float32, device=dy_BTHD.device)
    dk_BTHD, dv_BTHD = backward_keys(dy_BTHD, given, numbers, scale, wide_BTHD)
    return wide_BTHD.to(dy_BTHD.dtype), dk_BTHD, dv_BTHD


def backward_queries(dy_BTHD: Tensor, given: tuple[Tensor, ...], numbers: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """The queries' gradient. `numbers` are the logarithms and, filled here, the products of each output and its gradient."""
    dq_BTHD = _like(given[0])
    _launch(_narrow_attention_queries, (*given, dy_BTHD, dq_BTHD), numbers, scale, QUERIES, share=SHARE)
    return dq_BTHD


def backward_keys(
    dy_BTHD: Tensor, given: tuple[Tensor, ...], numbers: tuple[Tensor, Tensor], scale: float, wide_BTHD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values; that of the queries is added to `wide_BTHD` where there is one."""
    dk_BTHD, dv_BTHD = _like(given[1]), _like(given[2])
    rows = (*given[:3], dy_BTHD, dk_BTHD, dv_BTHD, dk_BTHD if wide_BTHD is None else wide_BTHD)
    _launch(_narrow_attention_keys, rows, numbers, scale, KEYS, share=SHARE, add=wide_BTHD is not None)
    return dk_BTHD, dv_BTHD


def _like(x_BTHD: Tensor) -> Tensor:
    return torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype, device=x_BTHD.device)


def _launch(
    kernel, rows: tuple[Tensor, ...], numbers: tuple[Tensor, ...], scale: float, tiles: dict[int, Tiles], **how: int
) -> None:
    """One program for each `held` rows of each head; `rows` lie in any order in which a head's row is in one piece."""
    rows = tuple(x if x.stride(3) == 1 else x.contiguous() for x in rows)
    batch, length, heads, head_dim = rows[0].shape
    assert length * max(x.stride(1) for x in rows) < 1 << 31, f"{length} rows are too far apart"
    held, step, num_warps, num_stages = tiles[head_dim]
    grid = (triton.cdiv(length, held), heads, batch)
    options = {"dim": head_dim, "held": held, "step": step, "num_warps": num_warps, "num_stages": num_stages}
    # Products and sums may become one operation: newer versions of Triton want to be asked.
    options["enable_fp_fusion"] = True
    strides = tuple(x.stride()[:3] for x in rows)
    kernel[grid](rows, strides, numbers, length, numbers[0].shape[2], scale, **how, **options)


# ---- forward -----------------------------------------------------------------------------------------------------------


@triton.jit
def _narrow_attention(
    rows, strides, numbers, length, padded, scale, share: tl.constexpr, by_product: tl.constexpr,
    dim: tl.constexpr, held: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    # At first against no maximum, whose search would cost as much as the sum: float32 and bfloat16 have room for it unless
    # scores are very large. Programs that left it begin again, and float16 has none.
    first = tl.program_id(0) * held
    q_MD = _held(_head(rows[0], strides[0]), strides[0][1], first, length, held, dim)
    small: tl.constexpr = rows[0].dtype.element_ty == tl.float16
    acc_MD, total_M, top_M = _sweep(q_MD, rows, strides, length, scale, small, share, by_product, dim, held, step)
    if not small:
        fine_M = (total_M > NEAR) & (total_M < FAR)
        if tl.min(fine_M.to(tl.int32), 0) == 0:
            acc_MD, total_M, top_M = _sweep(q_MD, rows, strides, length, scale, True, 0, False, dim, held, step)
    _put(_head(rows[3], strides[3]), strides[3][1], first, length, acc_MD / total_M[:, None], held, dim)
    row_M = first + tl.arange(0, held)
    tl.store(_numbers(numbers[0], padded) + row_M, top_M + tl.log2(total_M), mask=row_M < length)


@triton.jit
def _sweep(
    q_MD, rows, strides, length, scale, careful: tl.constexpr, share: tl.constexpr, by_product: tl.constexpr,
    dim: tl.constexpr, held: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    # Over all keys: weighted values, weights, and what the scores were held against.
    k, v = _head(rows[1], strides[1]), _head(rows[2], strides[2])
    acc_MD = tl.zeros((held, dim), tl.float32)
    top_M = tl.full((held,), float("-inf") if careful else 0.0, tl.float32)
    total = tl.zeros((held, 16) if by_product else (held,), tl.float32)
    full = length // step * step
    for start in range(0, full, step):
        k_ND = _tile(k, strides[1][1], start, length, step, dim, False)
        v_ND = _tile(v, strides[2][1], start, length, step, dim, False)
        s_MN = _dot(q_MD, tl.trans(k_ND))
        acc_MD, total, top_M = _gather(s_MN, v_ND, acc_MD, total, top_M, scale, careful, share, by_product, step)
    if full < length:
        k_ND = _tile(k, strides[1][1], full, length, step, dim, True)
        v_ND = _tile(v, strides[2][1], full, length, step, dim, True)
        s_MN = tl.where((full + tl.arange(0, step) < length)[None, :], _dot(q_MD, tl.trans(k_ND)), float("-inf"))
        acc_MD, total, top_M = _gather(s_MN, v_ND, acc_MD, total, top_M, scale, careful, 0, by_product, step)
    return acc_MD, tl.max(total, 1) if by_product else total, top_M  # a product gives sixteen times the same


@triton.jit
def _gather(
    s_MN, v_ND, acc_MD, total, top_M, scale, careful: tl.constexpr, share: tl.constexpr, by_product: tl.constexpr,
    step: tl.constexpr,
):  # fmt: skip
    if careful:
        higher_M = tl.maximum(top_M, tl.max(s_MN, 1) * (scale * LOG2E))
        p_MN = tl.exp2(s_MN * (scale * LOG2E) - higher_M[:, None])
        shrink_M = tl.exp2(top_M - higher_M)
        acc_MD *= shrink_M[:, None]
        total *= shrink_M
        top_M = higher_M
    else:
        p_MN = _exp2(s_MN * (scale * LOG2E), share)
    w_MN = p_MN.to(v_ND.dtype)
    if by_product:
        total = _dot(w_MN, tl.full((step, 16), 1.0, v_ND.dtype), total)
    else:
        total += tl.sum(p_MN, 1)
    return _dot(w_MN, v_ND, acc_MD), total, top_M


# ---- backward ----------------------------------------------------------------------------------------------------------


@triton.jit
def _narrow_attention_queries(
    rows, strides, numbers, length, padded, scale, share: tl.constexpr, dim: tl.constexpr, held: tl.constexpr, step: tl.constexpr
):
    # Rows: queries, keys, values, outputs, their gradient, and the queries' gradient, which is what is made here.
    first = tl.program_id(0) * held
    q_MD = _held(_head(rows[0], strides[0]), strides[0][1], first, length, held, dim)
    dy_MD = _held(_head(rows[4], strides[4]), strides[4][1], first, length, held, dim)
    row_M = first + tl.arange(0, held)
    lse_M = tl.load(_numbers(numbers[0], padded) + row_M, mask=row_M < length, other=float("inf"))
    delta_M = _deltas(rows[3], strides[3], dy_MD, first, length, held, dim)
    tl.store(_numbers(numbers[1], padded) + row_M, delta_M, mask=row_M < length)
    k, v = _head(rows[1], strides[1]), _head(rows[2], strides[2])
    dq_MD = tl.zeros((held, dim), tl.float32)
    full = length // step * step
    for start in range(0, full, step):
        k_ND = _tile(k, strides[1][1], start, length, step, dim, False)
        v_ND = _tile(v, strides[2][1], start, length, step, dim, False)
        p_MN = _exp2(_dot(q_MD, tl.trans(k_ND)) * (scale * LOG2E) - lse_M[:, None], share)
        ds_MN = p_MN * (_dot(dy_MD, tl.trans(v_ND)) - delta_M[:, None])
        dq_MD = _dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD)
    if full < length:
        k_ND = _tile(k, strides[1][1], full, length, step, dim, True)
        v_ND = _tile(v, strides[2][1], full, length, step, dim, True)
        s_MN = _dot(q_MD, tl.trans(k_ND)) * (scale * LOG2E) - lse_M[:, None]
        p_MN = tl.exp2(tl.where((full + tl.arange(0, step) < length)[None, :], s_MN, float("-inf")))
        ds_MN = p_MN * (_dot(dy_MD, tl.trans(v_ND)) - delta_M[:, None])
        dq_MD = _dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD)
    _put(_head(rows[5], strides[5]), strides[5][1], first, length, dq_MD * scale, held, dim)


@triton.jit
def _narrow_attention_keys(
    rows, strides, numbers, length, padded, scale, share: tl.constexpr, add: tl.constexpr,
    dim: tl.constexpr, held: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    # Rows: queries, keys, values, the outputs' gradient, then those of keys and values and, to be added to, of queries. Scores
    # lie the other way round, so that they are where the next product wants them. Here keys are held: N of them, M queries.
    first = tl.program_id(0) * held
    k, v = _head(rows[1], strides[1]), _head(rows[2], strides[2])
    k_ND = _held(k, strides[1][1], first, length, held, dim)
    v_ND = _held(v, strides[2][1], first, length, held, dim)
    once_ND = _tile(k, strides[1][1], first, length, held, dim, True) if add else k_ND  # in a sum the last row counts once
    kept = (k_ND, v_ND, once_ND)
    lse, delta = _numbers(numbers[0], padded), _numbers(numbers[1], padded)
    dk_ND, dv_ND = tl.zeros((held, dim), tl.float32), tl.zeros((held, dim), tl.float32)
    full = length // step * step
    for start in range(0, full, step):
        sums = (dk_ND, dv_ND)
        dk_ND, dv_ND = _from_queries(kept, sums, rows, strides, (lse, delta), start, length, scale, share, add, step, False)
    if full < length:
        sums = (dk_ND, dv_ND)
        dk_ND, dv_ND = _from_queries(kept, sums, rows, strides, (lse, delta), full, length, scale, share, add, step, True)
    _put(_head(rows[4], strides[4]), strides[4][1], first, length, dk_ND * scale, held, dim)
    _put(_head(rows[5], strides[5]), strides[5][1], first, length, dv_ND, held, dim)


@triton.jit
def _from_queries(
    kept, sums, rows, strides, numbers, start, length, scale,
    share: tl.constexpr, add: tl.constexpr, step: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    k_ND, v_ND, once_ND = kept
    dk_ND, dv_ND = sums
    dim: tl.constexpr = k_ND.shape[1]
    q_MD = _tile(_head(rows[0], strides[0]), strides[0][1], start, length, step, dim, masked)
    dy_MD = _tile(_head(rows[3], strides[3]), strides[3][1], start, length, step, dim, masked)
    row_M = start + tl.arange(0, step)
    lse, delta = numbers
    if masked:  # a query that is not there is zero and has no gradient: nothing comes of it
        lse_M = tl.load(lse + row_M, mask=row_M < length, other=0.0)
        delta_M = tl.load(delta + row_M, mask=row_M < length, other=0.0)
    else:
        lse_M, delta_M = tl.load(lse + row_M), tl.load(delta + row_M)
    p_NM = _exp2(_dot(k_ND, tl.trans(q_MD)) * (scale * LOG2E) - lse_M[None, :], share)
    dv_ND = _dot(p_NM.to(dy_MD.dtype), dy_MD, dv_ND)
    ds_NM = (p_NM * (_dot(v_ND, tl.trans(dy_MD)) - delta_M[None, :])).to(q_MD.dtype)
    dk_ND = _dot(ds_NM, q_MD, dk_ND)
    if add:
        dq_MD = _dot(tl.trans(ds_NM), once_ND) * scale
        to = _head(rows[6], strides[6]) + row_M[:, None] * strides[6][1] + tl.arange(0, dim)[None, :]
        tl.atomic_add(to, dq_MD, mask=(row_M < length)[:, None] if masked else None, sem="relaxed")
    return dk_ND, dv_ND


@triton.jit
def _narrow_attention_deltas(
    rows, strides, numbers, length, padded, scale, dim: tl.constexpr, held: tl.constexpr, step: tl.constexpr
):
    first = tl.program_id(0) * held
    dy_MD = _held(_head(rows[0], strides[0]), strides[0][1], first, length, held, dim)
    row_M = first + tl.arange(0, held)
    delta_M = _deltas(rows[1], strides[1], dy_MD, first, length, held, dim)
    tl.store(_numbers(numbers[0], padded) + row_M, delta_M, mask=row_M < length)


@triton.jit
def _deltas(y, strides, dy_MD, first, length, held: tl.constexpr, dim: tl.constexpr):
    y_MD = _held(_head(y, strides), strides[1], first, length, held, dim)
    return tl.sum(y_MD.to(tl.float32) * dy_MD.to(tl.float32), 1)


# ---- parts -------------------------------------------------------------------------------------------------------------


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
    # Beyond the end the last row again: it is as tame as the others, and what comes of it is not stored.
    row = tl.minimum(start + tl.arange(0, num), length - 1)[:, None]
    return tl.load(x + row * stride + tl.arange(0, dim)[None, :])


@triton.jit
def _put(x, stride, start, length, values, num: tl.constexpr, dim: tl.constexpr):
    row = start + tl.arange(0, num)[:, None]
    tl.store(x + row * stride + tl.arange(0, dim)[None, :], values.to(x.dtype.element_ty), mask=row < length)


@triton.jit
def _dot(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # has a meaning for float32 only


@triton.jit
def _exp2(x, share: tl.constexpr):
    if share == 0:
        return tl.exp2(x)
    else:
        asm: tl.constexpr = MIXED_1 if share == 1 else MIXED_2
        return tl.inline_asm_elementwise(asm, "=f,=f,=f,=f,f,f,f,f", [x], dtype=tl.float32, is_pure=True, pack=4)
