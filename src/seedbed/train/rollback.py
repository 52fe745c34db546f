"""Incidents of a run: non-finite steps and loss spikes are reported, kept for replay, skipped or rolled back."""

from math import isfinite
from pathlib import Path

from seedbed.track.changes import rewind
from seedbed.train import checkpoint, checkpoint_loading, progress, saving
from seedbed.train.guard import Incidents
from seedbed.train.job import Job
from seedbed.train.reporting import write_history
from seedbed.train.stepper import StepResult, format_number

# How many states from before bad steps a run keeps for `replay`; each is as large as a checkpoint.
MAX_INCIDENTS = 3
_ANSWERS = {
    "warn": "going on",
    "skip": "this batch is skipped, weights and moments are untouched",
    "rollback": "going back to the best checkpoint",
    "stop": "stopping",
}


def on_nonfinite(job: Job, result: StepResult) -> None:
    """Decide how to continue after a non-finite step; the device still has the state from before it."""
    job.stepper.readback.drop()
    job.step, job.items = result.step, job.items_at(result.step)
    job.engine.halted.fill_(False)
    answer = answer_to_nonfinite(job.incidents)
    what = f"the {'gradient' if isfinite(result.loss) else 'loss'} is not finite"
    _report(job, result, "nonfinite", what, answer)
    _keep_evidence(job, result, what)
    if answer != "skip":
        go_back(job, answer, "nan")


def on_spike(job: Job, result: StepResult) -> bool:
    """Report a loss spike; True when training continues from the present state."""
    limit = job.incidents.watch.limit()  # a roll-back resets it
    answer = answer_to_spike(job.incidents, result.step)
    _report(job, result, "spike", f"loss {result.loss:.4g} left its band (limit {limit:.4g})", answer)
    if answer != "warn":
        go_back(job, answer, "diverged")
    return answer == "warn"


def answer_to_nonfinite(incidents: Incidents) -> str:
    """What to do about a non-finite step: "skip", "rollback" or "stop"."""
    incidents.num_skips += 1
    if incidents.guard.policy == "stop" or (incidents.guard.policy == "skip" and incidents.num_skips > incidents.guard.max_skips):
        return "stop"
    return "skip" if incidents.num_skips <= incidents.guard.max_skips else _roll_back(incidents)


def answer_to_spike(incidents: Incidents, step: int) -> str:
    """What to do about a spike: "warn", and "rollback" at the third within 50 steps."""
    incidents.spikes.append(step)
    crowded = len(incidents.spikes) == 3 and incidents.spikes[-1] - incidents.spikes[0] < 50
    return _roll_back(incidents) if crowded and incidents.guard.policy == "rollback" else "warn"


def _roll_back(incidents: Incidents) -> str:
    incidents.num_rollbacks += 1
    incidents.num_skips = 0
    incidents.spikes.clear()
    incidents.watch.restart()
    return "rollback" if incidents.num_rollbacks <= incidents.guard.max_rollbacks else "stop"


def go_back(job: Job, answer: str, trouble: str) -> None:
    """Restore the best checkpoint with its optimizer state and skip the data that led here; or stop with an error."""
    job.stepper.readback.drop()
    saving.end_save(job)
    found = _best_or_newest(job, job.run.path / "checkpoints") if answer == "rollback" else None
    if found is None:
        job.status = trouble
        if answer == "rollback":
            job.console.line("there is no checkpoint to go back to; stopping")
        return
    counter, before = job.counter, job.step
    incidents = job.incidents.state()
    progress.restore(job, found)
    job.incidents.load_state(incidents)
    job.skipped_items = counter - job.items
    forget_after(job, job.step)
    if job.ranks.is_primary:
        rewind(job.run, job.step, events=False)
    job.run.event(before, "rollback", to=job.step, skipped_items=job.skipped_items)
    job.console.line(f"rolled back {before} -> {job.step} ({job.incidents.num_rollbacks} of {job.config.guard.max_rollbacks})")


def _report(job: Job, result: StepResult, kind: str, what: str, answer: str) -> None:
    measured = {name: format_number(value) for name, value in result.measured.items()}
    job.run.event(result.step, kind, what=what, answer=answer, **measured)
    job.console.line(f"step {result.step}: {what}; {_ANSWERS[answer]}")
    job.console.line(f"  to see why: seedbed replay {job.run.name} {result.step}")
    write_history(job)


def _keep_evidence(job: Job, result: StepResult, what: str) -> None:
    """Save the state from before the bad step, for `replay`."""
    folder = job.run.locate() / "incidents"
    if job.ranks.broadcast_object(len(checkpoint.steps_in(folder))) >= MAX_INCIDENTS:
        return
    saving.end_save(job)
    facts = {"what": what, **{name: format_number(value) for name, value in result.measured.items()}}
    state = saving.Progress.of(job).to_json() | {"items": job.items - job.config.batch, "incident": facts}
    try:
        with job.clock.timer("save"):
            checkpoint.save(folder, result.step, job.engine.tensors(), state, job.part)
    except OSError as error:
        job.console.line(f"step {result.step}: the state before it could not be kept for replay ({error})")


def _best_or_newest(job: Job, folder: Path) -> checkpoint_loading.Checkpoint | None:
    best = checkpoint.best(folder)
    name = job.ranks.broadcast_object(best.name if best else None)
    if name:
        try:
            return checkpoint_loading.load(folder / name, job.part)
        except checkpoint_loading.Damaged as problem:
            job.console.line(f"the best checkpoint is damaged: {problem}")
    return checkpoint_loading.load_newest(folder, job.console.line, job.part)


def forget_after(job: Job, step: int) -> None:
    """Remove checkpoints beyond `step`, once every rank has read what it needs."""
    job.ranks.barrier()
    if job.ranks.is_primary:
        checkpoint.forget_after(job.run.path / "checkpoints", step)
    job.ranks.barrier()
