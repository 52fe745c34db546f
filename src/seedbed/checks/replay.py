"""replay: repeats one step of a past run bit for bit, and names the origin, the rows and the fix."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seedbed.checks.forensics import Examination, Origin, TracingEngine, finite, largest
from seedbed.checks.random_draws import ReplayDraws
from seedbed.checks.replay_context import OnStatus, ReplayContext, examine, open_replay, real_step
from seedbed.checks.subject import num_rows, source_line, take_rows, to_dtype
from seedbed.data.order import Order
from seedbed.report.findings import Finding
from seedbed.train import capabilities, checkpoint, checkpoint_loading
from seedbed.train.stepper import build
from seedbed.train.system import Batch

# How long the search for rows and the worst rows may take, in seconds.
PATIENCE = 20.0
# A value this many times above those of earlier batches is out of range.
OUTLIER = 1e3
NUM_REFERENCES = 8


@dataclass(frozen=True)
class Row:
    """One item of the step: its place in the batch, its sample counter, and its index in the data set."""

    part: int
    row: int
    sample: int
    item: int | None
    loss: float
    shown: str


@dataclass(frozen=True)
class PrecisionResult:
    """The same step in another precision."""

    name: str
    loss: float
    norm: float
    finite: bool
    problem: str = ""


@dataclass
class ReplayReport:
    """A replayed step. The kind is data, weight, optimizer, forward, backward, gradient, overflow, spike or clean."""

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
        lists_rows = self.rows and not self.all_rows and self.kind not in ("spike", "clean", "data")
        rows = f"; rows {', '.join(str(r.row) for r in self.rows[:6])}" if lists_rows else ""
        return f"replay {self.step}: {self.finding.what}{rows} -> {self.finding.fix}"

    def to_json(self) -> dict[str, Any]:
        calls = [
            {k: getattr(c, k) for k in ("name", "kind", "given", "gave", "rms", "weight", "dtype", "finite")}
            for c in self.examination.calls
        ]
        plain = {k: getattr(self, k) for k in ("run", "step", "kind", "reproduced", "start")}
        plain |= {k: getattr(self.finding, k) for k in ("what", "where", "why", "fix")}
        more = {"loss": self.loss, "terms": self.examination.terms, "norms": self.examination.norms, "all_rows": self.all_rows}
        shown = {"origin": asdict(self.origin) if self.origin else None, "rows": [asdict(r) for r in self.rows]}
        precisions = {"ladder": [asdict(r) for r in self.precisions], "blocks": self.blocks, "notes": self.notes}
        return {**plain, **more, **shown, **precisions, "calls": calls, "verdict": self.sentence()}


def investigate(root: Path, run_name: str, step: int | None, on_status: OnStatus = lambda text: None) -> ReplayReport:
    """Reproduces the step and names what went wrong in it."""
    ctx = open_replay(root, run_name, step, on_status)
    with contextlib.closing(ctx.job.stepper.feed):
        on_status(f"taking step {ctx.step} again")
        changes = real_step(ctx)
        exam = examine(ctx)
        facts = {"reproduced": ctx.differs is None, "loss": exam.loss, "examination": exam, "notes": ctx.notes}
        report = ReplayReport(ctx.run.name, ctx.step, ctx.start, **facts)
        if exam.bad:
            _explain_bad(ctx, report, on_status)
        else:
            _explain_finite(ctx, report, changes, on_status)
        if ctx.differs:
            _note_difference(ctx, report)
        return report


def _failed(kind: str, what: str, where: str, why: str, fix: str) -> Finding:
    return Finding(kind, kind, "fail", "err", what=what, where=where, why=why, fix=fix)


def _note_difference(ctx: ReplayContext, report: ReplayReport) -> None:
    """Reports first that the replay differs from the run."""
    assert ctx.differs
    step, recorded, loss = ctx.differs
    report.notes.insert(0, f"not reproduced: step {step} recorded a loss of {recorded}, here it is {loss:.9g}")
    if report.kind == "clean":
        what = f"the step cannot be reproduced: step {step} recorded {recorded}, here it is {loss:.9g}"
        why = "something that is not in the checkpoint decides the loss"
        fix = "look for code or data changed since, other threads or devices, or random state that the engine does not seed"
        report.finding = _failed("clean", what, f"first step that differs: {step}", why, fix)


# ---- a step that is not finite ---------------------------------------------------------------------------------------


def _explain_bad(ctx: ReplayContext, report: ReplayReport, on_status: OnStatus) -> None:
    exam = report.examination
    on_status("looking for the rows")
    bad_weights = {n: t for n, t in ctx.engine.tensors()["model"].items() if not finite(t.detach())}
    if bad_weights:
        report.all_rows = True
        _explain_weight(ctx, report, bad_weights)
    else:
        report.rows, report.all_rows = failing_rows(ctx, exam)
        report.origin = exam.forward or exam.backward
    on_status("repeating in other precisions")
    report.precisions = precision_ladder(ctx, exam)
    if bad_weights:
        return
    if explain_data(ctx, report):
        return
    if report.origin:
        _explain_code(ctx, report, report.origin)
    else:
        _explain_gradient(report)


def _explain_weight(ctx: ReplayContext, report: ReplayReport, bad: dict[str, Tensor]) -> None:
    name, tensor = next(iter(bad.items()))
    count = int((~torch.isfinite(tensor)).sum())
    more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
    module = ctx.system.get_submodule(name.rpartition(".")[0])
    report.origin = Origin("weight", name.rpartition(".")[0], source_line(type(module)), op=name)
    what = f"{name}{more} holds {count} of {tensor.numel()} values that are not finite before the step is taken"
    report.finding = _failed("weight", what, f"{name}, {report.origin.where}", *_history_of_weight(ctx, name))


def _history_of_weight(ctx: ReplayContext, name: str) -> tuple[str, str]:
    """When a weight became non-finite: after the newest checkpoint in which it was finite."""
    folder = ctx.run.path / "checkpoints"
    for path in reversed(checkpoint.steps_before(folder, ctx.step)):
        try:
            saved = checkpoint_loading.load(path)
        except checkpoint_loading.Damaged:
            continue
        if finite(saved.tensors["model"][name]):
            optim = [n for n, t in saved.tensors["optim"].items() if not finite(t)]
            state = f"; but its optimizer state is not ({optim[0]})" if optim else ""
            why = f"it was finite in {path.name}{state}: it was written in between, by an update or by code outside the step"
            return why, f"continue from there: seedbed resume {ctx.run.name}; look for in-place writes, then for eps and lr"
    return "no checkpoint holds a finite value of it", "check the initialisation; start the run again"


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
    if wide and wide.finite:
        why = f"finite in float64: the mathematics is sound, {found.dtype or 'the arithmetic'} overflows or loses it"
        fix = f"compute {name} in float32 or wider, or keep its input small (norm, clamp, scale)"
    else:
        why = "not finite in float64 either: a root, a logarithm or a division at its edge, not the precision"
        fix = _remedy(found.op, found.direction)
    report.finding = _failed(found.direction, what, where, why, fix)


def _remedy(op: str, direction: str) -> str:
    """The fix for an operation, by its name in the forward or the backward pass."""
    low = op.lower()
    if direction == "forward" and "sqrt" in low and "rsqrt" not in low:
        return "keep what goes into the root at or above 0 (clamp_min)"
    table = {
        ("sqrt", "pow", "norm", "std", "hypot"): "add a small eps inside the root, where the gradient at 0 is infinite",
        ("div", "reciprocal", "mean"): "add an eps to the denominator, or clamp it away from 0",
        ("log",): "clamp what goes into the logarithm above 0, or use log_softmax, logsumexp or log1p",
        ("exp", "sinh", "cosh"): "subtract the maximum first, or clamp what goes into the exponential",
        ("softmax",): "leave at least one entry of every row unmasked",
        ("acos", "asin", "atanh", "erfinv"): "clamp its input inside the open interval",
        ("hook",): "look at the hook that is registered there",
    }
    found = next((text for words, text in table.items() if any(word in low for word in words)), None)
    return found or "look at that line with the rows above, and guard that case"


def _explain_gradient(report: ReplayReport) -> None:
    """Forward and backward were finite node by node, but the norm of the gradients is not."""
    written = [n for n, size in report.examination.grads.items() if math.isnan(size)]
    if written:
        report.origin = Origin("gradient", written[0].rpartition(".")[0], written[0], op=written[0])
        what = f"the gradient of {written[0]} is not finite although the backward pass gave finite ones"
        why = "something wrote to .grad between backward and the optimizer"
        fix = "look for post-accumulate hooks and for code that touches .grad"
        report.finding = _failed("gradient", what, written[0], why, fix)
        return
    name, size = max(report.examination.grads.items(), key=lambda item: item[1], default=("?", math.nan))
    report.origin = Origin("gradient", name.rpartition(".")[0], name, op=name)
    what = f"every gradient is finite, but their norm overflows; the largest is that of {name} ({size:.3g})"
    why = "gradients of this size come from an explosion in depth or in a recurrence, not from one operation"
    report.finding = _failed("overflow", what, name, why, "lower optim.lr, normalise inside the block, or scale the loss down")


# ---- the data --------------------------------------------------------------------------------------------------------


def explain_data(ctx: ReplayContext, report: ReplayReport) -> bool:
    """Whether the failing rows hold values that are non-finite, out of range, or far above those of earlier batches."""
    exam = report.examination
    limits = _reference(ctx)
    for part, batch in enumerate(exam.batches):
        suspects = {r.row for r in report.rows if r.part == part} or set(range(num_rows(batch)) if report.all_rows else ())
        ranges = declared_ranges(ctx, batch)
        for name, value in batch.items():
            size = limits.get(name, math.inf)
            bad = [row for row in _bad_rows(value, batch, *ranges.get(name, (-size, size))) if row in suspects]
            if bad:
                _describe_data(ctx, report, part, name, bad)
                return True
    return False


def declared_ranges(ctx: ReplayContext, batch: Batch) -> dict[str, tuple[float, float]]:
    """The ranges that the probe declares for a batch; a probe may fail on the very values under investigation."""
    try:
        with ctx.engine.evaluating():
            probe = capabilities.probe(ctx.system, batch)
        return dict(probe.ranges or {}) if probe else {}
    except Exception:
        return {}


def _bad_rows(value: Tensor, batch: Batch, low: float, high: float) -> list[int]:
    if not value.ndim or len(value) != num_rows(batch) or not (value.is_floating_point() or math.isfinite(high)):
        return []
    flat = value.detach().reshape(len(value), -1).double()
    wrong = ~(torch.isfinite(flat) & (flat >= low) & (flat <= high)).all(1)
    return wrong.nonzero().flatten().tolist()


def _reference(ctx: ReplayContext) -> dict[str, float]:
    """The largest plausible magnitude of each batch entry, from earlier batches."""
    job, sizes = ctx.job, {}
    first = max(job.counter - NUM_REFERENCES * job.config.batch, 0)
    for counter in range(first, job.counter, job.config.batch):
        job.stepper.feed.load(counter)
        for k in range(job.config.accum):
            for name, value in job.stepper.feed.part(k).items():
                size = largest(value)
                sizes[name] = max(sizes.get(name, 0.0), 0.0 if math.isnan(size) else size)
    return {name: OUTLIER * size for name, size in sizes.items() if size > 0}


def _describe_data(ctx: ReplayContext, report: ReplayReport, part: int, name: str, bad: list[int]) -> None:
    batch = report.examination.batches[part]
    report.rows = [r for r in report.rows if r.part == part and r.row in bad] or [
        row_facts(ctx, report.examination, part, row) for row in bad[:8]
    ]
    report.all_rows = False
    row = report.rows[0]
    value = batch[name][row.row]
    kind = "values that are not finite" if not finite(value) else f"values up to {largest(value):.3g}, far out of range"
    report.origin = Origin("data", "", source_line(type(ctx.data.train).batch), op=name)
    item = f"item {row.item} of the data set (sample {row.sample})" if row.item is not None else f"sample {row.sample}"
    what = f"the batch itself is bad: `{name}` of row {row.row}, {item}, holds {kind}"
    why = "whatever the model computes from it is not finite either; the model is not to blame"
    fix = f"repair or drop item {row.item if row.item is not None else row.sample} at the source, or clamp it in `batch`"
    report.finding = _failed("data", what, f"{source_line(type(ctx.data.train).batch)}; {item}", why, fix)


# ---- rows ------------------------------------------------------------------------------------------------------------


def failing_rows(ctx: ReplayContext, exam: Examination) -> tuple[list[Row], bool]:
    """The smallest sets of rows that still fail, by bisection; and whether every tried row fails alone."""
    deadline, found, every = time.monotonic() + PATIENCE, [], True
    engine = _single(ctx)
    for part, batch in enumerate(exam.batches):
        count = num_rows(batch)

        def fails(rows: list[int], part: int = part, batch: Batch = batch, count: int = count) -> bool:
            alone = run_rows(ctx, engine, batch, exam.draws[part], rows, count)
            return alone is not None and alone.bad

        if not count or not fails(list(range(count))):
            every = False
            continue
        probes = sorted({0, count // 2, count - 1})
        rest = [row for row in range(count) if row not in probes]
        if count > 1 and all(fails([row]) for row in probes) and (not rest or fails(rest)):
            found += [(part, row) for row in probes]
            continue
        every = False
        found += [(part, row) for row in _shrink(list(range(count)), fails, deadline)]
    every = every and bool(found)
    return [row_facts(ctx, exam, part, row) for part, row in found[:8]], every


def _shrink(rows: list[int], fails: Callable[[list[int]], bool], deadline: float) -> list[int]:
    """Rows of all minimal failing sets inside `rows`, which fails as a whole."""
    if len(rows) == 1 or time.monotonic() > deadline:
        return rows
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    found = [row for half in halves if fails(half) for row in _shrink(half, fails, deadline)]
    return found or rows


def _single(ctx: ReplayContext) -> TracingEngine:
    """An engine on the same weights that takes any batch as one part."""
    engine = TracingEngine(ctx.system, replace(ctx.config, accum=1, ema=0.0), ctx.engine.device)
    for name, scale in ctx.engine.scale.items():
        engine.scale[name].copy_(scale)
    return engine


def run_rows(
    ctx: ReplayContext, engine: TracingEngine, batch: Batch, draws: list[Tensor], rows: list[int], count: int
) -> Examination | None:
    """The step on some rows with their recorded noise; None when the model cannot take so few."""
    replay_draws = ReplayDraws(draws, rows, count)
    try:
        return engine.examine(lambda k: take_rows(batch, rows), ctx.begin(engine), replay_draws, untraced=True)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None


def row_facts(ctx: ReplayContext, exam: Examination, part: int, row: int, loss: float = math.nan) -> Row:
    """Which item a row is, and its decoded content."""
    job = ctx.job
    sample = job.counter + part * (job.config.batch // job.config.accum) + row
    source, item = job.data.train, None
    if source.arrays:
        _, index = Order(source.num_items, job.config.seed).at(sample, 1)
        item = int(index[0])
    return Row(part, row, sample, item, loss, show_row(ctx, exam.batches[part], row))


def show_row(ctx: ReplayContext, batch: Batch, row: int) -> str:
    """A row decoded by the recipe, or its first numbers."""
    try:
        with ctx.engine.evaluating():
            probe = capabilities.probe(ctx.system, batch)
            if probe and probe.decode and probe.inputs:
                return repr(probe.decode(probe.batch[probe.inputs][row].detach().cpu()))[:120]
    except Exception:  # a probe may fail on the very values under investigation
        pass
    shown = []
    for name, value in batch.items():
        if value.ndim and len(value) == num_rows(batch) and name != "index":
            numbers = value[row].detach().flatten()[:5].tolist()
            more = ", ..." if value[row].numel() > 5 else ""
            shown.append(f"{name}=[{', '.join(f'{x:.4g}' for x in numbers)}{more}]")
    return " ".join(shown)[:160]


# ---- precisions ------------------------------------------------------------------------------------------------------


def precision_ladder(ctx: ReplayContext, exam: Examination) -> list[PrecisionResult]:
    """The same step with the same noise: as run, in float32 there, in float32 and float64 on the CPU."""
    device, config = ctx.engine.device, ctx.config
    precisions = [_precision_result(f"{config.precision} on {device.type}, as run", exam)]
    cpu = torch.device("cpu")
    wanted = [("fp32", device, torch.float32)] if config.precision != "fp32" else []
    wanted += [("fp32", cpu, torch.float32)] if device.type != "cpu" else []
    for name, where, dtype in [*wanted, ("fp64", cpu, torch.float64)]:
        title = f"{name} on {where.type}"
        try:
            precisions.append(_precision_result(title, _run_in_precision(ctx, exam, where, dtype)))
        except Exception as error:  # a recipe may reject a dtype by any exception
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:90]
            precisions.append(PrecisionResult(title, math.nan, math.nan, False, problem))
    return precisions


def _run_in_precision(ctx: ReplayContext, exam: Examination, device: torch.device, dtype: torch.dtype) -> Examination:
    config = replace(ctx.config, precision="fp32", device=device.type, ema=0.0, accum=len(exam.batches))
    engine = build(ctx.recipe, config, ctx.data, device, make=TracingEngine)
    system = engine.system
    with torch.no_grad():
        live = dict(ctx.system.state_dict(keep_vars=True))
        for name, tensor in system.state_dict(keep_vars=True).items():
            tensor.copy_(live[name])
    system.load_state(ctx.system.state())
    system.train(ctx.system.training).to(dtype)
    batches = [{k: v.to(device) for k, v in to_dtype(b, dtype).items()} for b in exam.batches]
    draws = [draw for part in exam.draws for draw in part]
    return engine.examine(lambda k: batches[k], ctx.begin(engine), ReplayDraws(draws), untraced=True)


def _precision_result(name: str, exam: Examination) -> PrecisionResult:
    return PrecisionResult(name, exam.loss, max(exam.norms.values(), default=math.nan), not exam.bad)


# ---- a step that is finite -------------------------------------------------------------------------------------------


def _explain_finite(ctx: ReplayContext, report: ReplayReport, changes: dict[str, float], on_status: OnStatus) -> None:
    exam = report.examination
    bad = [n for n, t in ctx.engine.tensors()["optim"].items() if not finite(t)]
    if bad:
        what = f"the optimizer's state {bad[0]} is not finite before the step ({len(bad)} tensors)"
        why = "a squared gradient overflowed: such a weight never moves again"
        fix = "go back to a checkpoint from before; lower optim.clip or scale the loss down"
        report.finding = _failed("optimizer", what, bad[0], why, fix)
        return
    on_status("weighing the rows")
    report.rows = worst_rows(ctx, exam)
    report.blocks = blocks(ctx, exam, changes)
    limit, median = _band(ctx)
    if exam.loss > limit:
        top = report.rows[0] if report.rows else None
        share = f"; row {top.row} alone has {top.loss:.4g}" if top else ""
        what = f"loss {exam.loss:.4g} against {median:.4g} in the steps before{share}"
        block = max(report.blocks, key=lambda b: b["grad_norm"], default={"block": "?"})
        why = "one batch far from the others, or weights that an earlier step has moved too far"
        fix = "look at the worst rows; if they are ordinary, lower optim.lr or optim.clip"
        report.finding = _failed("spike", what, f"largest gradient: {block['block']}", why, fix)
        explain_spike_data(ctx, report)
        return
    what = f"nothing is wrong with this step: loss {exam.loss:.6g}, gradient norm {max(exam.norms.values()):.4g}"
    why, fix = "every value is finite and inside its band", "name another step"
    report.finding = Finding("clean", what=what, where=ctx.start, why=why, fix=fix)


def explain_spike_data(ctx: ReplayContext, report: ReplayReport) -> None:
    """Whether rows with values far above those of earlier batches explain the spike."""
    sizes = {name: limit / OUTLIER * 10 for name, limit in _reference(ctx).items()}
    for batch in report.examination.batches:
        for name, value in batch.items():
            size = sizes.get(name, math.inf)
            bad = _bad_rows(value, batch, -size, size)
            if bad:
                most = largest(value[bad[0]])
                why = f"`{name}` of row {bad[0]} goes up to {most:.3g}, ten times beyond the batches before"
                fix = "check the item at its source; clamp or normalise it in `batch`"
                report.finding = replace(report.finding, why=why, fix=fix)
                report.origin = Origin("data", "", source_line(type(ctx.data.train).batch), op=name)
                return


def _band(ctx: ReplayContext) -> tuple[float, float]:
    """The expected band of the loss from earlier steps: median and six robust deviations."""
    before = [float(v) for s, v in ctx.recorded.items() if v is not None and ctx.step - 128 <= s < ctx.step]
    before = sorted(v for v in before if math.isfinite(v))
    if len(before) < 8:
        return math.inf, math.nan
    median = before[len(before) // 2]
    spread = sorted(abs(v - median) for v in before)[len(before) // 2]
    return median + 6 * max(1.4826 * spread, 1e-3 * abs(median)), median


def worst_rows(ctx: ReplayContext, exam: Examination, num: int = 5) -> list[Row]:
    """The rows with the largest loss."""
    deadline, engine, losses = time.monotonic() + PATIENCE, _single(ctx), []
    for part, batch in enumerate(exam.batches):
        for row in range(num_rows(batch)):
            if time.monotonic() > deadline:
                break
            alone = run_rows(ctx, engine, batch, exam.draws[part], [row], num_rows(batch))
            if alone is not None:
                losses.append((alone.loss, part, row))
    return [row_facts(ctx, exam, part, row, loss) for loss, part, row in sorted(losses, reverse=True)[:num]]


def blocks(ctx: ReplayContext, exam: Examination, changes: dict[str, float]) -> list[dict[str, Any]]:
    """Gradient norm and relative update of every block, two names below the system."""
    found: dict[str, dict[str, float]] = {}
    for name, size in exam.grads.items():
        parts = name.split(".")[:-1]
        key = ".".join(parts[: 3 if len(parts) > 2 and parts[2].isdigit() else 2]) or name
        entry = found.setdefault(key, {"squares": 0.0, "update": 0.0})
        entry["squares"] += size * size
        entry["update"] = max(entry["update"], changes.get(name, 0.0))
    return [{"block": k, "grad_norm": math.sqrt(v["squares"]), "update": v["update"]} for k, v in found.items()]
