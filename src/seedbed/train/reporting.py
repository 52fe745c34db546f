"""What a run writes at its log points: rows, console lines, alarms, its status and the history of its last steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seedbed.train import stepper
from seedbed.train.optim import multiplier
from seedbed.train.system import alarms
from seedbed.train.watch import Alarm, Point

if TYPE_CHECKING:
    from seedbed.train.job import Job
    from seedbed.train.stepper import StepResult


def log_step(job: Job, result: StepResult) -> None:
    """Write a row of measurements, and raise the alarms that follow from it."""
    items = job.items_at(result.step)
    progress = items / job.total_items
    factor = multiplier(job.config.schedule, progress, result.step)
    optimizers = job.engine.optimizers.items()
    lrs = {g.name if name == "main" else f"{name}.{g.name}": g.lr * factor for name, o in optimizers for g in o.groups}
    row = {"step": result.step, **result.measured, "lr": next(iter(lrs.values())), "lrs": lrs, "items": items}
    if job.data.train.num_items:
        row["epoch"] = round(items / job.data.train.num_items, 4)
    row |= job.meter.read(items, job.clock["train"], job.stepper.feed.wait)
    job.run.row(row)
    job.console.step_row(row, last_step=job.num_steps)
    if job.config.budget:
        from seedbed.train import budget

        budget.adjust_length(job)
    seconds = job.clock["train"], job.stepper.feed.wait
    point = Point(result.step, job.num_steps, *seconds, result.loss, result.lr_factor, progress)
    raise_alarms(job, result.step, job.watch.look(point, alarms(job.system, result.measured, progress)))


def raise_alarms(job: Job, step: int, found: list[Alarm]) -> None:
    """Report alarms as events and on the console."""
    for alarm in found:
        words = {"what": alarm.what, "where": alarm.where, "why": alarm.why, "fix": alarm.fix}
        job.run.event(step, alarm.kind, **words, **alarm.facts)
        job.console.warn(f"step {step}: {alarm.what}")
        for word in ("where", "why", "fix"):
            job.console.line(f"  {word:<6} {words[word]}", style="yellow")


def set_status(job: Job) -> None:
    numbers = {"step": job.step, "last_step": job.num_steps, "loss": job.last_loss, "best": job.best, "best_step": job.best_step}
    job.run.set_status(job.status, **numbers, clock=job.clock.state())


def write_history(job: Job) -> None:
    """Write the history of the last steps, for `replay`."""
    if not job.ranks.is_primary:
        return
    facts = {"seed": job.config.seed, "batch": job.config.batch, "accum": job.config.accum, "total_items": job.total_items}
    try:
        job.step_history.write(job.run.path, **facts)
    except OSError as error:
        job.console.line(f"{stepper.HISTORY_FILE} could not be written ({error}); training does not need it")
