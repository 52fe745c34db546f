"""A step on paper: the matrix products, attentions, bytes and operations of one forward and backward pass, by shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.nn.groups import rows_of
from seedbed.recipes import Recipe
from seedbed.train.low import convertible
from seedbed.train.system import Batch
from seedbed.tune.bench import num_parameters
from seedbed.tune.paper import PaperEngine, on_paper

_aten = torch.ops.aten
_FIRST = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
_FREE = (_aten.detach, _aten.alias, _aten._unsafe_view)
_ITERATIONS = 5  # of Muon's Newton-Schulz


@dataclass(frozen=True)
class Product:
    """`copies` matrix products of (m, k) by (k, n) in one call."""

    copies: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        return 2.0 * self.copies * self.m * self.k * self.n


@dataclass(frozen=True)
class Attended:
    """A call of a fused attention kernel, forward or backward: batch, heads, key heads, queries, keys, width of a head."""

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
        """Two products forward and four backward; whole, not halved for causality."""
        return (8.0 if self.backward else 4.0) * self.batch * self.heads * self.queries * self.keys * self.head_dim


@dataclass
class Tally:
    """What a step of a number of items does: forward and backward, and apart from them the update of the weights."""

    products: list[Product] = field(default_factory=list)
    attended: list[Attended] = field(default_factory=list)
    bytes: float = 0.0
    num_ops: int = 0
    update_products: list[Product] = field(default_factory=list)
    update_bytes: float = 0.0
    num_params: int = 0
    float8_share: float = 0.0  # of the weights of all linear layers

    @property
    def flops(self) -> float:
        return sum(call.flops for call in (*self.products, *self.attended))

    def grown(self, other: Tally, factor: float) -> Tally:
        """The tally of `factor` times as many items as `other` holds, when `self` holds half as many as that.

        Calls keep their order, so what grew from one to the other grows on in a straight line.
        """
        out = Tally(num_ops=other.num_ops, bytes=_line(self.bytes, other.bytes, factor))
        for one, two in _pairs(self.products, other.products):
            sizes = zip(dataclasses.astuple(one), dataclasses.astuple(two), strict=True)
            out.products.append(Product(*(round(_line(a, b, factor)) for a, b in sizes)))
        for one, two in _pairs(self.attended, other.attended):
            out.attended.append(dataclasses.replace(two, batch=round(_line(one.batch, two.batch, factor))))
        return out


class Counting(TorchDispatchMode):
    """Writes down every operation that computes or moves something."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _is_free(func):
            self._write(func, args, kwargs or {}, out)
        return out

    def _write(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        tally, packet = self.tally, func.overloadpacket
        tally.num_ops += 1
        if packet in _FIRST:
            tally.products.append(_product(*args[_FIRST[packet] : _FIRST[packet] + 2]))
        elif "scaled_dot_product" in func.name():
            tally.attended.append(_attended(func, args, kwargs))
        else:
            tally.bytes += _bytes((args, kwargs)) + _bytes(out)


def count(recipe: Recipe, config: Config, data: Data) -> Tally:
    """A whole step of `config` on paper: shapes at one and two items, drawn on to the batch."""
    (one, two), engine, _ = on_paper(recipe, config, data, lambda engine, items, _: [_count(engine, items[b]) for b in (1, 2)])
    part, num = one.grown(two, config.batch // config.accum), config.accum
    update = optimizer(engine.system, config)
    body = part.products * num, part.attended * num, part.bytes * num, part.num_ops * num
    return Tally(*body, *update, num_parameters(engine.system), float8_share(engine.system))


def _count(engine: PaperEngine, batch: Batch) -> Tally:
    engine.variant = engine.system.variant(0, engine.config.steps)
    with Counting() as counting, engine.autocast():
        engine.system.update(batch, engine)
    for param in engine.system.parameters():
        param.grad = None
    return counting.tally


def optimizer(system: nn.Module, config: Config) -> tuple[list[Product], float]:
    """Muon's products, and the bytes that an update reads and writes."""
    products: list[Product] = []
    trained = [p for p in system.parameters() if p.requires_grad]
    if config.optim.kind == "muon":
        for param in trained:
            for rows in rows_of(param) if param.ndim == 2 else ():
                short, long = sorted((rows, param.shape[1]))
                sizes = ((short, long, short), (short, short, short), (short, short, long))
                products += [Product(1, *size) for size in sizes] * _ITERATIONS
    # Weights, gradients and two moments are read, all but the gradients written; an average is read and written too.
    passes = 7 + 2 * (bool(config.ema) + bool(config.ema2))
    return products, float(passes * sum(p.numel() * p.element_size() for p in trained))


def float8_share(system: nn.Module) -> float:
    """How much of the linear layers would be converted to float8."""
    sizes = [(m.weight.numel(), convertible(m)) for m in system.modules() if isinstance(m, nn.Linear)]
    return sum(n for n, yes in sizes if yes) / max(sum(n for n, _ in sizes), 1)


def _is_free(func: Any) -> bool:
    """Whether a call only looks at a tensor, or looks at it in another way."""
    if func.namespace == "prim" or func.overloadpacket in _FREE:
        return True
    returned = [r.alias_info for r in func._schema.returns]
    return any(a is not None and not a.is_write for a in returned)


def _product(a: Tensor, b: Tensor) -> Product:
    copies = a.shape[0] if a.ndim == 3 else 1
    return Product(int(copies), int(a.shape[-2]), int(a.shape[-1]), int(b.shape[-1]))


def _attended(func: Any, args: Any, kwargs: dict[str, Any]) -> Attended:
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    q, k = named["query"], named["key"]
    batch, heads, queries, head_dim = map(int, q.shape)
    causal = bool(named.get("is_causal", False))
    return Attended("backward" in func.name(), batch, heads, int(k.shape[1]), queries, int(k.shape[2]), head_dim, causal)


def _bytes(values: Any) -> float:
    if isinstance(values, Tensor):
        return float(values.numel() * values.element_size())
    if isinstance(values, dict):
        values = list(values.values())
    return sum(map(_bytes, values)) if isinstance(values, list | tuple) else 0.0


def _line(one: float, two: float, factor: float) -> float:
    return one + (two - one) * (factor - 1)


def _pairs(one: list[Any], two: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Calls of both sizes in their order; where the numbers of calls differ, the second stands for both."""
    return zip(one if len(one) == len(two) else two, two, strict=True)
