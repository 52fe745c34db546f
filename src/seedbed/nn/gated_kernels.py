"""The gated addition and the modulated norm in Triton; imported only on CUDA.

B batch, T tokens, D width, M vectors of a modulation, S spans of tokens; in a program R tokens at a time.
"""

from typing import NamedTuple

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from seedbed.nn.layers import EPS

EPSILON = tl.constexpr(EPS)


class Tiles(NamedTuple):
    """Elements per iteration of a program, its warps, its pipeline stages, and the approximate number of programs."""

    numbers: int
    warps: int
    stages: int
    programs: int


FORWARD = Tiles(512, 1, 2, 3072)
BACKWARD = Tiles(512, 1, 2, 1536)

Three = tuple[Tensor, Tensor, Tensor]


def forward(x_BTD: Tensor, branch_BTD: Tensor | None, vectors_BMD: Tensor, out: Three) -> None:
    """Fill the sum (only where there is a branch), its modulated norm and each token's rate; the last three are contiguous."""
    gated = branch_BTD is not None
    rows = _contiguous_rows(x_BTD, branch_BTD if gated else x_BTD)
    _launch(_gate_and_norm, FORWARD, x_BTD, rows, vectors_BMD, out, gated=gated)


def backward(dsum_BTD: Tensor | None, dy_BTD: Tensor, kept: tuple[Tensor, Tensor | None, Tensor, Tensor], out: Three) -> None:
    """Fill the gradients of stream and branch (where there is one) and the parts (B, S, M, D) of that of the vectors.

    `kept` are the sum, the branch, the vectors and the norm factors; `dsum_BTD` is None where the sum was not used.
    """
    sum_BTD, branch_BTD, vectors_BMD, rates_BT = kept
    gated = branch_BTD is not None
    given = (sum_BTD, dy_BTD, dy_BTD if dsum_BTD is None else dsum_BTD, branch_BTD if gated else sum_BTD)
    rows = _contiguous_rows(*given)
    out_and_rates = (*out, rates_BT)
    _launch(_gate_and_norm_back, BACKWARD, sum_BTD, rows, vectors_BMD, out_and_rates, gated=gated, followed=dsum_BTD is not None)


def num_spans(batch: int, length: int, width: int) -> int:
    """The number of spans into which the tokens of an image are split for the backward pass."""
    return triton.cdiv(length, _span(BACKWARD, batch, length, _held(BACKWARD, width)))


def _contiguous_rows(*rows: Tensor) -> tuple[Tensor, ...]:
    """The tensors with every token contiguous; unchanged where they are."""
    return tuple(x if x.stride(2) == 1 else x.contiguous() for x in rows)


