"""replay: repeats one step of a past run bit for bit, names the origin, the rows and the fix, and prints them."""

import contextlib
import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from seedbed.checks import replay_context
from seedbed.checks.forensics import Examination, Origin, finite, largest
from seedbed.checks.replay_context import OnStatus, PrecisionResult, ReplayContext, Row
from seedbed.checks.subject import num_rows, source_line
from seedbed.errors import EXIT_FAILED, EXIT_OK
from seedbed.report.findings import Finding
from seedbed.track import jsonl
from seedbed.train import capabilities, outliers
from seedbed.train.system import Batch

# A value this many times above those of earlier batches is out of range.
OUTLIER = 1e3
NUM_REFERENCES = 8
NUM_CALLS = 14
# Reasons and fixes by kind, and fixes by operation.
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
REMEDIES = TEXTS.pop("remedies")


@dataclass
class ReplayReport:
    """A replayed step.

    The kind is data, weight, optimizer, forward, backward, gradient, overflow, spike, dip, neighbour or clean.
    """

    run: str
    step: int
    start: str
    reproduced: bool = True
    loss: float = math.nan
    finding: Finding = field(default_factory=lambda: Finding("clean"))
    origin: Origin | None = None
    rows: list[Row] = field(default_factory=list)
    all_rows: bool = False
    precisions: list[PrecisionResult] = field(default_factory=list)
    examination: Examination = field(default_factory=Examination)
    blocks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.finding.id

    def sentence(self) -> str:
        lists_rows = self.rows and not self.all_rows and self.kind not in ("spike", "dip", "neighbour", "clean", "data")
        rows = f"; rows {', '.join(str(r.row) for r in self.rows[:6])}" if lists_rows else ""
        return f"replay {self.step}: {self.finding.what}{rows} -> {self.finding.fix}"

    def to_json(self) -> dict[str, Any]:
        columns = ("name", "kind", "given", "gave", "rms", "weight", "dtype", "finite")
        calls = [{k: getattr(call, k) for k in columns} for call in self.examination.calls]
        plain = {k: getattr(self, k) for k in ("run", "step", "kind", "reproduced", "start")}
        plain |= {k: getattr(self.finding, k) for k in ("what", "where", "why", "fix")}
        more = {"loss": self.loss, "terms": self.examination.terms, "norms": self.examination.norms, "all_rows": self.all_rows}
        shown = {"origin": asdict(self.origin) if self.origin else None, "rows": [asdict(r) for r in self.rows]}
        precisions = {"ladder": [asdict(r) for r in self.precisions], "blocks": self.blocks, "notes": self.notes}
        return {**plain, **more, **shown, **precisions, "calls": calls, "verdict": self.sentence()}


def investigate(root: Path, run_name: str, step: int | None, on_status: OnStatus = lambda text: None) -> ReplayReport:
    """Reproduces the step and names what went wrong in it."""
    ctx = replay_context.open_replay(root, run_name, step, on_status)
    with contextlib.closing(ctx.job.stepper.feed):
        on_status(f"taking step {ctx.step} again")
        changes = replay_context.real_step(ctx)
        exam = replay_context.examine(ctx)
        facts = {"reproduced": ctx.differs is None, "loss": exam.loss, "examination": exam, "notes": ctx.notes}
        report = ReplayReport(ctx.run.name, ctx.step, ctx.start, **facts)
        if exam.bad:
            _explain_bad(ctx, report, on_status)
        else:
            _explain_finite(ctx, report, changes, on_status)
        if ctx.differs:
            _note_difference(ctx, report)
        return report


def _failed(kind: str, what: str, where: str, texts: str = "", **values: Any) -> Finding:
    """A finding with the reason and the fix of replay.toml under `texts`, or under its kind, filled with `values`."""
    return Finding(kind, kind, "fail", "err", what=what, where=where, **_filled(texts or kind, values))


def _filled(texts: str, values: dict[str, Any]) -> dict[str, Any]:
    return {part: text.format(**values) for part, text in TEXTS[texts].items()}


