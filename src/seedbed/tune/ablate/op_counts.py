"""Operation counts of one step: matrix products, attentions, bytes and calls of a forward and backward pass, by shape."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.nn.init import rows_of
from seedbed.recipes import Recipe
from seedbed.train.float8 import convertible
from seedbed.train.system import Batch
from seedbed.tune.estimate import EstimateEngine, forward_backward, with_fake_tensors
from seedbed.tune.workload import num_parameters

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
