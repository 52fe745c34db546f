"""A step of a past run set up again: the same config, data, weights, moments, counter and seed, right before it is taken.

It can be taken as it was, on some of its rows, and in other precisions.
"""

import contextlib
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from seedbed.checks import data_show
from seedbed.checks.forensics import Examination, TracingEngine
from seedbed.checks.subject import num_rows, take_rows, to_dtype
from seedbed.checks.watch_ops import ReplayDraws
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.data.order import Order
from seedbed.errors import UserError
from seedbed.recipes import Recipe
from seedbed.recipes.saved import open_saved
from seedbed.track.console import Console
from seedbed.track.edits import verified_config
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading, loop, progress, stepper
from seedbed.train.engine import cpu_threads
from seedbed.train.stepper import build
from seedbed.train.system import Batch, System

OnStatus = Callable[[str], None]
# How far a loss may be from the recorded one where bits cannot agree: another device, or a compiled step run uncompiled.
CLOSE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 5e-2}
# How long the search for rows and the worst rows may take, in seconds.
PATIENCE = 20.0
# Steps on both sides whose recorded losses are looked at, and how far they may be from the median, in robust deviations.
NEAR, SIGMAS = 16, 6.0


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
class ReplayContext:
    """A run's step, ready to be taken, and the recorded losses of it and of earlier steps."""

    run: Run
    recipe: Recipe
    config: Config
    data: Data
    job: loop.Job
    step: int
    start: str
    recorded: dict[int, Any]
    exact: bool
    notes: list[str] = field(default_factory=list)
    differs: tuple[int, Any, float] | None = None

    @property
    def engine(self) -> TracingEngine:
        assert isinstance(self.job.engine, TracingEngine)
        return self.job.engine

    @property
    def system(self) -> System:
        return self.job.system

    def begin(self, engine: TracingEngine) -> Callable[[], None]:
        """What sets up this step's scalars and random numbers on an engine."""
        step, progress = self.step - 1, self.job.progress

        def start() -> None:
            engine.variant = self.system.variant(step, self.config.steps)
            engine.begin(step, progress)

        return start

    def compare(self, step: int, loss: float) -> None:
        """Compares a loss with the recorded one; the first difference is kept."""
        if step in self.recorded and self.differs is None and not self.same(self.recorded[step], loss):
            self.differs = (step, self.recorded[step], loss)

    def same(self, recorded: Any, loss: float) -> bool:
        wanted = float("nan") if recorded is None else float(recorded)
        if not math.isfinite(wanted) or not math.isfinite(loss):
            return math.isfinite(wanted) == math.isfinite(loss)
        return wanted == loss if self.exact else abs(wanted - loss) <= CLOSE[self.config.precision] * max(abs(wanted), 1e-3)


def open_replay(root: Path, run_name: str, step: int | None, on_status: OnStatus = lambda text: None) -> ReplayContext:
    """Restores everything right before `step`; by default the last step that went wrong."""
    run = Run.open(root, run_name)
    recipe, config = open_saved(verified_config(run), run.path)
    wanted = last_incident(run) if step is None else step
    saved, is_incident = starting_point(run, wanted)
    on_status("opening the data")
    plain = replace(config, compile="off", capture="off")
    data = recipe.open_data(plain)
    engine = build(recipe, plain, data, make=TracingEngine)
    silent = Console(stream=io.StringIO())
    job = loop.Job(run=run, config=plain, system=engine.system, data=data, engine=engine, console=silent)
    start = _restore(job, run, saved, is_incident)
    if wanted <= job.step:
        raise UserError(f"step {wanted} cannot be replayed: steps count from 1")
    devices = [str(e.get("device", "")) for e in run.events() if e.get("kind") in ("start", "resume")]
    device = devices[-1].partition(":")[0] if devices else "?"
    exact = device == job.engine.device.type == "cpu" and config.compile == "off"
    recorded = _recorded(run, saved if is_incident else None, wanted)
    ctx = ReplayContext(run, recipe, plain, data, job, wanted, start, recorded, exact, _notes(run, recipe, config, device, job))
    while job.step < wanted - 1:  # from the stored state on, as the loop takes steps
        on_status(f"running forward: step {job.step + 1} of {wanted - 1}")
        ctx.compare(job.step + 1, take_step(job))
    return ctx


def last_incident(run: Run) -> int:
    """The last step that went wrong: one with a stored state, or else a spike."""
    if kept := checkpoint.steps_in(run.path / "incidents"):
        return checkpoint.step_at(kept[-1])
    steps = [e["step"] for e in run.events() if e.get("kind") in ("nonfinite", "spike")]
    if not steps:
        raise UserError(f"nothing went wrong in run {run.name}; to replay a step anyway: seedbed replay {run.name} STEP")
    return steps[-1]


