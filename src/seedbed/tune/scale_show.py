"""What plan --world has to tell, as tables."""

from __future__ import annotations

from rich.console import Console

from seedbed.track import text
from seedbed.track.flops import GPUS
from seedbed.tune.plan import GIB
from seedbed.tune.scale import LEGEND, PER_NODE, REACHED, Scale, needed
from seedbed.tune.show import grid


def show(found: Scale, out: Console) -> None:
    degrees = found.degrees
    spread = f"{found.batch} items a step, {found.micro_batch} at once on each rank, {found.accum} in a row"
    out.print(f"\n[bold]{degrees.world} ranks[/]: {degrees.replicate} copies of {degrees.shard} pieces; {spread}")
    held = [(name, _size(num)) for name, num in found.memory.items() if num]
    sent = [(name, _size(num)) for name, num in found.sent.items() if num]
    held.append(("with context and waste", _size(needed(found.memory))))
    sent.append(("in all", _size(sum(found.sent.values()))))
    out.print(grid(("a rank holds", ""), held, left=1))
    out.print(grid(("a rank sends in a step", ""), sent, left=1))
    rows = [[e.gpu, e.link, _ms(e.compute), _ms(e.talk), f"{e.efficiency:.0%}", text.scaled(e.tokens)] for e in found.expected]
    out.print(grid(["GPU", "links", "compute ms", "talk ms", "efficiency", "targets/s"], rows, left=2))
    out.print(f"links {LEGEND}", markup=False)
    out.print(
        f"assumed: {PER_NODE} GPUs in a machine, {REACHED:.0%} of nominal rates, pieces hidden behind compute, copies not hidden",
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
