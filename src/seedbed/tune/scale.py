"""plan --world: memory and communication of one of many ranks, and the expected efficiency."""

import itertools
from dataclasses import dataclass, replace

from rich.console import Console
from torch import Tensor

from seedbed.config import Config, Dist
from seedbed.data.feed import Data
from seedbed.dist.join import require_settings
from seedbed.dist.reducer import BUCKET_BYTES
from seedbed.dist.shards import rows_each
from seedbed.errors import UserError
from seedbed.recipes import Recipe
from seedbed.track import text
from seedbed.track.flops import GPUS, TERA, Gpu
from seedbed.train.capabilities import require_possible, shard_units
from seedbed.train.optim import param_groups
from seedbed.train.system import System, named_optimizers
from seedbed.tune.estimate import Estimate, with_fakes
from seedbed.tune.plan import CONTEXT, GIB, WASTE
from seedbed.tune.show import gib, grid, print_notes

# GPUs per machine, connected by fast links.
PER_NODE = 8
# Assumed share of a link's nominal rate that collectives reach.
REACHED = 0.75
# The share of the backward pass in the compute of a step: two products for every one of the forward pass.
BACKWARD = 2 / 3


@dataclass(frozen=True)
class Link:
    """Bytes per second and GPU in one direction, as the vendors state them."""

    name: str
    intra_node: float
    inter_node: float


LINKS = [
    Link("NVLink 4 + NDR", 450e9, 50e9),
    Link("NVLink 3 + HDR", 300e9, 25e9),
    Link("PCIe 4 + 100G", 32e9, 100e9 / 8 / PER_NODE),
]
LEGEND = "inside a machine + across: InfiniBand NDR 400 or HDR 200 Gbit/s per GPU, or Ethernet 100 Gbit/s per machine"
SHOWN = ("A100", "H100 SXM", "H200 SXM")


@dataclass(frozen=True)
class RankSpeed:
    """One line of the table: seconds of compute and communication per step, and the efficiency."""

    gpu: str
    link: str
    compute: float
    communication: float
    efficiency: float
    tokens: float


@dataclass(frozen=True)
class Scale:
    """The result of `plan --world`."""

    degrees: Dist
    batch: int
    micro_batch: int
    accum: int
    memory: dict[str, int]
    sent_bytes: dict[str, int]
    speeds: list[RankSpeed]
    fits: dict[str, str]
    notes: list[str]