def starting_point(run: Run, step: int) -> tuple[checkpoint_loading.Checkpoint | None, bool]:
    """The state stored right before `step`, or the newest intact checkpoint below it; None for the run's start."""
    kept = run.path / "incidents" / checkpoint.folder_name(step)
    with contextlib.suppress(checkpoint_loading.Damaged):  # an earlier checkpoint serves as well, with more steps
        if kept.is_dir():
            return checkpoint_loading.load(kept), True
    return next(intact_before(run, step), None), False


def intact_before(run: Run, step: int) -> Iterator[checkpoint_loading.Checkpoint]:
    """The intact checkpoints below `step`, the newest first."""
    for path in reversed(checkpoint.steps_before(run.path / "checkpoints", step)):
        with contextlib.suppress(checkpoint_loading.Damaged):
            yield checkpoint_loading.load(path)


def _restore(job: loop.Job, run: Run, saved: checkpoint_loading.Checkpoint | None, is_incident: bool) -> str:
    """Restores the job to where the replay starts; returns a description."""
    if saved is None:
        if planned := [e["steps"] for e in run.events() if e.get("kind") == "budget"]:
            job.total_items = planned[-1] * job.config.batch
        return "the run's first moment"
    progress.restore(job, saved)
    if is_incident:
        job.step -= 1
        return f"incidents/{saved.path.name}, the state right before the step"
    # The run may have rolled back to this checkpoint and continued with other data.
    if back := [e for e in run.events() if e.get("kind") == "rollback" and e.get("to") == saved.step]:
        job.skipped_items = back[-1]["skipped_items"]
    return f"checkpoints/{saved.path.name}"


def _recorded(run: Run, incident: checkpoint_loading.Checkpoint | None, step: int) -> dict[int, Any]:
    """Recorded losses by step: rows, bad steps, step history, and the incident."""
    found = {row["step"]: row.get("loss") for row in run.rows() if "step" in row}
    bad: dict[int, Any] = {}
    for event in run.events():
        if event.get("kind") == "rollback":
            bad = _before(bad, event["to"] + 1)
        elif event.get("kind") in ("nonfinite", "spike") and "loss" in event:
            bad[event["step"]] = event["loss"]
    try:
        entries = stepper.read_history(run.path)
    except UserError:
        entries = []
    last: dict[int, Any] = {}
    for entry in entries:
        last = _before(last, entry["step"]) | ({entry["step"]: entry["loss"]} if "loss" in entry else {})
    kept = {step: incident.state["incident"]["loss"]} if incident else {}
    return found | bad | last | kept


def _before(losses: dict[int, Any], step: int) -> dict[int, Any]:
    """The losses before `step`."""
    return {s: loss for s, loss in losses.items() if s < step}


def _notes(run: Run, recipe: Recipe, config: Config, device: str, job: loop.Job) -> list[str]:
    """Differences between this replay and the run."""
    here, notes = job.engine.device.type, []
    if device != here:
        notes.append(f"the run was on {device}, the replay is on {here}: losses are compared within {CLOSE[config.precision]:g}")
    if config.compile != "off":
        notes.append(f"the run was compiled ({config.compile}), the replay is not: losses are compared within rounding")
    for path in recipe.files() if recipe.name.endswith(".py") else ():
        copy = run.path / path.name
        if copy.exists() and copy.read_bytes() != path.read_bytes():
            notes.append(f"{path.name} has changed since the run began; its first version is in {run.path}")
    return notes


def take_step(job: loop.Job) -> float:
    """One real step with its update; a step that is not finite is skipped, as the guard skips it."""
    with cpu_threads(job.system.num_cpu_threads):
        loop.take_step(job)
        result = job.stepper.pop_result(lag=0)
    assert result is not None
    job.engine.halted.fill_(False)
    return result.loss


def real_step(ctx: ReplayContext) -> dict[str, float]:
    """Takes the step, compares it with the record and restores everything. Returns relative changes by tensor."""
    job = ctx.job
    live = job.engine.tensors()
    kept = {file: {n: t.detach().clone() for n, t in group.items()} for file, group in live.items()}
    counters, own = (job.step, job.items), job.system.state()
    ctx.compare(ctx.step, take_step(job))
    changes = {
        name: float((tensor.detach() - kept["model"][name]).float().norm() / tensor.detach().float().norm().clamp_min(1e-12))
        for name, tensor in live["model"].items()
        if tensor.is_floating_point()
    }
    checkpoint_loading.restore(live, kept, "the state before the step")
    job.step, job.items = counters
    job.system.load_state(own)
    return changes


def examine(ctx: ReplayContext) -> Examination:
    """The step under the microscope, changing nothing."""
    ctx.job.stepper.feed.load(ctx.job.counter)
    return ctx.engine.examine(ctx.job.stepper.feed.part, ctx.begin(ctx.engine))


