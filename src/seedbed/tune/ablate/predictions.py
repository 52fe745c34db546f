"""Predicts the speed of a change before it is measured, from operation counts and measured rates."""

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.nn.layers import attend, attention_scope, choose_attention
from seedbed.train.activation_checkpointing import checkpoint_units
from seedbed.train.engine import DTYPES
from seedbed.train.system import System
from seedbed.tune.ablate.op_counts import Attention, Matmul, OpCounter, OpCounts, count
from seedbed.tune.workload import Workload, synchronize

# Remaining share of bytes and calls after compilation; and when only the backward pass is compiled.
FUSED = (0.4, 0.3)
FUSED_BACKWARD = (0.65, 0.6)
# How much faster 8-bit products are than 16-bit ones once their scales are counted; torchao states 1.2 to 1.5 for whole models.
FLOAT8_GAIN = 1.4
# Smaller differences are predicted as no effect.
NOTHING = 0.005

_WHY_NOTHING = {
    "compile_optimizer": "the update is one fused pass already, and a small part of the step",
    "compile_autograd": "backward passes of compiled modules are compiled already",
}

TIMED = 0.02  # seconds per measurement
# Numbers in the tensors that are tried; a product with larger ones is measured in part.
MOST = {"cuda": 1 << 28, "mps": 1 << 26, "cpu": 1 << 24}
SHORTEST_KERNEL = 1.5e-6  # including its launch


@dataclass(frozen=True)
class Prediction:
    """A ratio of items per second against the baseline, and its reason."""

    ratio: float
    basis: str


@dataclass(frozen=True)
class Parts:
    """The estimated seconds of a step, by kind of work."""

    matmul: float
    attention: float
    memory: float
    launches: float
    update: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def in_words(self) -> str:
        shares = {name: seconds / self.total for name, seconds in dataclasses.asdict(self).items()}
        return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= NOTHING)