def distribute(config: Config, world: int) -> tuple[Config, list[str]]:
    """The config on `world` ranks: shards as configured, the remaining ranks as replicas, micro-batches no larger than before."""
    shard = config.dist.shard
    if config.dist.world == world:
        return config, []
    if world % shard:
        raise UserError(f"--world {world} is not a multiple of dist.shard={shard}")
    if config.dist.replicate > 1:
        raise UserError(f"--world {world}, but dist.replicate={config.dist.replicate} x dist.shard={shard}; drop one of them")
    batch, notes = -(-config.batch // world) * world, []
    if batch != config.batch:
        notes.append(f"the batch does not fit {world} ranks: batch={config.batch} does not divide; planned with batch={batch}")
    own, most = batch // world, max(1, config.batch // config.accum)
    accum = next(parts for parts in range(-(-own // most), own + 1) if own % parts == 0)
    return replace(config, dist=replace(config.dist, replicate=world // shard), batch=batch, accum=accum), notes


def estimate_scale(recipe: Recipe, config: Config, data: Data, estimate: Estimate, mfu: float, world: int) -> Scale:
    """What the first rank holds and sends, from the shapes of the weights."""
    config, notes = distribute(config, world)
    system = with_fakes(lambda mode: recipe.build(config, data))
    require_settings(config)
    require_possible(system, config, config.dist)
    # Bytes of all weights, and of each unit that is gathered alone.
    total, *inside = (sum(p.nbytes for p in module.parameters()) for module in (system, *shard_units(system)))
    memory = _memory(system, config, estimate, total, inside, data)
    sent_bytes = _sent_bytes(config, total, sum(inside))
    speeds = [_rank_speed(gpu, link, config, sent_bytes, estimate, mfu) for gpu in GPUS if gpu.name in SHOWN for link in LINKS]
    fits = {gpu.name: _exceeded_by(memory, gpu) for gpu in GPUS}
    return Scale(config.dist, config.batch, config.micro_batch, config.accum, memory, sent_bytes, speeds, fits, notes)


def _memory(system: System, config: Config, estimate: Estimate, total: int, units: list[int], data: Data) -> dict[str, int]:
    """Bytes on the first rank, whose shards are the largest, in order of allocation."""
    num_shards = config.dist.shard

    def own_bytes(param: Tensor) -> int:
        return param.nbytes // len(param) * rows_each(len(param), num_shards) if param.ndim else param.nbytes

    trained = sum(own_bytes(p) for p in system.parameters() if p.requires_grad)
    groups = [group for module in named_optimizers(system).values() for group in param_groups(module, config.optim)]
    # Muon needs full matrices, so its momentum is unsharded on every rank; AdamW's two moments are sharded like the weights.
    owners = [(group.kind, p) for group in groups for p in group.params.values()]
    moments = sum(p.nbytes if kind == "muon" else 2 * own_bytes(p) for kind, p in owners)
    # One unit in use and the next being gathered, with the gradients of one; the rest stays unsharded for the step.
    gathered = 3 * max(units, default=0) + 2 * (total - sum(units)) if num_shards > 1 else min(BUCKET_BYTES, total)
    return {
        "weights": sum(map(own_bytes, system.parameters())),
        "gradients": trained,
        "moments": moments,
        "averages": trained * ((config.ema > 0) + (config.ema2 > 0)),
        "gathered": gathered,
        "activations": estimate.fixed + estimate.per_item * config.micro_batch,
        "data": sum(array.nbytes for array in data.train.arrays.values()),
    }


def _sent_bytes(config: Config, total: int, in_units: int) -> dict[str, int]:
    """Bytes that a rank sends in one step, by purpose; rings send (n - 1) / n of what they gather or reduce."""
    degrees, parts = config.dist, config.accum
    ring, copies = (degrees.shard - 1) / degrees.shard, 2 * (degrees.replicate - 1) / degrees.replicate
    gathered = 2 * in_units * (0.5 if config.precision == "bf16" else 1.0)
    reduced = total * (0.5 if degrees.reduce == "bf16" else 1.0)
    return {
        "gather weights": int(parts * ring * (gathered + total - in_units)),
        "scatter gradients": int(parts * ring * reduced),
        "all-reduce gradients": int(copies * reduced / degrees.shard),
    }


def _rank_speed(gpu: Gpu, link: Link, config: Config, sent_bytes: dict[str, int], estimate: Estimate, mfu: float) -> RankSpeed:
    """Gathering and scattering shards overlaps with compute, averaging replicas with what that leaves of the backward pass."""
    world, shard = config.dist.world, config.dist.shard
    compute = (estimate.flops_formula or estimate.flops_counted) * config.batch / (world * gpu.bf16 * TERA * mfu)
    pieces = (sent_bytes["gather weights"] + sent_bytes["scatter gradients"]) / _rate(link, shard)
    copies = sent_bytes["all-reduce gradients"] / _rate(link, world)
    hidden = min(pieces, compute)
    hidden += min(copies, max(0.0, BACKWARD * compute - hidden))
    step = compute + pieces + copies - hidden
    efficiency, items = (compute / step, config.batch / step) if step else (1.0, 0.0)
    return RankSpeed(gpu.name, link.name, compute, pieces + copies, efficiency, items * estimate.targets_per_item)


def _rate(link: Link, span: int) -> float:
    """Bytes per second among ranks that span so many neighbours."""
    return REACHED * (link.intra_node if span <= PER_NODE else link.inter_node)


def _exceeded_by(memory: dict[str, int], gpu: Gpu) -> str:
    """The first part that does not fit beside those before it; empty when all do."""
    totals = itertools.accumulate((size * WASTE for size in memory.values()), initial=float(CONTEXT))
    return next((name for name, held in zip(memory, list(totals)[1:], strict=True) if held > gpu.gib * GIB), "")


def show(found: Scale, out: Console) -> None:
    degrees = found.degrees
    spread = f"{found.batch} items a step, micro-batches of {found.micro_batch} per rank, accum {found.accum}"
    out.print(f"\n[bold]{degrees.world} ranks[/]: {degrees.replicate} replicas of {degrees.shard} shards; {spread}")
    held = [(name, gib(num)) for name, num in found.memory.items() if num]
    sent_bytes = [(name, gib(num)) for name, num in found.sent_bytes.items() if num]
    held.append(("with context and waste", gib(CONTEXT + WASTE * sum(found.memory.values()))))
    sent_bytes.append(("in all", gib(sum(found.sent_bytes.values()))))
    out.print(grid(("a rank holds", ""), held))
    out.print(grid(("a rank sends in a step", ""), sent_bytes))
    rows = []
    for e in found.speeds:
        times = (f"{seconds * 1e3:,.2f}" for seconds in (e.compute, e.communication))
        rows.append([e.gpu, e.link, *times, f"{e.efficiency:.0%}", text.scaled(e.tokens)])
    out.print(grid(["GPU", "links", "compute ms", "communication ms", "efficiency", "tokens/s"], rows, left=2))
    out.print(f"links {LEGEND}", markup=False)
    overlap = "shards overlap with compute, gradients of replicas with the backward pass"
    out.print(f"assumed: {PER_NODE} GPUs in a machine, {REACHED:.0%} of nominal rates, {overlap}", markup=False)
    sizes = {gpu.name: gpu.gib for gpu in GPUS}
    tight = [f"{part} on {name} ({sizes[name]:g} GiB)" for name, part in found.fits.items() if part]
    fits = f"everything fits on every card of the table, down to {min(sizes.values()):g} GiB"
    out.print("first thing that does not fit: " + ", ".join(tight) if tight else fits, markup=False)
    print_notes(out, found.notes)