def _note_difference(ctx: ReplayContext, report: ReplayReport) -> None:
    """Reports first that the replay differs from the run."""
    assert ctx.differs
    step, recorded, loss = ctx.differs
    report.notes.insert(0, f"not reproduced: step {step} recorded a loss of {recorded}, here it is {loss:.9g}")
    if report.kind == "clean":
        what = f"the step cannot be reproduced: step {step} recorded {recorded}, here it is {loss:.9g}"
        report.finding = _failed("clean", what, f"first step that differs: {step}", "not reproduced")


# ---- a step that is not finite ---------------------------------------------------------------------------------------


def _explain_bad(ctx: ReplayContext, report: ReplayReport, on_status: OnStatus) -> None:
    exam = report.examination
    on_status("looking for the rows")
    bad_weights = {n: t for n, t in ctx.engine.tensors()["model"].items() if not finite(t.detach())}
    if bad_weights:
        report.all_rows = True
        _explain_weight(ctx, report, bad_weights)
    else:
        report.rows, report.all_rows = replay_context.failing_rows(ctx, exam)
        report.origin = exam.forward or exam.backward
    on_status("repeating in other precisions")
    report.precisions = replay_context.precision_ladder(ctx, exam)
    if bad_weights or explain_data(ctx, report):
        return
    if report.origin:
        _explain_code(ctx, report, report.origin)
    else:
        _explain_gradient(report)
    state = f"the loss is finite ({exam.loss:.4g}), its gradient is not" if math.isfinite(exam.loss) else "the loss is not finite"
    report.finding = replace(report.finding, what=f"{state}: {report.finding.what}")
    references = _references(ctx)
    for part, batch in enumerate(exam.batches):
        rows = [row.row for row in report.rows if row.part == part]
        if name := constant_rows(batch, rows, references):
            why = f"`{name}` of those rows is constant, unlike the batches before; {report.finding.why}"
            report.finding = replace(report.finding, why=why)


def _explain_weight(ctx: ReplayContext, report: ReplayReport, bad: dict[str, Tensor]) -> None:
    name, tensor = next(iter(bad.items()))
    count = int((~torch.isfinite(tensor)).sum())
    more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
    module = ctx.system.get_submodule(name.rpartition(".")[0])
    report.origin = Origin("weight", name.rpartition(".")[0], source_line(type(module)), op=name)
    what = f"{name}{more} holds {count} of {tensor.numel()} values that are not finite before the step is taken"
    where = f"{name}, {report.origin.where}"
    # It became non-finite after the newest checkpoint in which it was finite.
    for saved in replay_context.intact_before(ctx.run, ctx.step):
        if finite(saved.tensors["model"][name]):
            optim = [n for n, t in saved.tensors["optim"].items() if not finite(t)]
            state = f"; but its optimizer state is not ({optim[0]})" if optim else ""
            values = {"checkpoint": saved.path.name, "state": state, "run": ctx.run.name}
            report.finding = _failed("weight", what, where, **values)
            return
    report.finding = _failed("weight", what, where, "weight / never finite")


def _explain_code(ctx: ReplayContext, report: ReplayReport, found: Origin) -> None:
    name = found.module or f"the objective ({type(ctx.system).__name__})"
    op = f"{found.op} at {found.line}" if found.line else found.op
    wide = next((r for r in report.precisions if r.name.startswith("fp64")), None)
    if found.direction == "forward":
        what = f"{name}: output is not finite" + (f", from {op} of {found.given}" if op else f" ({found.given})")
    else:
        what = f"{name}: its output is finite, its gradient is not" + (f", from {op} ({found.given})" if op else "")
    where = f"{found.line}, called in {found.where}" if found.line else found.where
    if found.line.rpartition(".")[2].rpartition(" ")[2] == found.where.rpartition(".")[2]:
        where = f"{found.line.partition(' ')[0]} {found.where.partition(' ')[2]}"
    values = {"name": name, "dtype": found.dtype or "the arithmetic", "remedy": _remedy(found.op, found.direction)}
    texts = "arithmetic / precision" if wide and wide.finite else "arithmetic / edge"
    report.finding = _failed(found.direction, what, where, texts, **values)


def _remedy(op: str, direction: str) -> str:
    """The fix for an operation, by its name in the forward or the backward pass."""
    low = op.lower()
    if direction == "forward" and "sqrt" in low and "rsqrt" not in low:
        return "keep what goes into the root at or above 0 (clamp_min)"
    return next(remedy["fix"] for remedy in REMEDIES if any(word in low for word in remedy["words"]))


