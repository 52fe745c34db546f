"""A step of a past run set up again: the same config, data, weights, moments, counter and dice, right before it is taken."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seedbed import config as configs
from seedbed.checks.forensics import Examination, TracingEngine
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.recipes import Recipe, find_saved
from seedbed.track import lines
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train import checkpoint, loop
from seedbed.train.engine import mix, pick_device
from seedbed.train.system import System

# How far a loss may be from the recorded one where bits cannot agree: another device, or a compiled step run uncompiled.
CLOSE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 5e-2}


@dataclass
class Scene:
    """A run's step, ready to be taken, and what was recorded of it and of the steps before."""

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
        """What sets up this step's dials and dice on an engine."""
        step, progress = self.step - 1, self.job.progress

        def start() -> None:
            engine.variant = self.system.variant(step, self.config.steps)
            engine.begin(step, progress)

        return start

    def compare(self, step: int, loss: float) -> None:
        """Hold a loss against the recorded one; the first that differs is kept."""
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


def open_scene(root: Path, run_name: str, step: int | None, tell: Callable[[str], None] = lambda text: None) -> Scene:
    """Build everything as the run had it and stand right before `step`; by default the last one that went wrong."""
    run = Run.open(root, run_name)
    facts = run.config_json()
    recipe = find_saved(facts["recipe"], root)
    config = configs.from_json(recipe.preset(facts["preset"]), facts["config"])
    wanted = last_incident(run) if step is None else step
    saved, is_incident = starting_point(run, wanted)
    tell("opening the data")
    plain = replace(config, compile="off", capture="off")
    data = recipe.open_data(plain)
    engine, system = build(recipe, plain, data)
    silent = Console(stream=io.StringIO())
    job = loop.Job(run=run, config=plain, system=system, data=data, engine=engine, console=silent)
    start = _restore(job, run, saved, is_incident)
    if wanted <= job.step:
        raise UserError(f"step {wanted} cannot be replayed: steps count from 1")
    device = _recorded_device(run)
    exact = device == job.engine.device.type == "cpu" and config.compile == "off"
    recorded = _recorded(run, saved if is_incident else None, wanted)
    scene = Scene(run, recipe, plain, data, job, wanted, start, recorded, exact, _notes(run, recipe, config, device, job))
    _advance(scene, tell)
    return scene


def build(recipe: Recipe, config: Config, data: Data, device: torch.device | None = None) -> tuple[TracingEngine, System]:
    """A system as a run would start with it, under an engine that can be watched."""
    device = device or pick_device(config.device)
    seed = mix(config.seed)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    system = recipe.build(config, data).to(device)
    return TracingEngine(system, config, device), system


def last_incident(run: Run) -> int:
    """The last step that went wrong: one whose state was kept, or else a spike."""
    kept = checkpoint.steps_in(run.path / "incidents")
    if kept:
        return int(kept[-1].name.removeprefix("step-"))
    steps = [e["step"] for e in run.events() if e.get("kind") in ("nonfinite", "spike")]
    if not steps:
        raise UserError(f"nothing went wrong in run {run.name}; to look at a step all the same: seedbed replay {run.name} STEP")
    return steps[-1]


def starting_point(run: Run, step: int) -> tuple[checkpoint.Checkpoint | None, bool]:
    """The state kept from right before `step`, or the newest whole checkpoint below it; None is the run's first moment."""
    kept = run.path / "incidents" / checkpoint.folder_name(step)
    if kept.is_dir():
        try:
            return checkpoint.load(kept), True
        except checkpoint.Damaged:
            pass  # a checkpoint below it serves as well, with more steps to run
    for path in reversed(checkpoint.steps_in(run.path / "checkpoints")):
        if path.name < checkpoint.folder_name(step):
            try:
                return checkpoint.load(path), False
            except checkpoint.Damaged:
                continue
    return None, False


