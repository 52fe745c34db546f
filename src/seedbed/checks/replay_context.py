"""A step of a past run set up again: the same config, data, weights, moments, counter and seed, right before it is taken."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seedbed.checks.forensics import Examination, TracingEngine
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.recipes import Recipe
from seedbed.recipes.saved import open_saved
from seedbed.track.console import Console
from seedbed.track.edits import verified_config
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading, loop, progress, stepper
from seedbed.train.engine import cpu_threads
from seedbed.train.stepper import build
from seedbed.train.system import System

OnStatus = Callable[[str], None]
# How far a loss may be from the recorded one where bits cannot agree: another device, or a compiled step run uncompiled.
CLOSE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 5e-2}


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
    compared: int = 0

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
        if step not in self.recorded:
            return
        self.compared += 1
        if self.differs is None and not self.same(self.recorded[step], loss):
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
    kept = checkpoint.steps_in(run.path / "incidents")
    if kept:
        return checkpoint.step_at(kept[-1])
    steps = [e["step"] for e in run.events() if e.get("kind") in ("nonfinite", "spike")]
    if not steps:
        raise UserError(f"nothing went wrong in run {run.name}; to replay a step anyway: seedbed replay {run.name} STEP")
    return steps[-1]


def starting_point(run: Run, step: int) -> tuple[checkpoint_loading.Checkpoint | None, bool]:
    """The state stored right before `step`, or the newest intact checkpoint below it; None for the run's start."""
    kept = run.path / "incidents" / checkpoint.folder_name(step)
    if kept.is_dir():
        try:
            return checkpoint_loading.load(kept), True
        except checkpoint_loading.Damaged:
            pass  # an earlier checkpoint serves as well, with more steps
    for path in reversed(checkpoint.steps_before(run.path / "checkpoints", step)):
        try:
            return checkpoint_loading.load(path), False
        except checkpoint_loading.Damaged:
            continue
    return None, False


def _restore(job: loop.Job, run: Run, saved: checkpoint_loading.Checkpoint | None, is_incident: bool) -> str:
    """Restores the job to where the replay starts; returns a description."""
    if saved is None:
        planned = [e["steps"] for e in run.events() if e.get("kind") == "budget"]
        if planned:
            job.total_items = planned[-1] * job.config.batch
        return "the run's first moment"
    progress.restore(job, saved)
    if is_incident:
        job.step -= 1
        return f"incidents/{saved.path.name}, the state right before the step"
    # The run may have rolled back to this checkpoint and continued with other data.
    back = [e for e in run.events() if e.get("kind") == "rollback" and e.get("to") == saved.step]
    if back:
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


def examine(ctx: ReplayContext, untraced: bool = False) -> Examination:
    """The step under the microscope, changing nothing."""
    ctx.job.stepper.feed.load(ctx.job.counter)
    return ctx.engine.examine(ctx.job.stepper.feed.part, ctx.begin(ctx.engine), untraced=untraced)