def _explain_gradient(report: ReplayReport) -> None:
    """Forward and backward were finite node by node, but the norm of the gradients is not."""
    written = [n for n, size in report.examination.grads.items() if math.isnan(size)]
    if written:
        report.origin = Origin("gradient", written[0].rpartition(".")[0], written[0], op=written[0])
        what = f"the gradient of {written[0]} is not finite although the backward pass gave finite ones"
        report.finding = _failed("gradient", what, written[0])
        return
    name, size = max(report.examination.grads.items(), key=lambda item: item[1], default=("?", math.nan))
    report.origin = Origin("gradient", name.rpartition(".")[0], name, op=name)
    what = f"every gradient is finite, but their norm overflows; the largest is that of {name} ({size:.3g})"
    report.finding = _failed("overflow", what, name)


def constant_rows(batch: Batch, rows: list[int], known: list[Batch]) -> str:
    """The entry of which these rows are constant although those of earlier batches are not; empty when there is none."""
    for name, value in batch.items():
        if name == "index" or value.ndim < 2 or len(value) != num_rows(batch) or not {*rows} <= {*outliers.constant_rows(value)}:
            continue
        if rows and not any(outliers.constant_rows(other[name]) for other in known if name in other):
            return name
    return ""


# ---- the data --------------------------------------------------------------------------------------------------------


def explain_data(ctx: ReplayContext, report: ReplayReport) -> bool:
    """Whether the failing rows hold values that are non-finite, out of declared ranges, or far above those of earlier batches."""
    suspects = {(row.part, row.row) for row in report.rows}
    for part, name, rows in _out_of_range(ctx, report, OUTLIER, probing=True):
        if bad := [row for row in rows if report.all_rows or (part, row) in suspects]:
            _describe_data(ctx, report, part, name, bad)
            return True
    return False


def _out_of_range(
    ctx: ReplayContext, report: ReplayReport, factor: float, probing: bool = False
) -> Iterator[tuple[int, str, list[int]]]:
    """Part, entry and rows of values not finite, `factor` times those of earlier batches, or out of declared ranges."""
    limits: dict[str, float] = {}
    for name, value in (entry for batch in _references(ctx) for entry in batch.items()):
        limits[name] = max(limits.get(name, 0.0), factor * largest(value))  # a NaN is never the larger one
    for part, batch in enumerate(report.examination.batches):
        ranges = {}
        with contextlib.suppress(Exception), ctx.engine.evaluating():  # a probe may fail on the very values under investigation
            probe = capabilities.probe(ctx.system, batch) if probing else None
            ranges = dict(probe.ranges or {}) if probe else {}
        for name, value in batch.items():
            limit = limits.get(name) or math.inf
            low, high = ranges.get(name, (-limit, limit))
            if not value.ndim or len(value) != num_rows(batch) or not (value.is_floating_point() or math.isfinite(high)):
                continue
            flat = value.detach().reshape(len(value), -1).double()
            yield part, name, (~(torch.isfinite(flat) & (flat >= low) & (flat <= high)).all(1)).nonzero().flatten().tolist()


def _references(ctx: ReplayContext) -> list[Batch]:
    """The batches of earlier steps."""
    job, found = ctx.job, []
    first = max(job.counter - NUM_REFERENCES * job.config.batch, 0)
    for counter in range(first, job.counter, job.config.batch):
        job.stepper.feed.load(counter)
        found += [{n: v.clone() for n, v in job.stepper.feed.part(k).items()} for k in range(job.config.accum)]
    return found


def _describe_data(ctx: ReplayContext, report: ReplayReport, part: int, name: str, bad: list[int]) -> None:
    known = [r for r in report.rows if r.part == part and r.row in bad]
    report.rows = known or [replay_context.row_facts(ctx, report.examination, part, row) for row in bad[:8]]
    report.all_rows, row = False, report.rows[0]
    value = report.examination.batches[part][name][row.row]
    kind = "values that are not finite" if not finite(value) else f"values up to {largest(value):.3g}, far out of range"
    report.origin = Origin("data", "", source_line(type(ctx.data.train).batch), op=name)
    item = f"item {row.item} of the data set (sample {row.sample})" if row.item is not None else f"sample {row.sample}"
    what = f"the batch itself is bad: `{name}` of row {row.row}, {item}, holds {kind}"
    where = f"{source_line(type(ctx.data.train).batch)}; {item}"
    report.finding = _failed("data", what, where, item=row.sample if row.item is None else row.item)