def _held(tiles: Tiles, width: int) -> int:
    """Tokens per iteration of a program."""
    return max(1, tiles.numbers // triton.next_power_of_2(width))


def _span(tiles: Tiles, batch: int, length: int, held: int) -> int:
    """Tokens per program: a multiple of those per iteration."""
    per_image = max(1, tiles.programs // batch)
    return triton.cdiv(triton.cdiv(length, per_image), held) * held


def _launch(kernel, tiles: Tiles, like: Tensor, rows: tuple[Tensor, ...], vectors: Tensor, out: tuple, **how: bool) -> None:
    """One program for each span of tokens of each image."""
    (batch, length, width), vectors = like.shape, vectors if vectors.stride(2) == 1 else vectors.contiguous()
    held = _held(tiles, width)
    span = _span(tiles, batch, length, held)
    spans = triton.cdiv(length, span)
    sizes = {"width": width, "block": triton.next_power_of_2(width), "held": held, "stages": tiles.stages}
    # Allow fused multiply-add: newer versions of Triton need the option.
    options = {"num_warps": tiles.warps, "enable_fp_fusion": True}
    strides = tuple(x.stride()[:2] for x in (*rows, vectors))
    kernel[(batch * spans,)](rows, vectors, strides, out, (length, span, spans), **how, **sizes, **options)


@triton.jit
def _gate_and_norm(
    rows, vectors, strides, out, lengths, gated: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr, held: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    # Rows: the stream and the branch. Out: their sum, its modulated norm, the norm factors.
    image, before, first, last = _place(lengths)
    gate_D, shift_D, scale_D = _vectors(vectors, strides[2], image, gated, width, block)
    rates = out[2] + before
    for start in tl.range(first, last, held, num_stages=stages):
        row_R1 = start + tl.arange(0, held)[:, None]
        x_RD = _get(rows[0], strides[0], image, row_R1, last, width, block).to(tl.float32)
        if gated:
            x_RD += gate_D * _get(rows[1], strides[1], image, row_R1, last, width, block).to(tl.float32)
            narrow_RD = x_RD.to(out[0].dtype.element_ty)
            _put(out[0], before, row_R1, last, narrow_RD, width, block)
            x_RD = narrow_RD.to(tl.float32)  # the norm is of the rounded sum
        rate_R1 = 1.0 / tl.sqrt(tl.sum(x_RD * x_RD, 1, keep_dims=True) / width + EPSILON)
        tl.store(rates + row_R1, rate_R1, mask=row_R1 < last)
        _put(out[1], before, row_R1, last, x_RD * rate_R1 * (1.0 + scale_D) + shift_D, width, block)


@triton.jit
def _gate_and_norm_back(
    rows, vectors, strides, out, lengths, gated: tl.constexpr, followed: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr, held: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    # Rows: the sum, the gradients of its norm and of itself, the branch. Out: the gradients of stream and branch, the partial
    # gradients of the vectors; and the norm factors, which are read.
    image, before, first, last = _place(lengths)
    gate_D, _, scale_D = _vectors(vectors, strides[4], image, gated, width, block)
    rates = out[3] + before
    dgate_RD = tl.zeros((held, block), tl.float32)
    dshift_RD = tl.zeros((held, block), tl.float32)
    dscale_RD = tl.zeros((held, block), tl.float32)
    for start in tl.range(first, last, held, num_stages=stages):
        row_R1 = start + tl.arange(0, held)[:, None]
        # All loads are issued before the reduction over a token, which synchronises the warps.
        x_RD = _get(rows[0], strides[0], image, row_R1, last, width, block)
        dy_RD = _get(rows[1], strides[1], image, row_R1, last, width, block).to(tl.float32)
        if followed:
            dsum_RD = _get(rows[2], strides[2], image, row_R1, last, width, block)
        if gated:
            branch_RD = _get(rows[3], strides[3], image, row_R1, last, width, block)
        rate_R1 = tl.load(rates + row_R1, mask=row_R1 < last, other=0.0)
        normed_RD = x_RD.to(tl.float32) * rate_R1
        slope_RD = dy_RD * (1.0 + scale_D)
        # Minus the component along the token, which the norm removes.
        along_R1 = tl.sum(slope_RD * normed_RD, 1, keep_dims=True) / width
        d_RD = rate_R1 * (slope_RD - normed_RD * along_R1)
        if followed:
            d_RD += dsum_RD.to(tl.float32)
        _put(out[0], before, row_R1, last, d_RD, width, block)
        dshift_RD += dy_RD
        dscale_RD += dy_RD * normed_RD
        if gated:
            dgate_RD += d_RD * branch_RD.to(tl.float32)
            _put(out[1], before, row_R1, last, gate_D * d_RD, width, block)
    num: tl.constexpr = 3 if gated else 2
    column = tl.arange(0, block)
    part = out[2] + tl.program_id(0).to(tl.int64) * num * width + column
    if gated:
        tl.store(part, tl.sum(dgate_RD, 0), mask=column < width)
    tl.store(part + (num - 2) * width, tl.sum(dshift_RD, 0), mask=column < width)
    tl.store(part + (num - 1) * width, tl.sum(dscale_RD, 0), mask=column < width)


@triton.jit
def _place(lengths):
    # The image of this program, the tokens before the image, and the program's first token and end within it.
    length, span, spans = lengths
    image = (tl.program_id(0) // spans).to(tl.int64)
    first = tl.program_id(0) % spans * span
    return image, image * length, first, tl.minimum(first + span, length)


@triton.jit
def _vectors(vectors, strides, image, gated: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    column = tl.arange(0, block)[None, :]
    at = vectors + image * strides[0] + column
    if gated:
        gate_D = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
        at += strides[1]
    else:
        gate_D = tl.zeros((1, block), tl.float32)
    shift_D = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
    return gate_D, shift_D, tl.load(at + strides[1], mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _get(x, strides, image, row_R1, last, width: tl.constexpr, block: tl.constexpr):
    column = tl.arange(0, block)[None, :]
    at = x + image * strides[0] + row_R1 * strides[1] + column
    return tl.load(at, mask=(row_R1 < last) & (column < width), other=0.0)


@triton.jit
def _put(x, before, row_R1, last, values, width: tl.constexpr, block: tl.constexpr):
    column = tl.arange(0, block)[None, :]
    to = x + before * width + row_R1 * width + column
    tl.store(to, values.to(x.dtype.element_ty), mask=(row_R1 < last) & (column < width))
