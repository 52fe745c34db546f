"""adaLN conditioning: shifts, scales and gates for all layers from one matrix product.

B batch, N tokens, C width, M vectors of a modulation.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn import gated
from seedbed.nn.init import declare, fill_
from seedbed.nn.layers import rms_norm, widen


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Disables autocast: for the few products per image whose rounding would affect every pixel."""
    if device.type == "meta":  # which has no autocast
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class Modulation(nn.Module):
    """Maps a condition to `num` vectors of the model's width, in one product for all layers; zero at initialisation."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.num = num
        self.linear = nn.Linear(width, num * width)
        declare(self.linear.weight, "matrix", rows=(width,) * num)

    def init_weights(self) -> None:
        fill_(self.linear.weight, 0.0)
        fill_(self.linear.bias, 0.0)

    def forward(self, condition_BC: Tensor) -> Tensor:
        """All vectors (B, num, C): shifts, scales and gates in order of use."""
        return self.linear(F.silu(condition_BC)).unflatten(-1, (self.num, -1))


def modulated_norm(x_BNC: Tensor, shift_B1C: Tensor, scale_B1C: Tensor) -> Tensor:
    """RMS norm of every token, times 1 + scale, plus shift: one pass when compiled."""
    wide = rms_norm(widen(x_BNC))
    return torch.addcmul(widen(shift_B1C), wide, 1.0 + widen(scale_B1C)).to(x_BNC.dtype)


def gate_and_norm(x_BNC: Tensor, branch_BNC: Tensor | None, vectors_BMC: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream with the gated branch added, and its modulated norm; in one pass where there is a kernel.

    The vectors are gate, shift and scale; without a branch, only the last two.
    """
    if gated.can_gate_and_norm(x_BNC, branch_BNC, vectors_BMC):
        sum_BNC, y_BNC, _ = gated.gate_and_norm(x_BNC, branch_BNC, vectors_BMC)
        return x_BNC if branch_BNC is None else sum_BNC, y_BNC
    return _plain(x_BNC, branch_BNC, vectors_BMC)


def _plain(x_BNC: Tensor, branch_BNC: Tensor | None, vectors_BMC: Tensor) -> tuple[Tensor, Tensor]:
    *gate, shift, scale = vectors_BMC.split(1, dim=1)
    if branch_BNC is not None:
        x_BNC = torch.addcmul(x_BNC, gate[0], branch_BNC)
    return x_BNC, modulated_norm(x_BNC, shift, scale)


@functools.cache
def try_gate_and_norm(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the kernels once with plain code on this device; they are not used where they differ.

    Must not be called from compiled code.
    """
    rng = torch.Generator(device).manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        given = [torch.randn(2, rows, width, generator=rng, device=device, dtype=dtype) for rows in (7, 7, 3)]
        if not gated.can_gate_and_norm(*given):
            return
        try:
            pairs = zip(_with_gradients(gate_and_norm, given), _with_gradients(_plain, [x.float() for x in given]), strict=True)
            limit = 1e-4 if dtype == torch.float32 else 3e-2
            gated.trusted = all(((a.float() - b).norm() <= limit * b.norm()).item() for a, b in pairs)
            why = "differs from plain code"
        except Exception as error:  # Triton raises its own errors
            gated.trusted, why = False, f"does not run: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if not gated.trusted:
        warnings.warn(f"the kernel for gated norms {why}; plain code takes its place, somewhat slower", stacklevel=2)


def _with_gradients(call: Callable, given: list[Tensor]) -> list[Tensor]:
    given = [x.detach().requires_grad_() for x in given]
    out = call(*given)
    return [x.detach() for x in (*out, *torch.autograd.grad(out, given, out))]