# ---- a step that is finite -------------------------------------------------------------------------------------------


def _explain_finite(ctx: ReplayContext, report: ReplayReport, changes: dict[str, float], on_status: OnStatus) -> None:
    exam = report.examination
    if bad := [n for n, t in ctx.engine.tensors()["optim"].items() if not finite(t)]:
        what = f"the optimizer's state {bad[0]} is not finite before the step ({len(bad)} tensors)"
        report.finding = _failed("optimizer", what, bad[0])
        return
    on_status("weighing the rows")
    report.rows = replay_context.worst_rows(ctx, exam)
    report.blocks = blocks(exam, changes)
    low, median, high = replay_context.band(ctx, ctx.step - 128, ctx.step)
    block = max(report.blocks, key=lambda b: b["grad_norm"], default={"block": "?"})
    if exam.loss > high:
        top = report.rows[0] if report.rows else None
        share = f"; row {top.row} alone has {top.loss:.4g}" if top else ""
        what = f"loss {exam.loss:.4g} against {median:.4g} in the steps before{share}"
        report.finding = _failed("spike", what, f"largest gradient: {block['block']}")
        explain_spike_data(ctx, report)
    if _explain_inputs(ctx, report) or exam.loss > high:
        return
    if exam.loss < low:
        what = f"loss {exam.loss:.4g} against {median:.4g} in the steps before: a sudden dip"
        report.finding = _failed("dip", what, source_line(type(ctx.data.train).batch))
        return
    found = f"loss {exam.loss:.6g}, gradient norm {max(exam.norms.values()):.4g}"
    if near := replay_context.neighbour_out_of_band(ctx):
        step, loss, usual = near
        what = f"this step is inside its band ({found}), but step {step} has a loss of {loss:.4g} against {usual:.4g}"
        report.finding = _failed("neighbour", what, f"step {step}", run=ctx.run.name, step=step)
        return
    what = f"nothing is wrong with this step: {found}"
    report.finding = Finding("clean", what=what, where=ctx.start, **_filled("clean", {}))


def _explain_inputs(ctx: ReplayContext, report: ReplayReport) -> bool:
    """Whether the batch is degenerate, unlike those before; a spike is then explained by it."""
    references = _references(ctx)
    for part, batch in enumerate(report.examination.batches):
        if not references or not (found := outliers.degenerate(batch, references)):
            continue
        what, rows = found
        where = source_line(type(ctx.data.train).batch)
        report.origin = Origin("data", "", where)
        report.rows = [replay_context.row_facts(ctx, report.examination, part, row) for row in rows[:8]]
        seen = f"the batch is degenerate: {what}, unlike the batches before, loss {report.examination.loss:.4g}"
        report.finding = _failed("data", seen, where, "data / degenerate")
        return True
    return False


def explain_spike_data(ctx: ReplayContext, report: ReplayReport) -> None:
    """Whether rows with values far above those of earlier batches explain the spike."""
    for part, name, bad in _out_of_range(ctx, report, 10.0):
        if bad:
            size = largest(report.examination.batches[part][name][bad[0]])
            values = {"name": name, "row": bad[0], "size": size}
            report.finding = replace(report.finding, **_filled("spike / data", values))
            report.origin = Origin("data", "", source_line(type(ctx.data.train).batch), op=name)
            return


def blocks(exam: Examination, changes: dict[str, float]) -> list[dict[str, Any]]:
    """Gradient norm and relative update of every block, two names below the system."""
    found: dict[str, dict[str, float]] = {}
    for name, size in exam.grads.items():
        parts = name.split(".")[:-1]
        key = ".".join(parts[: 3 if len(parts) > 2 and parts[2].isdigit() else 2]) or name
        entry = found.setdefault(key, {"squares": 0.0, "update": 0.0})
        entry["squares"] += size * size
        entry["update"] = max(entry["update"], changes.get(name, 0.0))
    return [{"block": k, "grad_norm": math.sqrt(v["squares"]), "update": v["update"]} for k, v in found.items()]


