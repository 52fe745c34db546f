"""plan --world: what one of many ranks would hold, what it would send in a step, and what that leaves of its speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from seedbed.config import Config, Dist
from seedbed.data.feed import Data
from seedbed.dist.limits import require_possible, require_settings
from seedbed.dist.ranks import PARCEL, local
from seedbed.dist.rehearse import pretended
from seedbed.dist.shards import apply
from seedbed.errors import UserError
from seedbed.recipes import Recipe
from seedbed.track.flops import GPUS, TERA, Gpu
from seedbed.train.optim import param_groups
from seedbed.train.system import System
from seedbed.tune.paper import Counted
from seedbed.tune.plan import CONTEXT, GIB, WASTE

# GPUs that share a machine, and so the fast links between them.
PER_NODE = 8
# What collectives reach of a link's nominal rate: an assumption, stated wherever it is used.
REACHED = 0.75


@dataclass(frozen=True)
class Link:
    """Bytes per second and GPU in one direction, as the vendors state them."""

    name: str
    inside: float
    across: float


LINKS = [
    Link("NVLink 4 + NDR", 450e9, 50e9),
    Link("NVLink 3 + HDR", 300e9, 25e9),
    Link("PCIe 4 + 100G", 32e9, 100e9 / 8 / PER_NODE),
]
LEGEND = "inside a machine + across: InfiniBand NDR 400 or HDR 200 Gbit/s per GPU, or Ethernet 100 Gbit/s per machine"
SHOWN = ("A100", "H100 SXM", "H200 SXM")


@dataclass(frozen=True)
class Expected:
    """One line of the table: a step's seconds of arithmetic and of talk, and the share of the time that is arithmetic."""

    gpu: str
    link: str
    compute: float
    talk: float
    efficiency: float
    tokens: float


