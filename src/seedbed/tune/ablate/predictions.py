"""Predicts the speed of a change before it is measured, from operation counts and measured rates."""

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.nn.init import rows_of
from seedbed.nn.layers import attend, attention_scope, choose_attention
from seedbed.recipes import Recipe
from seedbed.train.activation_checkpointing import checkpoint_units
from seedbed.train.engine import DTYPES
from seedbed.train.float8 import convertible
from seedbed.train.system import Batch, System
from seedbed.tune.estimate import EstimateEngine, forward_backward, with_fake_tensors
from seedbed.tune.workload import Workload, num_parameters, synchronize

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
_aten = torch.ops.aten
_FIRST = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
_FREE = (_aten.detach, _aten.alias, _aten._unsafe_view)
_ITERATIONS = 5  # of Muon's Newton-Schulz


@dataclass(frozen=True)
class Matmul:
    """`copies` matrix products of (m, k) by (k, n) in one call."""

    copies: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        return 2.0 * self.copies * self.m * self.k * self.n


@dataclass(frozen=True)
class Attention:
    backward: bool
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Two products forward and four backward; full, not halved for causality."""
        return (8.0 if self.backward else 4.0) * self.batch * self.heads * self.queries * self.keys * self.head_dim


@dataclass
class OpCounts:
    """Operations of a step: forward and backward, and separately the update of the weights."""

    matmuls: list[Matmul] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    bytes: float = 0.0
    num_ops: int = 0
    update_matmuls: list[Matmul] = field(default_factory=list)
    update_bytes: float = 0.0
    num_params: int = 0
    float8_share: float = 0.0  # of the weights of all linear layers

    @property
    def flops(self) -> float:
        return sum(call.flops for call in (*self.matmuls, *self.attentions))

    def extrapolate(self, other: "OpCounts", factor: float) -> "OpCounts":
        """The counts for `factor` times as many items as `self`, where `other` has twice as many.

        Calls keep their order, so sizes are extrapolated linearly call by call.
        """
        out = OpCounts(num_ops=other.num_ops, bytes=_extrapolate(self.bytes, other.bytes, factor))
        for one, two in _pairs(self.matmuls, other.matmuls):
            sizes = zip(dataclasses.astuple(one), dataclasses.astuple(two), strict=True)
            out.matmuls.append(Matmul(*(round(_extrapolate(a, b, factor)) for a, b in sizes)))
        for one, two in _pairs(self.attentions, other.attentions):
            out.attentions.append(dataclasses.replace(two, batch=round(_extrapolate(one.batch, two.batch, factor))))
        return out


class OpCounter(TorchDispatchMode):
    """Counts every operation that computes or moves data."""

    def __init__(self) -> None:
        super().__init__()
        self.op_counts = OpCounts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        op_counts, packet = self.op_counts, func.overloadpacket
        # A view, or metadata.
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        if func.namespace == "prim" or packet in _FREE or not all(alias.is_write for alias in aliases):
            return out
        op_counts.num_ops += 1
        if packet in _FIRST:
            a, b = args[_FIRST[packet] : _FIRST[packet] + 2]
            copies = a.shape[0] if a.ndim == 3 else 1
            op_counts.matmuls.append(Matmul(int(copies), int(a.shape[-2]), int(a.shape[-1]), int(b.shape[-1])))
        elif "scaled_dot_product" in func.name():
            op_counts.attentions.append(_attention(func, args, kwargs))
        else:
            op_counts.bytes += _bytes((args, kwargs)) + _bytes(out)
        return out


def count(recipe: Recipe, config: Config, data: Data) -> OpCounts:
    """The counts of a whole step of `config`, extrapolated from one and two items."""
    (one, two), engine, _ = with_fake_tensors(
        recipe, config, data, lambda engine, items, _: [_count(engine, items[b]) for b in (1, 2)]
    )
    part, num = one.extrapolate(two, config.batch // config.accum), config.accum
    update = optimizer(engine.system, config)
    body = part.matmuls * num, part.attentions * num, part.bytes * num, part.num_ops * num
    return OpCounts(*body, *update, num_parameters(engine.system), float8_share(engine.system))


def _count(engine: EstimateEngine, batch: Batch) -> OpCounts:
    engine.variant = engine.system.variant(0, engine.config.steps)
    with OpCounter() as counter:
        forward_backward(engine, batch)
    return counter.op_counts


def optimizer(system: nn.Module, config: Config) -> tuple[list[Matmul], float]:
    """Muon's products, and the bytes that an update reads and writes."""
    matmuls: list[Matmul] = []
    trained = [p for p in system.parameters() if p.requires_grad]
    if config.optim.kind == "muon":
        for param in trained:
            for rows in rows_of(param) if param.ndim == 2 else ():
                short, long = sorted((rows, param.shape[1]))
                sizes = ((short, long, short), (short, short, short), (short, short, long))
                matmuls += [Matmul(1, *size) for size in sizes] * _ITERATIONS
    # Weights, gradients and two moments are read, all but the gradients written; an average is read and written too.
    passes = 7 + 2 * (bool(config.ema) + bool(config.ema2))
    return matmuls, float(passes * sum(p.nbytes for p in trained))


def float8_share(system: nn.Module) -> float:
    sizes = [(m.weight.numel(), convertible(m)) for m in system.modules() if isinstance(m, nn.Linear)]
    return sum(n for n, yes in sizes if yes) / max(sum(n for n, _ in sizes), 1)


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Attention:
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    q, k = named["query"], named["key"]
    batch, heads, queries, head_dim = map(int, q.shape)
    causal = bool(named.get("is_causal", False))
    return Attention("backward" in func.name(), batch, heads, int(k.shape[1]), queries, int(k.shape[2]), head_dim, causal)


def _bytes(values: Any) -> float:
    return float(sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor)))


def _extrapolate(one: float, two: float, factor: float) -> float:
    return one + (two - one) * (factor - 1)


def _pairs(one: list[Any], two: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Calls of both sizes in order; where their numbers differ, the second serves for both."""
    return zip(one if len(one) == len(two) else two, two, strict=True)


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