def _restore(job: loop.Job, run: Run, saved: checkpoint.Checkpoint | None, is_incident: bool) -> str:
    """Put the job where the replay starts; says where that is."""
    if saved is None:
        planned = [e["steps"] for e in run.events() if e.get("kind") == "budget"]
        if planned:
            job.total_items = planned[-1] * job.config.batch
        return "the run's first moment"
    loop.take_back(job, saved)
    if is_incident:
        job.step -= 1
        return f"incidents/{saved.path.name}, the state right before the step"
    # The run may have come back to this checkpoint and gone on with other data.
    back = [e for e in run.events() if e.get("kind") == "rollback" and e.get("to") == saved.step]
    if back:
        job.skipped_items = back[-1]["skipped_items"]
    return f"checkpoints/{saved.path.name}"


def _recorded(run: Run, incident: checkpoint.Checkpoint | None, step: int) -> dict[int, Any]:
    """Losses by step as the run wrote them: rows, bad steps, the ring, and what was kept with the incident."""
    found = {row["step"]: row.get("loss") for row in run.rows() if "step" in row}
    bad: dict[int, Any] = {}
    for event in run.events():
        if event.get("kind") == "rollback":
            bad = _before(bad, event["to"] + 1)
        elif event.get("kind") in ("nonfinite", "spike") and "loss" in event:
            bad[event["step"]] = event["loss"]
    try:
        entries = lines.read_object(run.path / "ring.json").get("steps", [])
    except UserError:
        entries = []
    ring: dict[int, Any] = {}
    for entry in entries:
        ring = _before(ring, entry["step"]) | ({entry["step"]: entry["loss"]} if "loss" in entry else {})
    kept = {step: incident.state["incident"]["loss"]} if incident else {}
    return found | bad | ring | kept


def _before(losses: dict[int, Any], step: int) -> dict[int, Any]:
    """What a course that was left at `step` has in common with the one that was kept."""
    return {s: loss for s, loss in losses.items() if s < step}


def _recorded_device(run: Run) -> str:
    devices = [str(e.get("device", "")) for e in run.events() if e.get("kind") in ("start", "resume")]
    return devices[-1].partition(":")[0] if devices else "?"


def _notes(run: Run, recipe: Recipe, config: Config, device: str, job: loop.Job) -> list[str]:
    """What makes this replay other than the run itself."""
    here, notes = job.engine.device.type, []
    if device != here:
        notes.append(f"the run was on {device}, the replay is on {here}: losses are compared within {CLOSE[config.precision]:g}")
    if config.compile != "off":
        notes.append(f"the run was compiled ({config.compile}), the replay is not: losses are compared within rounding")
    for path in recipe.files() if recipe.name.endswith(".py") else ():
        copy = run.path / path.name
        if copy.exists() and copy.read_bytes() != path.read_bytes():
            notes.append(f"{path.name} has changed since the run began; its first version lies in {run.path}")
    return notes


def _advance(scene: Scene, tell: Callable[[str], None]) -> None:
    """Take the steps between the saved state and the one before the step in question, as the loop takes them."""
    job = scene.job
    while job.step < scene.step - 1:
        tell(f"running forward: step {job.step + 1} of {scene.step - 1}")
        scene.compare(job.step + 1, take_step(job))


def take_step(job: loop.Job) -> float:
    """One real step with its update; a step that is not finite is skipped, as the guard skips it."""
    loop._take_step(job)
    found = job.readback.pop(leave=0)
    assert found is not None
    measured = dict(zip(job.runner.names, found[1], strict=True))
    job.engine.halted.fill_(False)
    return measured["loss"]


def real_step(scene: Scene) -> dict[str, float]:
    """Take the step in question for real, hold it against the record, and put everything back. Relative changes by tensor."""
    job = scene.job
    live = job.engine.tensors()
    kept = {file: {n: t.detach().clone() for n, t in group.items()} for file, group in live.items()}
    counters, own = (job.step, job.items), job.system.state()
    scene.compare(scene.step, take_step(job))
    changes = {
        name: float((tensor.detach() - kept["model"][name]).float().norm() / tensor.detach().float().norm().clamp_min(1e-12))
        for name, tensor in live["model"].items()
        if tensor.is_floating_point()
    }
    checkpoint.restore(live, kept, "the state before the step")
    job.step, job.items = counters
    job.system.load_state(own)
    return changes


def examine(scene: Scene, light: bool = False) -> Examination:
    """The step under the microscope, changing nothing."""
    scene.job.feed.load(scene.job.counter)
    return scene.engine.examine(scene.job.feed.part, scene.begin(scene.engine), light=light)
