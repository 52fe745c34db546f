"""How the instruments speak: tables and sentences for a terminal of 100 columns, and a progress line that leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from seedbed.track import text
from seedbed.tune.batch import GIB, BatchFinding, Trial
from seedbed.tune.lr import AGREEMENT, Finding, Suggestion
from seedbed.tune.plan import CHINCHILLA, Plan
from seedbed.tune.profile import Profile

WIDTH = 100


def console(stderr: bool = False) -> Console:
    return Console(width=min(WIDTH, text.width()), highlight=False, stderr=stderr, soft_wrap=False)


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the error stream while something long runs; only where a person is looking."""
    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def telling(label: str) -> Iterator[Callable[[str], None]]:
    """A line on the error stream that says what is being done; only where a person is looking."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda now: None
        return
    with out.status(label) as status:
        yield lambda now: status.update(f"{label}: {escape(now)}")


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, wrap: int | None = None) -> Table:
    """A plain table: the first `left` columns are flush left, the others flush right; column `wrap` may take several lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=i != wrap)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _notes(out: Console, notes: Sequence[str]) -> None:
    for note in notes:
        out.print(f"note: {note}", markup=False)


def find_lr(finding: Finding, name: str, picture: str) -> None:
    out = console()
    num_steps = max(len(r.rates) for r in finding.ramps)
    size = f"{text.scaled(finding.num_params)} parameters"
    out.print(f"[bold]find-lr {escape(name)}[/]  {size}, {len(finding.ramps)} ramps of up to {num_steps} steps")
    out.print(grid(("suggestion", "lr", "x configured", "over the repeats"), [_suggestion(s) for s in finding.suggestions]))
    out.print(f"configured optim.lr {finding.configured:.3g}", markup=False)
    out.print(finding.advice, style="bold green" if finding.clear else "bold yellow", markup=False)
    if finding.assignments:
        out.print("try: " + " ".join(f"{k}={v:.2g}" for k, v in finding.assignments.items()), markup=False)
    _notes(out, finding.notes)
    out.print(f"plot  {picture}", markup=False, soft_wrap=True)


def _suggestion(s: Suggestion) -> tuple[str, ...]:
    apart = s.high / s.low
    band = f"{s.low:.2g} .. {s.high:.2g}  ({apart:.1f}x{', they disagree' if apart > AGREEMENT else ''})" if apart > 1 else ""
    return s.name, f"{s.lr:.2e}", f"{s.ratio:.2g}", band


def find_batch(finding: BatchFinding, name: str) -> None:
    out = console()
    limit = f", limit {finding.limit / GIB:.1f} GiB" if finding.limit else ""
    out.print(f"[bold]find-batch {escape(name)}[/]  on {finding.device}{limit}")
    batch_table(out, finding.trials)
    if finding.largest:
        how = "reckoned from the growth of smaller ones" if finding.reckoned else "measured"
        end = f"; larger ones were not tried: {finding.capped} ends here" if finding.capped else ""
        out.print(f"largest that fits: {finding.largest:,} ({how}){end}", markup=False)
        if finding.saturation:
            out.print(f"throughput is within 5 % of its best from batch {finding.saturation:,} on", markup=False)
        elif finding.saturation is None and len(finding.trials) > 1:
            out.print("throughput still grows at the largest batch that was timed", markup=False)
    out.print(finding.advice, style="bold green" if finding.largest else "bold yellow", markup=False)


def batch_table(out: Console, trials: Sequence[Trial]) -> None:
    out.print(grid(("batch", "", "peak memory", "ms/step", "items/s"), [_trial(t) for t in trials], left=2))


def _trial(t: Trial) -> tuple[str, ...]:
    state = ("fits" if t.fits else t.why) + (" (reckoned)" if t.reckoned else "")
    peak = f"{t.peak / GIB:.2f} GiB" if t.peak else "-"
    return (
        f"{t.batch:,}",
        state,
        peak,
        f"{t.seconds * 1e3:.1f}" if t.seconds else "-",
        f"{t.items_per_s:,.0f}" if t.seconds else "-",
    )


