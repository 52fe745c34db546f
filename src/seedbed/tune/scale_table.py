"""Prints plan --world as tables."""

from rich.console import Console

from seedbed.track import text
from seedbed.track.flops import GPUS
from seedbed.tune.plan import GIB
from seedbed.tune.scale import LEGEND, PER_NODE, REACHED, Scale, needed
from seedbed.tune.show import grid


def show(found: Scale, out: Console) -> None:
    degrees = found.degrees
    spread = f"{found.batch} items a step, micro-batches of {found.micro_batch} per rank, accum {found.accum}"
    out.print(f"\n[bold]{degrees.world} ranks[/]: {degrees.replicate} replicas of {degrees.shard} shards; {spread}")
    held = [(name, _size(num)) for name, num in found.memory.items() if num]
    sent_bytes = [(name, _size(num)) for name, num in found.sent_bytes.items() if num]
    held.append(("with context and waste", _size(needed(found.memory))))
    sent_bytes.append(("in all", _size(sum(found.sent_bytes.values()))))
    out.print(grid(("a rank holds", ""), held, left=1))
    out.print(grid(("a rank sends in a step", ""), sent_bytes, left=1))
    rows = [
        [e.gpu, e.link, _ms(e.compute), _ms(e.communication), f"{e.efficiency:.0%}", text.scaled(e.tokens)] for e in found.speeds
    ]
    out.print(grid(["GPU", "links", "compute ms", "communication ms", "efficiency", "tokens/s"], rows, left=2))
    out.print(f"links {LEGEND}", markup=False)
    out.print(
        f"assumed: {PER_NODE} GPUs in a machine, {REACHED:.0%} of nominal rates, shards overlap with compute, replicas do not",
        markup=False,
    )
    out.print(_fits(found), markup=False)
    for note in found.notes:
        out.print(f"note: {note}", markup=False)


def _fits(found: Scale) -> str:
    tight = {name: part for name, part in found.fits.items() if part}
    if not tight:
        smallest = min(GPUS, key=lambda gpu: gpu.gib)
        return f"everything fits on every card of the table, down to {smallest.gib:g} GiB"
    sizes = {gpu.name: gpu.gib for gpu in GPUS}
    return "first thing that does not fit: " + ", ".join(f"{part} on {n} ({sizes[n]:g} GiB)" for n, part in tight.items())


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
