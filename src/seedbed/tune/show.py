"""Terminal output of the instruments: tables for 100 columns, progress bars and status lines."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from seedbed.track import text
from seedbed.tune.batch import GIB, BatchResult, Trial
from seedbed.tune.lr import LrResult
from seedbed.tune.plan import CHINCHILLA, Plan
from seedbed.tune.profile import Profile

WIDTH = 100


def console(stderr: bool = False) -> Console:
    return Console(width=min(WIDTH, text.width()), highlight=False, stderr=stderr, soft_wrap=False)


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; only on a terminal."""
    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def status_line(label: str) -> Iterator[Callable[[str], None]]:
    """A status line on stderr; only on a terminal."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda now: None
        return
    with out.status(label) as status:
        yield lambda now: status.update(f"{label}: {escape(now)}")


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, wrap: int | None = None) -> Table:
    """A plain table: the first `left` columns are left-aligned, the others right-aligned; column `wrap` may wrap."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(header))
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=i != wrap)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def print_notes(out: Console, notes: Sequence[str]) -> None:
    for note in notes:
        out.print(f"note: {note}", markup=False)


def find_lr(finding: LrResult, name: str, picture: str) -> None:
    out = console()
    size = f"{text.scaled(finding.num_params)} parameters, a run of {finding.run_steps:,} steps"
    out.print(f"[bold]find-lr {escape(name)}[/]  {size}")
    metric_name = "" if finding.compared == finding.trials else f"{finding.metric}, by repeat"
    out.print(grid(("optim.lr", "x configured", "steps", "loss after it, by repeat", metric_name), _trials(finding), left=0))
    out.print(finding.advice, style="bold green" if finding.clear else "bold yellow", markup=False)
    if finding.assignments:
        out.print("try: " + " ".join(f"{k}={v:.2g}" for k, v in finding.assignments.items()), markup=False)
    print_notes(out, finding.notes)
    out.print(f"plot  {picture}", markup=False, soft_wrap=True)


def _trials(finding: LrResult) -> list[tuple[str, ...]]:
    """One row per rate and length, shortest trials first; repeats side by side."""
    ordered = sorted(finding.trials, key=lambda t: (t.num_steps, t.factor, t.repeat))
    shown = []
    for (num_steps, factor), group in itertools.groupby(ordered, key=lambda t: (t.num_steps, t.factor)):
        trials = list(group)
        losses = "  ".join(f"{t.loss:.4f}" if math.isfinite(t.loss) else "diverged" for t in trials)
        scores = "  ".join(f"{t.score:.4f}" if math.isfinite(t.score) else "" for t in trials if t.score is not None)
        rate = f"{finding.configured * factor:.2e}" if factor else "untrained"
        shown.append((rate, f"{factor:g}", f"{num_steps:,}", losses, scores))
    return shown


TRIAL_COLUMNS = "{:>9}  {:<34}  {:>11}  {:>10}  {:>12}"


def batch_trial(out: Console, t: Trial) -> None:
    state = ("fits" if t.fits else t.why) + (" (extrapolated)" if t.extrapolated else "") + (", compiled" if t.compiled else "")
    peak = f"{t.peak / GIB:.2f} GiB" if t.peak else "-"
    speed = (f"{t.seconds * 1e3:.1f}", f"{t.items_per_s:,.0f}") if t.seconds else ("-", "-")
    out.print(TRIAL_COLUMNS.format(f"{t.batch:,}", state, peak, *speed), markup=False)
    out.file.flush()


def find_batch(out: Console, finding: BatchResult) -> None:
    if finding.limit:
        out.print(f"limit: {finding.limit / GIB:.1f} GiB", markup=False)
    if finding.largest:
        execution = "extrapolated from smaller ones" if finding.extrapolated else "measured"
        execution += ", uncompiled" if finding.confirmed else ""
        execution += "" if finding.exact else ", search ended by the time limit"
        end = f"; larger ones were not tried: {finding.capped} ends here" if finding.capped else ""
        facts = [f"largest that fits: {finding.largest:,} ({execution}){end}"]
        if finding.confirmed:
            facts.append("compiled steps mostly need less memory; --compiled compiles every size, which takes minutes")
        if finding.saturation:
            facts.append(f"throughput is within 5 % of its best from batch {finding.saturation:,} on")
        elif len(finding.trials) > 1:
            facts.append("throughput still grows at the largest batch that was timed")
        for words in facts:
            out.print(words, markup=False)
    out.print(finding.advice, style="bold green" if finding.largest else "bold yellow", markup=False)