class Predictor:
    """Predicts the rows of one report. Shapes are counted once per model, and each shape's rate is measured once."""

    def __init__(self, workload: Workload, data_of: Callable[[Config], Data]) -> None:
        self.workload, self.data_of, self.rates = workload, data_of, Rates(workload.device)
        self._op_counts: dict[str, OpCounts] = {}

    def predict(self, axis: str, config: Config) -> Prediction:
        """The ratio for a config, with its reason; no effect is a prediction too."""
        base = self.workload.config
        if config.float8 and not self.op_counts(config).float8_share:
            return Prediction(1.0, "no effect expected: 0 layers are large enough to be converted")
        work = self.flops_per_item(config) / (self.flops_per_item(base) or 1.0)
        try:
            before, after = self.parts(base), self.parts(config)
        except torch.OutOfMemoryError:
            return Prediction(1.0 / (work or 1.0), f"executed FLOP per item x{work:.2f} alone: its parts do not fit to be timed")
        ratio = (config.batch / after.total) / (base.batch / before.total)
        if abs(ratio - 1.0) < NOTHING:
            cuda = self.workload.device.type == "cuda"
            captured = "the host is estimated to keep ahead of the device" if cuda else "there are no CUDA graphs here"
            why = {**_WHY_NOTHING, "capture": captured}.get(axis, "the same operations")
            return Prediction(1.0, f"no effect expected: {why}")
        executed = f"executed FLOP per item x{work:.2f}; " if abs(work - 1.0) >= NOTHING else ""
        steps = f"{before.total * 1e3:.3g} -> {after.total * 1e3:.3g} ms"
        return Prediction(ratio, f"{executed}estimated step {steps} at measured rates ({after.in_words()})")

    def flops_per_item(self, config: Config) -> float:
        """FLOP of the matrix products and attentions that run, recomputation included."""
        return self.op_counts(config).flops / config.batch

    def overhead(self, config: Config) -> float:
        """The factor by which recomputation multiplies the FLOP of a step."""
        plain = self.op_counts(dataclasses.replace(config, remat="none"))
        return self.op_counts(config).flops / (plain.flops or 1.0)

    def op_counts(self, config: Config) -> OpCounts:
        """The operation counts of a step. They depend on the model and on what is recomputed."""
        settings = [word for word in configs.PLAIN if not word.startswith("remat=")]
        plain = configs.override(config, [*settings, "device=cpu"])
        key = configs.digest(plain)
        if key not in self._op_counts:
            self._op_counts[key] = count(self.workload.recipe, plain, self.data_of(config))
        return self._op_counts[key]

    def parts(self, config: Config) -> Parts:
        """The parts of a step, each at the rate measured for its shape."""
        rates, op_counts, precision = self.rates, self.op_counts(config), config.precision
        matmul = _sum(op_counts.matmuls, lambda product: rates.product(product, precision))
        if config.float8:
            matmul *= 1.0 - op_counts.float8_share * (1.0 - 1.0 / FLOAT8_GAIN)
        attention = _sum(op_counts.attentions, lambda call: rates.attentions(call, precision, config.attention))
        fused = FUSED if config.compile != "off" else FUSED_BACKWARD if config.compile_autograd else (1.0, 1.0)
        bytes_left, calls_left = fused
        memory = op_counts.bytes * bytes_left / rates.bandwidth
        update = _sum(op_counts.update_matmuls, lambda product: rates.product(product, precision))
        update += op_counts.update_bytes / rates.bandwidth
        busy = matmul + attention + memory + update
        return Parts(matmul, attention, memory, self._launches(config, calls_left, busy), update)

    def _launches(self, config: Config, calls_left: float, busy: float) -> float:
        """Time without computation: on a host the overhead of every call, on a GPU the lag of the host."""
        cuda, calls = self.workload.device.type == "cuda", self.op_counts(config).num_ops * calls_left
        if cuda and config.capture != "off":
            return calls * SHORTEST_KERNEL
        host = calls * self.rates.per_op
        if config.remat != "none" and config.compile == "off":
            again = self.op_counts(config).num_ops - self.op_counts(dataclasses.replace(config, remat="none")).num_ops
            host += again * self.rates.recomputed(config.remat)
        return max(calls * SHORTEST_KERNEL, host - busy) if cuda else host


def product(ratios: Iterable[float], names: Iterable[str]) -> Prediction:
    """The combined ratio if effects are independent."""
    return Prediction(math.prod(ratios), f"the product of what was measured one by one: {', '.join(names)}")


def _sum(calls: list[Any], seconds: Callable[[Any], float]) -> float:
    return sum(seconds(call) * num for call, num in Counter(calls).items())


class Rates:
    """Seconds for parts of a step on one device; every shape is measured once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recomputed = functools.cache(self._recomputed)
        self.product = functools.cache(self._matmul)
        self.attentions = functools.cache(self._attention)

    @functools.cached_property
    def per_op(self) -> float:
        """Host overhead per operation in a forward and backward pass through many layers of one number."""
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.Tanh()) for _ in range(30)))
        x = torch.ones(1, 1)
        with OpCounter() as counter:
            layers(x).sum().backward()
        return self.seconds(lambda: layers(x).sum().backward()) / counter.op_counts.num_ops

    def _recomputed(self, mode: str) -> float:
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

        def timed(num: int) -> float:
            start = time.perf_counter()
            for _ in range(num):
                work()
            synchronize(self.device)
            return (time.perf_counter() - start) / num

        timed(1)
        num = max(1, min(50, int(TIMED / 4 / max(timed(1), 1e-7))))
        return min(timed(num) for _ in range(4))

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


class _Chain(System):
    """A single unit of many operations with almost no computation."""

    LENGTH = 60

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(()))

    def compile_units(self) -> Iterator[nn.Module]:
        yield self

    def forward(self) -> Tensor:
        x = self.start
        for _ in range(self.LENGTH):
            x = x.sin()
        return x