def band(ctx: ReplayContext, first: int, last: int) -> tuple[float, float, float]:
    """Lower limit, median and upper limit of the recorded losses of these steps; no limits where too few are known."""
    losses = [float(v) for s, v in ctx.recorded.items() if v is not None and first <= s < last]
    known = sorted(filter(math.isfinite, losses))
    if len(known) < 8:
        return -math.inf, math.nan, math.inf
    median = known[len(known) // 2]
    spread = sorted(abs(v - median) for v in known)[len(known) // 2]
    width = SIGMAS * max(1.4826 * spread, 1e-3 * abs(median))
    return median - width, median, median + width


def neighbour_out_of_band(ctx: ReplayContext) -> tuple[int, float, float] | None:
    """The nearest recorded step on either side whose loss is not finite or out of the band of the steps before them."""
    low, median, high = band(ctx, ctx.step - NEAR - 128, ctx.step - NEAR)
    near = [s for s in ctx.recorded if 0 < abs(s - ctx.step) <= NEAR]
    for step in sorted(near, key=lambda s: abs(s - ctx.step)):
        loss = math.nan if ctx.recorded[step] is None else float(ctx.recorded[step])
        if not low <= loss <= high:
            return step, loss, median
    return None


# ---- rows ------------------------------------------------------------------------------------------------------------


def failing_rows(ctx: ReplayContext, exam: Examination) -> tuple[list[Row], bool]:
    """The smallest sets of rows that still fail, by bisection; and whether every tried row fails alone."""
    deadline, found, every = time.monotonic() + PATIENCE, [], True
    engine = _single(ctx)
    for part, batch in enumerate(exam.batches):
        count = num_rows(batch)

        def fails(rows: list[int], part: int = part) -> bool:
            alone = run_rows(ctx, engine, exam, part, rows)
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
    return [row_facts(ctx, exam, part, row) for part, row in found[:8]], every and bool(found)


def _shrink(rows: list[int], fails: Callable[[list[int]], bool], deadline: float) -> list[int]:
    """Rows of all minimal failing sets inside `rows`, which fails as a whole."""
    if len(rows) == 1 or time.monotonic() > deadline:
        return rows
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return [row for half in halves if fails(half) for row in _shrink(half, fails, deadline)] or rows


def _single(ctx: ReplayContext) -> TracingEngine:
    """An engine on the same weights that takes any batch as one part."""
    engine = TracingEngine(ctx.system, replace(ctx.config, accum=1, ema=0.0), ctx.engine.device)
    for name, scale in ctx.engine.scale.items():
        engine.scale[name].copy_(scale)
    return engine


def run_rows(ctx: ReplayContext, engine: TracingEngine, exam: Examination, part: int, rows: list[int]) -> Examination | None:
    """The step on some rows of a part with their recorded noise; None when the model cannot take so few."""
    batch, draws = exam.batches[part], exam.draws[part]
    try:
        return engine.examine(lambda k: take_rows(batch, rows), ctx.begin(engine), ReplayDraws(draws, rows, num_rows(batch)))
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None


def row_facts(ctx: ReplayContext, exam: Examination, part: int, row: int, loss: float = math.nan) -> Row:
    """Which item a row is, and its decoded content."""
    job = ctx.job
    sample = job.counter + part * (job.config.batch // job.config.accum) + row
    source = job.data.train
    item = int(Order(source.num_items, job.config.seed).at(sample, 1)[1][0]) if source.arrays else None
    return Row(part, row, sample, item, loss, show_row(ctx, exam.batches[part], row))


def show_row(ctx: ReplayContext, batch: Batch, row: int) -> str:
    """A row decoded by the recipe, or its first numbers."""
    with contextlib.suppress(Exception), ctx.engine.evaluating():  # a probe may fail on the very values under investigation
        return data_show.decode(ctx.system, batch, [row])[0][:120]
    return data_show.as_numbers(batch, row)[:160]


def worst_rows(ctx: ReplayContext, exam: Examination) -> list[Row]:
    """The five rows with the largest loss."""
    deadline, engine, losses = time.monotonic() + PATIENCE, _single(ctx), []
    for part, batch in enumerate(exam.batches):
        for row in range(num_rows(batch)):
            if time.monotonic() > deadline:
                break
            if alone := run_rows(ctx, engine, exam, part, [row]):
                losses.append((alone.loss, part, row))
    return [row_facts(ctx, exam, part, row, loss) for loss, part, row in sorted(losses, reverse=True)[:5]]


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
        live = ctx.system.state_dict(keep_vars=True)
        for name, tensor in system.state_dict(keep_vars=True).items():
            tensor.copy_(live[name])
    system.load_state(ctx.system.state())
    system.train(ctx.system.training).to(dtype)
    batches = [{k: v.to(device) for k, v in to_dtype(b, dtype).items()} for b in exam.batches]
    return engine.examine(lambda k: batches[k], ctx.begin(engine), ReplayDraws([draw for part in exam.draws for draw in part]))


def _precision_result(name: str, exam: Examination) -> PrecisionResult:
    return PrecisionResult(name, exam.loss, max(exam.norms.values(), default=math.nan), not exam.bad)