def profile(found: Profile, name: str) -> None:
    out = console()
    out.print(f"[bold]profile {escape(name)}[/]  on {found.device}; {escape(found.execution)}")
    apart = f" (uncaptured: {found.uncaptured * 1e3:.2f} ms)" if "not captured" not in found.execution else ""
    out.print(f"{found.seconds * 1e3:.2f} ms a step, {found.items_per_s:,.0f} items/s{apart}", markup=False)
    out.print()
    on_device = any("stream_ms" in row for row in found.phases)
    header = ("phase", "ms", "share") + (("host ms", "stream ms") if on_device else ())
    rows = [[row["phase"], f"{row['ms']:.3f}", f"{row['share']:.1%}"] for row in found.phases]
    for cells, row in zip(rows, found.phases, strict=True) if on_device else ():
        cells += [f"{row[key]:.3f}" if key in row else "" for key in ("host_ms", "stream_ms")]
    out.print(grid(header, rows))
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
    helping = [("what would help:" if not i else "", line) for i, line in enumerate(found.verdict.help)]
    out.print(grid(("", ""), helping, left=2, wrap=1))
    out.print(f"trace  {found.trace}  (open it at ui.perfetto.dev)", markup=False, soft_wrap=True)


def plan(found: Plan, name: str) -> None:
    out, estimate, tokens = console(), found.estimate, found.tokens()
    unique = "endless", "made as they are needed"
    if found.unique_items:
        epochs = f"{found.items / found.unique_items:.2g} epochs"
        unique = text.scaled(tokens["unique"]), f"{_against(tokens['unique_per_parameter'])}; {epochs}"
    flops = f"no formula; torch counts {text.scaled(estimate.flops_counted)}"
    if found.flops_difference is not None:
        flops = f"by formula; torch counts {text.scaled(estimate.flops_counted)}, difference {found.flops_difference:+.2%}"
    memory = ", ".join(f"{part} {gib(size)}" for part, size in found.memory.items() if size)
    out.print(f"[bold]plan {escape(name)}[/]")
    rows = [
        ("parameters", f"{estimate.num_params:,}", f"{estimate.num_non_embedding:,} non-embedding"),
        ("tokens seen", text.scaled(tokens["seen"]), _against(tokens["seen_per_parameter"])),
        ("unique tokens", *unique),
        ("tokens for 20 per parameter", text.scaled(tokens["chinchilla"]), "Chinchilla-optimal at this size"),
        ("FLOP per item", text.scaled(estimate.flops_formula) if estimate.flops_formula else "-", flops),
        ("memory", gib(sum(found.memory.values())), memory),
    ]
    out.print(grid(("", "", ""), rows, left=3, wrap=2))
    out.print()
    out.print(_costs(found))
    basis = "assumed, not measured" if found.rate.assumed else f"{found.rate.source}; on other cards it is assumed"
    money = f"; prices of {found.prices.date}" if found.prices else "; --prices FILE adds money"
    fits = f"fits = {gib(found.needed)} with context and waste{money}"
    out.print(f"at {found.rate.mfu:.0%} of the nominal bf16 peak ({basis}); {fits}", markup=False)
    print_notes(out, found.notes)


def _against(ratio: float) -> str:
    return f"{ratio:.3g} per parameter, {ratio / CHINCHILLA:.2g}x Chinchilla's {CHINCHILLA:.0f}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _costs(found: Plan) -> Table:
    header = ["GPU", "fits", "time", "steps"] + (["$"] if found.prices else [])
    rows = []
    for c in found.costs:
        time = text.duration(c.hours * 3600) if c.hours * 3600 >= 1 else f"{c.hours * 3.6e6:.0f} ms"
        money = [f"{c.dollars:,.2f}" if c.dollars is not None else "-"] if found.prices else []
        rows.append([c.gpu, "yes" if c.fits else "no", time, f"{c.steps:,}", *money])
    return grid(header, rows, left=2)
