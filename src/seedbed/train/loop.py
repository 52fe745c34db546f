"""The loop that trains every system: load, step, read the step before, and let the instruments act in order."""

from __future__ import annotations

import random
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seedbed.config import Config
from seedbed.data.feed import Data, Feed
from seedbed.errors import UserError
from seedbed.track.clocks import Stopwatch
from seedbed.track.console import Console
from seedbed.track.flops import Meter
from seedbed.track.run import Run
from seedbed.train import checkpoint, garbage, rescue
from seedbed.train.capture import Readback, StepRunner
from seedbed.train.engine import Engine
from seedbed.train.guard import Incidents
from seedbed.train.ring import Ring, spelled
from seedbed.train.saver import Saver
from seedbed.train.schedule import multiplier
from seedbed.train.system import Request, System
from seedbed.train.watch import Alarm, Point, Watch
from seedbed.train.watchdog import watching

# States from before bad steps that a run keeps for `replay`: the first few tell the story, and each is as large as a checkpoint.
MAX_INCIDENTS = 3
# Log points over which a run's pace is measured.
NUM_PACES = 6


@dataclass
class Job:
    """One run in this process: its parts, and the few numbers that move."""

    run: Run
    config: Config
    system: System
    data: Data
    engine: Engine
    console: Console
    step: int = 0
    items: int = 0
    skipped_items: int = 0
    total_items: int = 0
    best: float | None = None
    best_step: int = 0
    last_loss: float = float("nan")
    status: str = "running"
    stop_signal: int = 0
    patience: int = 0
    pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=NUM_PACES))
    feed: Feed = field(init=False)
    runner: StepRunner = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.ranks = self.engine.ranks
        self.part = checkpoint.Part(self.ranks.behind, self.engine.rows)
        self.saver, self._all_stop = Saver(), False
        shape = {"batch": config.batch, "parts": config.accum, "share": (self.ranks.rank, self.ranks.world)}
        self.feed = Feed(self.data.train, seed=config.seed, device=self.engine.device, **shape)
        self.runner = StepRunner(self.engine, self.feed, self.console.line)
        self.readback = Readback(self.engine.device)
        self.incidents = Incidents(config.guard)
        self.ring = Ring()
        self.watch = Watch(self.engine, self.feed)
        self.clock = Stopwatch()
        self.meter = Meter(self.system.flops_per_item() / self.num_ranks, self.engine.device, config.precision)
        self.total_items = config.steps * config.batch

    @property
    def num_ranks(self) -> int:
        """How many processes take each step together."""
        return self.ranks.world

    @property
    def is_stopped(self) -> bool:
        """Whether the run was asked to end; of several ranks, whether all know of it."""
        return bool(self.stop_signal) if self.ranks.is_alone else self._all_stop

    def stop_together(self) -> None:
        """Some rank was asked to end the run, and a step has told all of them."""
        self._all_stop, self.stop_signal = True, self.stop_signal or signal.SIGTERM

    @property
    def counter(self) -> int:
        """The next item of the data's order; roll-backs skip past what spoiled the run."""
        return self.items + self.skipped_items

    @property
    def num_steps(self) -> int:
        """The step at which the run ends, at the present batch size."""
        return self.step + -(-(self.total_items - self.items) // self.config.batch)

    @property
    def progress(self) -> float:
        """The share of the run done once the next step is taken."""
        return (self.items + self.config.batch) / self.total_items


@dataclass(frozen=True)
class Instrument:
    """Something that happens every n steps, in the order of the list; 0 means only at the end."""

    every: int
    act: Callable[[Job], None]

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0


def instruments(config: Config) -> list[Instrument]:
    every = config.every
    return [Instrument(every.eval, evaluate), Instrument(every.sample, sample), Instrument(every.save, save)]


def fit(job: Job) -> str:
    """Train until done, stopped or spoiled; returns the run's status in a word."""
    handlers = _catch_signals(job)
    try:
        rescue.surviving(job, _warm_up)
        with garbage.left_lying(), watching(job), rescue.explaining(job):
            job.meter.start(job.items, job.clock["train"], job.feed.wait)
            job.clock.start("train")
            _train(job)
            _finish(job)
    finally:
        _write_ring(job)
        job.feed.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return job.status


def _train(job: Job) -> None:
    """Step after step until the last one, a signal or trouble; the tools act between them."""
    tools = instruments(job.config)
    while job.status == "running" and not job.is_stopped:
        last_step = job.num_steps  # later variants of a step may be slower, and a budget stays a budget
        if job.step >= last_step:
            if _settled(job):
                break
            continue
        rescue.surviving(job, _take_step)
        measured = job.readback.pop(leave=1)
        if measured and _look(job, *measured):
            continue
        for tool in tools:
            if tool.due(job.step) and job.step < last_step and _settled(job):
                tool.act(job)
                garbage.sweep()


def advance(job: Job, num_steps: int) -> None:
    """Take a few steps and no instrument, and let go of the data."""
    try:
        _warm_up(job)
        for _ in range(num_steps):
            _take_step(job)
        _settled(job)
    finally:
        job.feed.close()


def _take_step(job: Job) -> None:
    engine = job.engine
    if job.saver.is_over:
        _end_save(job)
    engine.wants_stop = bool(job.stop_signal)
    engine.variant = job.system.variant(job.step, job.num_steps)
    job.feed.load(job.counter)
    if engine.variant not in job.runner.ready:
        with job.clock.lap("compile"):
            job.runner.prepare()
    job.ring.take(job.step + 1, job.counter, job.items, engine.variant)
    engine.begin(job.step, job.progress)
    job.readback.push(job.step + 1, job.runner())
    job.step += 1
    job.items += job.config.batch


def _warm_up(job: Job) -> None:
    """Compile and capture before the clock starts; with a time budget, measure a step and fix the run's length by it."""
    job.engine.variant = job.system.variant(job.step, job.num_steps)
    with job.clock.lap("compile"):
        job.feed.load(job.counter)
        job.engine.begin(job.step, job.progress)
        job.runner.prepare()
        if job.config.budget and job.step == 0:
            seconds = job.ranks.tell(_time_steps(job))
            # A rehearsed step skips the optimizer's writes and a real run logs: leave room, the budget is a promise.
            job.total_items = max(1, int(0.94 * job.config.budget / seconds)) * job.config.batch
            length = job.total_items // job.config.batch
            job.console.line(f"budget {job.config.budget:g} s at {seconds * 1e3:.2f} ms a step: {length:,} steps")
            job.run.event(job.step, "budget", seconds_per_step=seconds, steps=length)
    job.console.line(f"step: {job.runner.how}; data: {job.feed.describe()}")


def _keep_budget(job: Job) -> None:
    """At a log point: steps may have another pace than those by which the budget was turned into a length.

    Slower ones shorten the run whenever it is; faster ones lengthen it in its first half, before the rate goes down for good.
    """
    if not job.config.budget:
        return
    job.pace.append((job.clock["train"], job.step))
    (since, first), (now, last) = job.pace[0], job.pace[-1]
    if last - first <= 0:
        return
    affordable = int(0.99 * (job.config.budget - now) * (last - first) / (now - since))
    steps, left = max(1, job.ranks.tell(affordable)), job.num_steps - job.step
    slower, faster = steps < 0.98 * left, steps > 1.1 * left and job.progress < 0.5
    if slower or faster:
        job.total_items = job.items + steps * job.config.batch
        job.console.line(f"steps have become {'slower' if slower else 'faster'}: the budget allows {job.num_steps:,} in all")
        job.run.event(job.step, "budget", seconds_per_step=(now - since) / (last - first), steps=job.num_steps)


def _time_steps(job: Job) -> float:
    """Seconds per step, by steps that change nothing."""
    with job.engine.rehearsal():
        for count in (2, 0):
            start, counter = time.perf_counter(), job.counter
            done = 0
            while done < (count or 400) and (count or done < 5 or job.ranks.tell(time.perf_counter() - start < 1.5)):
                job.feed.load(counter)
                job.engine.begin(job.step, job.progress)
                job.readback.push(0, job.runner())
                job.readback.pop(leave=1)
                counter += job.config.batch
                done += 1
            job.readback.pop(leave=0)
    return (time.perf_counter() - start) / done


def _settled(job: Job) -> bool:
    """Read what is still under way; False when that sent the run back to an earlier step."""
    while measured := job.readback.pop(leave=0):
        if _look(job, *measured):
            return False
    return job.status == "running"


def _look(job: Job, step: int, values: list[float]) -> bool:
    """Judge the measurements of a step and log them; True when the run was sent back."""
    job.ring.measure(step, values)
    measured = dict(zip(job.runner.names, values, strict=True))
    rate = measured.pop("rate")
    if measured.pop("stop", 0.0):
        job.stop_together()
    if measured.pop("halted"):
        _on_not_finite(job, step, measured)
        return True
    job.last_loss = measured["loss"]
    if job.incidents.watch.spikes(job.last_loss, measured.get(job.system.lesson, 0.0)):
        limit = job.incidents.watch.limit()  # a roll-back forgets it
        answer = job.incidents.spike(step)
        _report(job, step, "spike", f"loss {job.last_loss:.4g} left its band (limit {limit:.4g})", answer, measured)
        if answer != "warn":
            return _send_back(job, answer, "diverged")
    if step % job.config.every.log == 0:
        _log(job, step, measured, rate)
    return False


def _on_not_finite(job: Job, step: int, measured: dict[str, float]) -> None:
    """The device has kept the state from before the bad step; decide how to go on from there."""
    job.readback.drop()
    behind = job.step - step
    job.step, job.items = step, job.items - behind * job.config.batch
    job.engine.halted.fill_(False)
    answer = job.incidents.not_finite()
    where = "loss" if not np.isfinite(measured["loss"]) else "gradient"
    what = f"the {where} is not finite"
    _report(job, step, "nonfinite", what, answer, measured)
    _keep_evidence(job, step, what, measured)
    if answer != "skip":
        _send_back(job, answer, "nan")


def _report(job: Job, step: int, kind: str, what: str, answer: str, measured: dict[str, float]) -> None:
    job.run.event(step, kind, what=what, answer=answer, **{k: spelled(v) for k, v in measured.items()})
    job.console.line(f"step {step}: {what}; {_ANSWERS[answer]}")
    job.console.line(f"  to see why: seedbed replay {job.run.name} {step}")
    _write_ring(job)


_ANSWERS = {
    "warn": "going on",
    "skip": "this batch is skipped, weights and moments are untouched",
    "rollback": "going back to the best checkpoint",
    "stop": "stopping",
}


def _keep_evidence(job: Job, step: int, what: str, measured: dict[str, float]) -> None:
    """Save the state from before the bad step, which the guard has kept: `replay` starts exactly there."""
    folder = job.run.path / "incidents"
    if job.ranks.tell(len(checkpoint.steps_in(folder))) >= MAX_INCIDENTS:
        return
    _end_save(job)
    facts = {"what": what, **{k: spelled(v) for k, v in measured.items()}}
    state = _state(job) | {"items": job.items - job.config.batch, "incident": facts}
    try:
        with job.clock.lap("save"):
            checkpoint.save(folder, step, job.engine.tensors(), state, job.part)
    except OSError as error:
        job.console.line(f"step {step}: the state before it could not be kept for replay ({error})")


def _write_ring(job: Job) -> None:
    if not job.ranks.is_first:
        return
    config = job.config
    facts = {"seed": config.seed, "batch": config.batch, "accum": config.accum, "total_items": job.total_items}
    try:
        job.ring.write(job.run.path / "ring.json", job.runner.names, **facts)
    except OSError as error:
        job.console.line(f"ring.json could not be written ({error}); training does not need it")


def _alarm(job: Job, step: int, found: list[Alarm]) -> None:
    """What the watchers saw, in the run's folder and before a person's eyes."""
    for alarm in found:
        words = {"what": alarm.what, "where": alarm.where, "why": alarm.why, "fix": alarm.fix}
        job.run.event(step, alarm.kind, **words, **alarm.facts)
        job.console.warn(f"step {step}: {alarm.what}")
        for word in ("where", "why", "fix"):
            job.console.line(f"  {word:<6} {words[word]}", style="yellow")


def _send_back(job: Job, answer: str, trouble: str) -> bool:
    """Restore the best checkpoint with its optimizer state and skip the data that led here; or stop, naming the trouble."""
    job.readback.drop()
    _end_save(job)
    folder = job.run.path / "checkpoints"
    found = _best_or_newest(job, folder) if answer == "rollback" else None
    if found is None:
        job.status = trouble
        if answer == "rollback":
            job.console.line("there is no checkpoint to go back to; stopping")
        return True
    counter, before = job.counter, job.step
    clock, incidents = job.clock, job.incidents.state()
    take_back(job, found)
    job.clock = clock
    job.incidents.load_state(incidents)
    job.skipped_items = counter - job.items
    forget_after(job, job.step)
    job.run.rewind(job.step, events=False)
    job.run.event(before, "rollback", to=job.step, skipped_items=job.skipped_items)
    job.console.line(f"rolled back {before} -> {job.step} ({job.incidents.num_rollbacks} of {job.config.guard.max_rollbacks})")
    return True


def forget_after(job: Job, step: int) -> None:
    """Remove checkpoints beyond `step`, once every rank has read what it needs."""
    job.ranks.meet()
    if job.ranks.is_first:
        checkpoint.forget_after(job.run.path / "checkpoints", step)
    job.ranks.meet()


def _best_or_newest(job: Job, folder: Path) -> checkpoint.Checkpoint | None:
    best = checkpoint.best(folder)
    name = job.ranks.tell(best.name if best else None)
    if name:
        try:
            return checkpoint.load(folder / name, job.part)
        except checkpoint.Damaged as problem:
            job.console.line(f"the best checkpoint is damaged: {problem}")
    return checkpoint.load_newest(folder, job.console.line, job.part)


# ---- instruments ---------------------------------------------------------------------------------------------------


def _log(job: Job, step: int, measured: dict[str, float], rate: float) -> None:
    items = job.items - (job.step - step) * job.config.batch
    progress = items / job.total_items
    meant = multiplier(job.config.schedule, progress)
    players = job.engine.optimizers.items()
    groups = {g.name if who == "main" else f"{who}.{g.name}": g.lr * meant for who, o in players for g in o.groups}
    row = {"step": step, **measured, "lr": next(iter(groups.values())), "lrs": groups, "items": items}
    if job.data.train.num_items:
        row["epoch"] = round(items / job.data.train.num_items, 4)
    row |= job.meter.read(items, job.clock["train"], job.feed.wait)
    job.run.row(row)
    job.console.step_row(row, last_step=job.num_steps)
    _keep_budget(job)
    seconds = job.clock["train"], job.feed.wait
    own = job.system.alarms(measured, progress)
    _alarm(job, step, job.watch.look(Point(step, job.num_steps, *seconds, measured["loss"], rate, progress), own))


def evaluate(job: Job) -> None:
    """The recipe's numbers on held-out data, with the averaged weights when there are any."""
    with job.clock.lap("eval"), job.engine.evaluating():
        numbers = job.ranks.tell(job.system.evaluate(job.data.valid, job.engine))
    value = next(iter(numbers.values()))
    improved = job.best is None or value < job.best
    if improved:
        job.best, job.best_step = value, job.step
    weights = "ema" if job.engine.ema else "live"
    job.run.event(job.step, "eval", **numbers, weights=weights, best=improved, seconds=job.clock["train"])
    job.console.evaluation(job.step, numbers, improved)
    with job.clock.lap("eval"):
        found = job.watch.evaluated(job.step, numbers, job.engine, job.feed, job.items / job.total_items)
    _alarm(job, job.step, found)
    if improved and job.step:
        _save(job, best=True)
    elif job.patience and job.status == "running":
        _be_patient(job)


def _be_patient(job: Job) -> None:
    """End a run whose evaluations have not improved for too long."""
    stale = (job.step - job.best_step) // job.config.every.eval
    if stale >= job.patience:
        test(job)
        sample(job)
        save(job)
        job.run.event(job.step, "early_stop", evaluations=stale, best_step=job.best_step)
        job.console.line(f"step {job.step}: {stale} evaluations without a better one; stopping early")
        job.status = "done"


def test(job: Job) -> None:
    """The recipe's numbers on the test part, where there is one: at the end, and without a say in what is best."""
    if job.data.test is None:
        return
    with job.clock.lap("eval"), job.engine.evaluating():
        numbers = job.ranks.tell(job.system.evaluate(job.data.test, job.engine))
    job.run.event(job.step, "test", **numbers, weights="ema" if job.engine.ema else "live")
    job.console.evaluation(job.step, numbers, improved=False, part="test")


def sample(job: Job) -> None:
    """What the model can do by now, for a person to look at."""
    folder = job.run.path / "samples"
    with job.clock.lap("sample"), job.engine.evaluating():
        if not job.ranks.is_first:
            return job.ranks.meet()
        folder.mkdir(exist_ok=True)
        shown = job.system.sample(Request(folder / f"step-{job.step:06d}"), job.engine)
        job.ranks.meet()
    names = [str(f.relative_to(job.run.path)) for f in shown.files]
    job.run.event(job.step, "sample", text=shown.text, files=names, **shown.facts)
    job.console.sample(job.step, shown.text, names)


def save(job: Job) -> None:
    """A checkpoint; a disk that is full or failing costs a warning, not the run."""
    _save(job, best=False)


def _save(job: Job, best: bool) -> bool:
    folder = job.run.path / "checkpoints"
    _end_save(job)
    if not best and job.ranks.tell((folder / checkpoint.folder_name(job.step)).exists()):
        return True
    if _is_spoiled(job):
        return False
    job.run.sync()
    if job.ranks.is_alone:
        with job.clock.lap("save"):
            return _saved(job, lambda: checkpoint.save(folder, job.step, job.engine.tensors(), _state(job)), best)
    with job.clock.lap("save"):
        job.saver.start(folder, job.step, job.engine.tensors(), _state(job), job.part, best)
    return True


def _is_spoiled(job: Job) -> bool:
    """Whether weights, moments or averages hold what no step recovers from; such a state is told of and never saved."""
    found = next((name for name in job.ranks.collect(job.engine.spoiled()) if name), "")
    if found:
        job.run.event(job.step, "spoiled", what=f"{found} is not finite")
        job.console.warn(f"step {job.step}: {found} is not finite; this state is not saved, the checkpoints before are whole")
    return bool(found)


def _end_save(job: Job) -> bool:
    """Wait for the checkpoint under way, if there is one, and tell how it ended; False when it could not be written."""
    if not job.saver.is_busy:
        return True
    with job.clock.lap("save"):
        return _saved(job, job.saver.result, job.saver.is_best)


def _saved(job: Job, write: Callable[[], Path], best: bool) -> bool:
    """A checkpoint is there, or is not: the folder and a person must know."""
    folder = job.run.path / "checkpoints"
    try:
        path = write()
        if job.ranks.is_first:
            if best:
                checkpoint.mark_best(folder, path)
            checkpoint.prune(folder, job.config.keep)
    except OSError as error:
        job.run.event(job.step, "save_failed", error=str(error))
        job.console.line(f"step {job.step}: no checkpoint could be written ({error}); the ones before are whole")
        return False
    job.run.event(checkpoint.step_of(path), "checkpoint", path=path.name, best=best)
    _set_status(job)
    return True


def _state(job: Job) -> dict[str, Any]:
    python, (kind, keys, *rest) = random.getstate(), np.random.get_state()
    return {
        "items": job.items,
        "skipped_items": job.skipped_items,
        "total_items": job.total_items,
        "planned_steps": job.config.steps,
        "best": job.best,
        "best_step": job.best_step,
        "incidents": job.incidents.state(),
        "clock": job.clock.state(),
        "system": job.system.state(),
        "data": job.data.facts.get("fingerprint", ""),
        "python_dice": [python[0], list(python[1]), python[2]],
        "numpy_dice": [kind, np.asarray(keys).tolist(), *rest],
    }


def take_back(job: Job, saved: checkpoint.Checkpoint) -> None:
    """Continue from a checkpoint: every tensor in place, every counter as it was."""
    state = saved.state
    have, want = job.data.facts.get("fingerprint", ""), state["data"]
    if have != want:
        raise UserError(f"the data has changed: this run was trained on {want}, the source now gives {have}")
    checkpoint.restore(job.engine.tensors(), saved.tensors, f"checkpoint {saved.path.name}")
    job.step, job.items, job.skipped_items = saved.step, state["items"], state["skipped_items"]
    job.total_items = state["total_items"]
    job.best, job.best_step = state["best"], state["best_step"]
    job.incidents.load_state(state["incidents"])
    job.clock = Stopwatch(saved=state["clock"])
    job.system.load_state(state["system"])
    version, numbers, gauss = state["python_dice"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy_dice"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


# ---- the end ---------------------------------------------------------------------------------------------------------


def _finish(job: Job) -> None:
    while job.status == "running" and not _settled(job):
        pass
    job.clock.pause()
    if job.status == "running" and _is_spoiled(job):
        job.status = "nan"
    if job.status == "running":
        if job.is_stopped:
            job.status = "interrupted"
            _save(job, best=False)
            _end_save(job)
        else:
            job.status = "done"
            evaluate(job)
            test(job)
            sample(job)
            if not (_save(job, best=False) and _end_save(job)):
                raise UserError("the run is finished but its last checkpoint could not be written; free some space and resume")
    _alarm(job, job.step, job.watch.end())
    job.run.event(job.step, "end", status=job.status)
    _set_status(job)


def _set_status(job: Job) -> None:
    numbers = {"step": job.step, "last_step": job.num_steps, "loss": job.last_loss, "best": job.best, "best_step": job.best_step}
    job.run.set_status(job.status, **numbers, clock=job.clock.state())


class _Stoppable(Protocol):
    stop_signal: int


def _catch_signals(job: _Stoppable) -> dict[int, Any]:
    """The first signal ends the run at the next step; a second Ctrl-C ends it at once."""

    def on_signal(number: int, _frame: Any) -> None:
        if job.stop_signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        job.stop_signal = number

    try:
        return {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    except ValueError:  # not in the main thread: the caller owns the signals
        return {}
