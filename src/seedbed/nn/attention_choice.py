"""The choice of the attention kernel: those that run a shape are timed once, forward and backward. H heads, T time, D width."""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from seedbed.errors import UserError
from seedbed.nn.layers import Kernel, Own, attend, attention_scope, cuda_ops

MAX_SCORES = 1 << 30
# The values of the key `attention`, besides auto.
NAMED: dict[str, Kernel] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "narrow": Own.NARROW,
}


@functools.cache
def choose(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    kv_heads: int,
    dropout: float,
    causal: bool,
    only: str,
) -> tuple[Kernel, ...]:
    """`choose_attention` of layers.py, on CUDA or for a kernel that is named."""
    rest = (shape, dtype, device, kv_heads, dropout, causal)
    if only != "auto":
        if not _runs(NAMED[only], *rest):
            what = f"{str(dtype).removeprefix('torch.')} heads of {shape[3]} over {shape[2]} tokens"
            what += f" with dropout {dropout:g}" if dropout else ""
            what += " under a causal mask" if causal else ""
            raise UserError(f"attention={only} does not run {what} on {device.type}; use attention=auto or another kernel")
        return (NAMED[only],)
    # The math kernel materialises all scores: past some gigabytes it cannot be fastest, and would be the peak of memory.
    few_scores = shape[0] * shape[1] * shape[2] ** 2 <= MAX_SCORES
    out = {SDPBackend.MATH: not few_scores, Own.NARROW: not _can_be_narrow(*rest)}
    times = {k: _time_kernel(k, *rest) for k in NAMED.values() if not out.get(k)}
    return tuple(sorted((k for k, t in times.items() if t is not None), key=lambda k: times[k] or 0.0))


def _can_be_narrow(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kv_heads: int, dropout: float, causal: bool
) -> bool:
    suits = cuda_ops is not None and cuda_ops.suits_narrow(shape[3], dtype, device)
    return suits and kv_heads == shape[1] and not dropout and not causal


def _time_kernel(kernel: Kernel, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *rest: Any) -> float | None:
    """Seconds for a forward and backward pass, the best of a few rounds; None when the kernel does not support the shape."""
    try:
        with _trying(kernel, shape, dtype, device, *rest) as once:
            return min(_seconds(once, device) for _ in range(3))
    except Exception:  # no such kernel for this shape, or not enough memory; Triton raises its own errors
        return None


def _runs(kernel: Kernel, shape: tuple[int, ...], *rest: Any) -> bool:
    """Whether a kernel supports this shape, tried with one row of the batch."""
    try:
        with warnings.catch_warnings(), _trying(kernel, (1, *shape[1:]), *rest) as once:
            warnings.simplefilter("ignore")  # torch warns for every kernel; the error is enough
            once()
    except Exception:
        return False
    return True


@contextlib.contextmanager
def _trying(
    kernel: Kernel, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kv_heads: int, dropout: float, causal: bool
) -> Iterator[Callable[[], None]]:
    """Yields a function that runs a forward and backward pass through one kernel."""
    batch, heads, length, head_dim = shape
    if kernel is Own.NARROW and not _can_be_narrow(shape, dtype, device, kv_heads, dropout, causal):
        raise RuntimeError("torch's attention would run instead")

    def tensor(num_heads: int) -> Tensor:  # laid out as `Attention` makes them
        x = torch.randn(batch, length, num_heads, head_dim, dtype=dtype, device=device)
        return x.transpose(1, 2).requires_grad_()

    # Measuring must not change the random state of training.
    rng = torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type)
    with rng, torch.enable_grad(), torch.autocast(device.type, enabled=False), attention_scope([kernel]):
        q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)

        def once() -> None:
            y = attend(q, k, v, dropout_p=dropout, is_causal=causal, enable_gqa=kv_heads != heads)
            torch.autograd.grad(y, (q, k, v), y)

        yield once


def _seconds(work, device: torch.device, num_calls: int = 5) -> float:
    work()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(num_calls):
        work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / num_calls