def profile(found: Profile, name: str) -> None:
    out = console()
    out.print(f"[bold]profile {escape(name)}[/]  on {found.device}; {escape(found.how)}")
    apart = f" (taken apart, uncaptured: {found.uncaptured * 1e3:.2f} ms)" if "not captured" not in found.how else ""
    out.print(f"{found.seconds * 1e3:.2f} ms a step, {found.items_per_s:,.0f} items/s{apart}", markup=False)
    out.print()
    on_device = any("stream_ms" in row for row in found.phases)
    header = ("phase", "ms", "share") + (("host ms", "stream ms") if on_device else ())
    out.print(grid(header, [_phase(row, on_device) for row in found.phases]))
    out.print()
    shares = found.shares
    kinds = {"matmul": shares.matmul, "attention": shares.attention, "memory traffic": shares.memory}
    kinds |= {"launches": shares.gap, "data": shares.data}
    out.print("by kind   " + "   ".join(f"{kind} {share:.0%}" for kind, share in kinds.items()), markup=False)
    if found.per_op:
        out.print(f"launches  {found.work.num_ops:,.0f} operations at {found.per_op * 1e6:.1f} us each, measured", markup=False)
    out.print()
    ops = [(text.clip(o["op"], 58), f"{o['ms']:.3f}", f"{o['share']:.1%}", f"{o['calls']:,.0f}") for o in found.work.ops]
    out.print(grid(("operation (its own time)", "ms/step", "share", "calls"), ops))
    out.print()
    out.print(f"verdict: {found.verdict.text}", style="bold green", markup=False)
    helping = grid(
        ("", ""), [("what would help:" if not i else "", line) for i, line in enumerate(found.verdict.help)], 2, wrap=1
    )
    helping.show_header = False
    out.print(helping)
    out.print(f"trace  {found.trace}  (open it at ui.perfetto.dev)", markup=False, soft_wrap=True)


def _phase(row: dict, on_device: bool) -> tuple[str, ...]:
    cells = (row["phase"], f"{row['ms']:.3f}", f"{row['share']:.1%}")
    more = tuple(f"{row[key]:.3f}" if key in row else "" for key in ("host_ms", "stream_ms"))
    return cells + (more if on_device else ())


def plan(found: Plan, name: str) -> None:
    out, counted, tokens = console(), found.counted, found.tokens()
    out.print(f"[bold]plan {escape(name)}[/]")
    rows = [
        ("parameters", f"{counted.num_params:,}", f"{counted.num_body:,} without embedding and head"),
        ("targets seen", text.scaled(tokens["seen"]), _against(tokens["seen_per_parameter"])),
        ("targets unique", *_unique(found, tokens)),
        ("targets for 20", text.scaled(tokens["chinchilla"]), "what Chinchilla asks for at this size"),
        ("FLOP per item", text.scaled(counted.flops_formula) if counted.flops_formula else "-", _flops(found)),
        ("memory", _gib(sum(found.memory.values())), _memory(found)),
    ]
    table = grid(("", "", ""), rows, left=3, wrap=2)
    table.show_header = False
    out.print(table)
    out.print()
    out.print(_costs(found))
    out.print(_how_costs(found), markup=False)
    _notes(out, found.notes)


def _against(ratio: float) -> str:
    return f"{ratio:.3g} per parameter, {ratio / CHINCHILLA:.2g}x Chinchilla's {CHINCHILLA:.0f}"


def _unique(found: Plan, tokens: dict[str, float]) -> tuple[str, str]:
    if not found.unique_items:
        return "endless", "made as they are needed"
    epochs = found.items / found.unique_items
    return text.scaled(tokens["unique"]), f"{_against(tokens['unique_per_parameter'])}; {epochs:.2g} epochs"


def _flops(found: Plan) -> str:
    counted = text.scaled(found.counted.flops_counted)
    if found.flops_difference is None:
        return f"no formula; torch counts {counted}"
    return f"by formula; torch counts {counted}, difference {found.flops_difference:+.2%}"


def _memory(found: Plan) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in found.memory.items() if size)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _costs(found: Plan) -> Table:
    header = ["GPU", "fits", "time", "steps"] + (["$"] if found.prices else [])
    rows = []
    for c in found.costs:
        time = text.duration(c.hours * 3600) if c.hours * 3600 >= 1 else f"{c.hours * 3.6e6:.0f} ms"
        money = [f"{c.dollars:,.2f}" if c.dollars is not None else "-"] if found.prices else []
        rows.append([c.gpu, "yes" if c.fits else "no", time, f"{c.steps:,}", *money])
    return grid(header, rows, left=2)


def _how_costs(found: Plan) -> str:
    basis = "assumed, not measured" if found.rate.assumed else f"{found.rate.source}; on other cards it is assumed"
    money = f"; prices of {found.prices.date}" if found.prices else "; --prices FILE adds money"
    return (
        f"at {found.rate.mfu:.0%} of the nominal bf16 peak ({basis}); fits = {_gib(found.needed)} with context and waste{money}"
    )
