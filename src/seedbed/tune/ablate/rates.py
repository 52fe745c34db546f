"""Measured rates of this device: matrix products and attentions of given shapes, bandwidth, call overhead."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.nn.layers import attend, attention_scope, choose_attention
from seedbed.train.activation_checkpointing import checkpoint_units
from seedbed.train.engine import DTYPES
from seedbed.train.system import System
from seedbed.tune.ablate.op_counts import Attention, Matmul, OpCounter
from seedbed.tune.workload import synchronize

TIMED = 0.02  # seconds per measurement
# Numbers in the tensors that are tried; a product with larger ones is measured in part.
MOST = {"cuda": 1 << 28, "mps": 1 << 26, "cpu": 1 << 24}
SHORTEST_KERNEL = 1.5e-6  # including its launch


class Rates:
    """Seconds for parts of a step on one device; every shape is measured once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recomputed = functools.cache(self._recomputed)
        self.product = functools.cache(self._matmul)
        self.attentions = functools.cache(self._attention)

    @functools.cached_property
    def per_op(self) -> float:
        """Host overhead per operation in a forward and backward pass through a layer of one number."""
        layers, x = _Layers(), torch.ones(1, 1)
        with OpCounter() as counter:
            layers(x).backward()
        return self.seconds(lambda: layers(x).backward()) / counter.op_counts.num_ops

    def _recomputed(self, mode: str) -> float:
        """Host overhead per recomputed operation."""
        times = {}
        for tried in ("none", mode):
            system = _Chain().to(self.device)
            checkpoint_units(system, tried, self.device)
            times[tried] = self.seconds(lambda system=system: system().backward())
        return max(times[mode] - times["none"], 0.0) / _Chain.LENGTH

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second, read and written, of an operation on large tensors."""
        x = torch.zeros(MOST[self.device.type], device=self.device)
        y = torch.empty_like(x)
        return 2.0 * x.numel() * x.element_size() / self.seconds(lambda: torch.neg(x, out=y))

    def seconds(self, work: Callable[[], Any]) -> float:
        """The best of some rounds."""
        work()
        synchronize(self.device)
        start = time.perf_counter()
        work()
        synchronize(self.device)
        num = max(1, min(50, int(TIMED / 4 / max(time.perf_counter() - start, 1e-7))))
        times = []
        for _ in range(4):
            start = time.perf_counter()
            for _ in range(num):
                work()
            synchronize(self.device)
            times.append((time.perf_counter() - start) / num)
        return min(times)

    def _matmul(self, shape: Matmul, precision: str) -> float:
        """Seconds of a matrix product; extrapolated for one too large to try."""
        dtype = DTYPES[precision]
        largest = shape.copies * max(shape.m * shape.k, shape.k * shape.n, shape.m * shape.n)
        part = min(1.0, MOST[self.device.type] / largest)
        m = max(1, int(shape.m * part))
        # Random numbers, since a GPU multiplies zeros faster: they need less power.
        a = torch.randn(shape.copies, m, shape.k, dtype=dtype, device=self.device)
        b = torch.randn(shape.copies, shape.k, shape.n, dtype=dtype, device=self.device)
        multiply = torch.bmm if shape.copies > 1 else lambda a, b: torch.mm(a[0], b[0])
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if precision == "tf32" and self.device.type == "cuda" else "highest")
        try:
            return self.seconds(lambda: multiply(a, b)) * shape.m / m
        finally:
            torch.set_float32_matmul_precision(before)

    def _attention(self, call: Attention, precision: str, kernel: str) -> float:
        """Seconds of a fused attention with the kernel that a run would use."""
        dtype = DTYPES[precision]
        sizes = (call.batch, call.heads, call.queries, call.head_dim)
        kernels = choose_attention(sizes, dtype, self.device, call.kv_heads, causal=call.causal, only=kernel)

        def tensor(heads: int, length: int) -> Tensor:
            x = torch.randn(call.batch, length, heads, call.head_dim, dtype=dtype, device=self.device)
            return x.transpose(1, 2).requires_grad_()

        q, k, v = tensor(call.heads, call.queries), *(tensor(call.kv_heads, call.keys) for _ in range(2))

        def forward() -> Tensor:
            return attend(q, k, v, is_causal=call.causal, enable_gqa=call.heads != call.kv_heads)

        with attention_scope(kernels), torch.enable_grad():
            once = self.seconds(forward)
            if not call.backward:
                return once
            return max(self.seconds(lambda: torch.autograd.grad(y := forward(), (q, k, v), y)) - once, 0.0)


class _Layers(nn.Module):
    """Many layers with almost no computation."""

    def __init__(self, num: int = 30) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.Tanh()) for _ in range(num)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


class _Chain(System):
    """A unit of many operations with almost no computation."""

    LENGTH = 60

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.ones(1))

        def forward(self) -> Tensor:
            x = self.start
            for _ in range(_Chain.LENGTH):
                x = x.sin()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.unit = _Chain.Unit()

    def compile_units(self) -> Iterator[nn.Module]:
        yield self.unit

    def forward(self) -> Tensor:
        return self.unit().sum()
