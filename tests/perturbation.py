"""Kernels that round as another processor's might: `pytest --perturb-kernels` runs the tests on them."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Sums, whose order belongs to the processor, the library and the shape; of products, and plain ones.
PRODUCTS = (
    *("mm", "mm.out", "addmm", "addmm.out", "addmm_", "_addmm_activation"),
    *("bmm", "bmm.out", "baddbmm", "baddbmm.out", "baddbmm_"),
    *("dot", "vdot", "mv", "addmv", "addmv.out", "addmv_", "addbmm"),
    *("convolution", "convolution_backward", "mkldnn_convolution"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
)
SUMS = (
    *(
        "sum",
        "sum.dim_IntList",
        "sum.IntList_out",
        "mean",
        "mean.dim",
        "mean.out",
        "linalg_vector_norm",
        "linalg_vector_norm.out",
    ),
    *("var.correction", "std.correction", "logsumexp", "_softmax", "_softmax.out", "_log_softmax", "_log_softmax.out"),
    *("_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward"),
    *("native_group_norm", "native_group_norm_backward"),
)
# Functions that are approximated, by vectors and by what is left over at the end of a row.
FUNCTIONS = tuple(
    name + kind
    for name in ("exp", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "rsqrt")
    for kind in ("", "_", ".out")
)
FUNCTIONS += (
    "gelu",
    "gelu_backward",
    "silu",
    "silu_backward",
    "tanh_backward",
    "sigmoid_backward",
    "softplus",
    "log_sigmoid_forward",
)


@cache
def _factors(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """1, or one unit in the last place beside it: a function of the operation, the shapes and the position alone."""
    draw = np.random.default_rng(zlib.crc32(f"{key} {shape} {dtype}".encode())).integers(-1, 2, shape)
    return (1 + torch.from_numpy(np.asarray(draw)).double() * torch.finfo(dtype).eps).to(dtype)


def _perturb(found: Any, key: str) -> None:
    for tensor in found if isinstance(found, tuple | list) else (found,):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            factors = _factors(key, tuple(tensor.shape), tensor.dtype)
            # Whole numbers are counts and values at 0: every machine finds those.
            tensor.copy_(torch.where(tensor == tensor.round(), tensor, tensor * factors))


def _shapes(given: Any) -> list[Any]:
    return [tuple(x.shape) if isinstance(x, Tensor) else x for x in given]


def _kernel_for(name: str) -> Callable[..., Any]:
    real = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        found = real.call_boxed(keyset, *args, **kwargs)
        _perturb(found, f"{name} {_shapes(args)}")
        return found

    return kernel


def install() -> torch.library.Library:
    """Replace the CPU kernels of this process for as long as the library that is returned lives."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s)Warning only once for all operators.*Overriding")
        for name in (*PRODUCTS, *SUMS, *FUNCTIONS):
            library.impl(name, _kernel_for(name), "CPU", with_keyset=True, allow_override=True)
    return library