# ---- what is printed -------------------------------------------------------------------------------------------------


def replay(root: Path, run_name: str, step: int | None, as_json: bool = False) -> int:
    """Prints what happened at a step; 0 when it was reproduced, 1 when not."""
    out = Console(highlight=False, emoji=False)
    if as_json:
        report = investigate(root, run_name, step)
        print(json.dumps(jsonl.finite(report.to_json())))
    else:
        with out.status("restoring the step", spinner="line") as status:
            report = investigate(root, run_name, step, status.update)
        show(out, report)
    return EXIT_OK if report.reproduced else EXIT_FAILED


def show(out: Console, report: ReplayReport) -> None:
    word = "reproduced, the loss is the recorded one" if report.reproduced else "NOT reproduced"
    out.print(f"[bold]step {report.step} of {escape(report.run)}[/], from {escape(report.start)}: {word}", soft_wrap=True)
    for note in report.notes:
        out.print(f"  [yellow]{escape(note)}[/]", soft_wrap=True)
    if report.examination.calls:
        out.print(_calls(report))
    if report.rows:
        out.print(_rows(report))
    if report.blocks:
        table = Table("block", "gradient norm", "largest update / weight", title="blocks", box=None)
        for entry in report.blocks[:24]:
            table.add_row(entry["block"], _size(entry["grad_norm"]), _size(entry["update"]))
        out.print(table)
    if len(report.precisions) > 1:
        table = Table("arithmetic", "loss", "gradient norm", "", title="the same step, the same noise", box=None)
        for result in report.precisions:
            word = result.problem or ("finite" if result.finite else "not finite")
            numbers = ("", "") if result.problem else (_size(result.loss, "not finite"), _size(result.norm, "not finite"))
            table.add_row(result.name, *numbers, escape(word), style="" if result.finite else "red")
        out.print(table)
    colour = "green" if report.kind == "clean" and report.reproduced else "red"
    out.print(f"[bold {colour}]{report.kind}[/]")
    for part in ("what", "where", "why", "fix"):
        out.print(f" {part:<6} {escape(getattr(report.finding, part))}", soft_wrap=True)
    out.print(f"[bold]{escape(report.sentence())}[/]", soft_wrap=True)


def _calls(report: ReplayReport) -> Table:
    """The calls around the origin, in order of completion."""
    calls = report.examination.calls
    guilty = report.origin.module if report.origin else None
    at = next((i for i, c in enumerate(calls) if not c.finite or (guilty and c.name == guilty)), 0)
    first = max(0, min(at - NUM_CALLS // 2, len(calls) - NUM_CALLS))
    shown = calls[first : first + NUM_CALLS]
    table = Table(title=f"forward, calls {first + 1} to {first + len(shown)} of {len(calls)}: largest sizes", box=None)
    table.add_column("module", no_wrap=True, min_width=min(max(len(c.name) for c in shown), 40))
    table.add_column("kind", no_wrap=True)
    for title in ("in", "weight", "out", "rms", "dtype"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for call in shown:
        mark = "<- here" if guilty == call.name else "" if call.finite else "nan"
        cells = [call.name, call.kind, *map(_size, (call.given, call.weight, call.gave, call.rms)), call.dtype, mark]
        table.add_row(*map(escape, cells), style="red" if mark else "")
    return table


def _rows(report: ReplayReport) -> Table:
    spike = report.kind in ("spike", "dip", "neighbour", "clean")
    title = "rows with the largest loss" if spike else "every row fails, for example" if report.all_rows else "rows that fail"
    table = Table("part", "row", "sample", "item", "loss", "what it is", title=title, box=None)
    for row in report.rows:
        item = "" if row.item is None else str(row.item)
        table.add_row(str(row.part), str(row.row), str(row.sample), item, _size(row.loss), escape(row.shown))
    return table


def _size(value: float, absent: str = "") -> str:
    return f"{value:.3g}" if math.isfinite(value) else absent
