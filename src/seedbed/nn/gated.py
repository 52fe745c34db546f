"""The addition of a gated branch and the modulated norm after it as one operation on CUDA, opaque to the compiler.

B batch, T tokens, D width, M vectors of a modulation (a gate where there is a branch, a shift, a scale), S spans of tokens.
"""

import torch
from torch import Tensor

from seedbed.nn import HAS_TRITON

MAX_WIDTH, DTYPES = 2048, (torch.float32, torch.bfloat16, torch.float16)
# False once the kernels have given other results than plain code on this machine.
trusted = True


def can_gate_and_norm(x_BTD: Tensor, branch_BTD: Tensor | None, vectors_BMD: Tensor) -> bool:
    """Whether `gate_and_norm` supports these: CUDA, all of one supported dtype, and not too wide for registers."""
    if not (trusted and HAS_TRITON and x_BTD.is_cuda and x_BTD.dtype in DTYPES):
        return False
    if x_BTD.ndim != 3 or x_BTD.shape[2] > MAX_WIDTH:
        return False
    alike = vectors_BMD.dtype == x_BTD.dtype and vectors_BMD.shape[0] == x_BTD.shape[0]
    return alike and (branch_BTD is None or (branch_BTD.dtype, branch_BTD.shape) == (x_BTD.dtype, x_BTD.shape))


@torch.library.custom_op("seedbed::gate_and_norm", mutates_args=())
def gate_and_norm(x_BTD: Tensor, branch_BTD: Tensor | None, vectors_BMD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum (empty without a branch), its modulated norm, and every token's norm factor in float32."""
    from seedbed.nn import gated_kernels

    out = _sum_norm_rates(x_BTD, branch_BTD, vectors_BMD)
    gated_kernels.forward(x_BTD, branch_BTD, vectors_BMD, out)
    return out


@gate_and_norm.register_fake
def _sum_norm_rates(x_BTD: Tensor, branch_BTD: Tensor | None, vectors_BMD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rates_BT = x_BTD.new_empty(x_BTD.shape[:2], dtype=torch.float32)
    return x_BTD.new_empty(0 if branch_BTD is None else x_BTD.shape), x_BTD.new_empty(x_BTD.shape), rates_BT


@torch.library.custom_op("seedbed::gate_and_norm_backward", mutates_args=())
def gate_and_norm_backward(
    dsum_BTD: Tensor | None, dy_BTD: Tensor, sum_BTD: Tensor, branch_BTD: Tensor | None, vectors_BMD: Tensor, rates_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the stream and of the branch, and those of the vectors as sums over each span of tokens, in float32."""
    from seedbed.nn import gated_kernels

    out = _gradients(dsum_BTD, dy_BTD, sum_BTD, branch_BTD, vectors_BMD, rates_BT)
    gated_kernels.backward(dsum_BTD, dy_BTD, (sum_BTD, branch_BTD, vectors_BMD, rates_BT), out)
    return out


@gate_and_norm_backward.register_fake
def _gradients(
    dsum_BTD: Tensor | None, dy_BTD: Tensor, sum_BTD: Tensor, branch_BTD: Tensor | None, vectors_BMD: Tensor, rates_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from seedbed.nn import gated_kernels

    batch, length, width = sum_BTD.shape
    num_spans = gated_kernels.num_spans(batch, length, width)
    parts_BSMD = sum_BTD.new_empty(batch, num_spans, vectors_BMD.shape[1], width, dtype=torch.float32)
    dbranch_BTD = sum_BTD.new_empty(0 if branch_BTD is None else sum_BTD.shape)
    return sum_BTD.new_empty(sum_BTD.shape), dbranch_BTD, parts_BSMD


def _keep(ctx, inputs: tuple[Tensor, Tensor | None, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x_BTD, branch_BTD, vectors_BMD = inputs
    ctx.set_materialize_grads(False)  # the last norm's sum has no gradient, nor have the norm factors
    ctx.save_for_backward(x_BTD if branch_BTD is None else output[0], branch_BTD, vectors_BMD, output[2])


def _backward(
    ctx, dsum_BTD: Tensor | None, dy_BTD: Tensor | None, drates_BT: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    assert drates_BT is None, "the norm factors are for the backward pass only"
    sum_BTD, branch_BTD, vectors_BMD, rates_BT = ctx.saved_tensors  # once: activation checkpointing gives them out once
    dy_BTD = torch.zeros_like(sum_BTD) if dy_BTD is None else dy_BTD
    dx_BTD, dbranch_BTD, parts_BSMD = gate_and_norm_backward(dsum_BTD, dy_BTD, sum_BTD, branch_BTD, vectors_BMD, rates_BT)
    # Summed here, where the compiler sees it: it writes the sums directly into the gradient of all modulations.
    return dx_BTD, None if branch_BTD is None else dbranch_BTD, parts_BSMD.sum(1).to(vectors_BMD.dtype)


gate_and_norm.register_autograd(_backward, setup_context=_keep)