@dataclass(frozen=True)
class Scale:
    """Everything `--world` adds to a plan."""

    degrees: Dist
    batch: int
    micro_batch: int
    accum: int
    memory: dict[str, int]
    sent: dict[str, int]
    expected: list[Expected]
    fits: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def spread(config: Config, world: int) -> tuple[Config, list[str]]:
    """The config on `world` ranks: pieces as it says, copies as many as that leaves, micro-batches no larger than before."""
    shard = config.dist.shard
    if world % shard:
        raise UserError(f"--world {world} does not divide into dist.shard={shard} pieces; choose a multiple")
    if config.dist.replicate > 1 and config.dist.world != world:
        raise UserError(f"--world {world}, but dist.replicate={config.dist.replicate} x dist.shard={shard}; drop one of them")
    batch, notes = -(-config.batch // world) * world, []
    if batch != config.batch:
        notes.append(f"the batch does not fit {world} ranks: batch={config.batch} does not divide; planned with batch={batch}")
    own, most = batch // world, max(1, config.batch // config.accum)
    accum = next(parts for parts in range(-(-own // most), own + 1) if own % parts == 0)
    return replace(config, dist=Dist(replicate=world // shard, shard=shard), batch=batch, accum=accum), notes


def look(recipe: Recipe, config: Config, data: Data, counted: Counted, mfu: float, world: int) -> Scale:
    """Build the mesh, cut the weights, count."""
    config, notes = spread(config, world)
    system = skeleton(recipe, config, data)
    require_settings(config)
    require_possible(system, config, config.dist)
    with pretended(config.dist) as ranks:
        units = list(system.shard_units())
        sizes = _Sizes.of(system, units)
        if config.dist.shard > 1:
            apply(system, units, ranks)
        memory = _memory(system, config, counted, sizes, data)
    sent = _sent(config, sizes)
    flops = counted.flops_formula or counted.flops_counted
    expected = [_expect(gpu, link, config, sent, flops, mfu) for gpu in GPUS if gpu.name in SHOWN for link in LINKS]
    return Scale(
        degrees=config.dist,
        batch=config.batch,
        micro_batch=config.micro_batch,
        accum=config.accum,
        memory=memory,
        sent=sent,
        expected=[replace(e, tokens=e.tokens * counted.targets_per_item) for e in expected],
        fits={gpu.name: _first_too_much(memory, gpu) for gpu in GPUS},
        notes=notes,
    )


def skeleton(recipe: Recipe, config: Config, data: Data) -> System:
    """The system with the shapes of its parameters and no numbers in them."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            system = recipe.build(config, data)
    except UserError:
        raise
    except Exception:  # a recipe that asks for real numbers on the way
        system = recipe.build(config, data)
    seen: dict[int, nn.Parameter] = {}
    for module in system.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = seen.setdefault(id(param), _empty(param))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return system


def _empty(param: nn.Parameter) -> nn.Parameter:
    found = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
    if hasattr(param, "declaration"):
        found.declaration = param.declaration  # type: ignore[attr-defined]
    return found


@dataclass(frozen=True)
class _Sizes:
    """Bytes of weights: of all, of each unit that is gathered alone, and of the rest."""

    units: list[int]
    rest: int

    @classmethod
    def of(cls, system: nn.Module, units: list[nn.Module]) -> _Sizes:
        inside = [sum(map(_bytes, unit.parameters())) for unit in units]
        return cls(inside, sum(map(_bytes, system.parameters())) - sum(inside))

    @property
    def total(self) -> int:
        return sum(self.units) + self.rest


def _memory(system: System, config: Config, counted: Counted, sizes: _Sizes, data: Data) -> dict[str, int]:
    """Bytes on the first rank, whose pieces are the largest, in the order in which they come to be held."""
    pieces = [local(p) for p in system.parameters()]
    trained = sum(_bytes(local(p)) for p in system.parameters() if p.requires_grad)
    groups = [group for module in system.players().values() for group in param_groups(module, config.optim)]
    moments = sum(_moments(group.kind, p) for group in groups for p in group.params.values())
    # One unit at work and the next on its way, with the gradients of one; what is in no unit stays whole for the step.
    biggest = max(sizes.units, default=0)
    gathered = 3 * biggest + 2 * sizes.rest if config.dist.shard > 1 else min(PARCEL, sizes.total)
    return {
        "weights": sum(map(_bytes, pieces)),
        "gradients": trained,
        "moments": moments,
        "averages": trained * ((config.ema > 0) + (config.ema2 > 0)),
        "gathered": gathered,
        "activations": counted.fixed + counted.per_item * config.micro_batch,
        "data": sum(array.nbytes for array in data.train.arrays.values()),
    }


def _moments(kind: str, param: Tensor) -> int:
    """Muon needs whole matrices, so its one momentum is whole on every rank; AdamW's two are cut like the weights."""
    return _bytes(param) if kind == "muon" else 2 * _bytes(local(param))


def _sent(config: Config, sizes: _Sizes) -> dict[str, int]:
    """Bytes that a rank sends in one step, by what for; rings send (n - 1) / n of what they gather or reduce."""
    degrees, parts = config.dist, config.accum
    ring, copies = (degrees.shard - 1) / degrees.shard, 2 * (degrees.replicate - 1) / degrees.replicate
    reduced = sizes.total / degrees.shard
    return {
        "gather weights": int(parts * ring * (2 * sum(sizes.units) + sizes.rest)),
        "scatter gradients": int(parts * ring * sizes.total),
        "average over copies": int((parts if degrees.shard > 1 else 1) * copies * reduced),
    }


def _expect(gpu: Gpu, link: Link, config: Config, sent: dict[str, int], flops: float, mfu: float) -> Expected:
    """Pieces travel while blocks compute; copies are averaged between the last gradient and the update, and hide nowhere."""
    world, shard = config.dist.world, config.dist.shard
    compute = flops * config.batch / (world * gpu.bf16 * TERA * mfu)
    pieces = (sent["gather weights"] + sent["scatter gradients"]) / _rate(link, shard)
    copies = sent["average over copies"] / _rate(link, world)
    hidden = min(pieces, compute)
    step = compute + pieces - hidden + copies
    return Expected(
        gpu.name, link.name, compute, pieces + copies, compute / step if step else 1.0, config.batch / step if step else 0.0
    )


def _rate(link: Link, span: int) -> float:
    """Bytes per second among ranks that span so many neighbours."""
    return REACHED * (link.inside if span <= PER_NODE else link.across)


def _first_too_much(memory: dict[str, int], gpu: Gpu) -> str:
    """The first part that does not fit beside those before it; empty when all do."""
    return next((name for name, held in _running(memory) if held > gpu.gib * GIB), "")


def _running(memory: dict[str, int]) -> Iterator[tuple[str, float]]:
    held = float(CONTEXT)
    for name, size in memory.items():
        held += size * WASTE
        yield name, held


def needed(memory: dict[str, int]) -> float:
    """Bytes with context and waste."""
    return max(held for _, held in _running(memory))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
