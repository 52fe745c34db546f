"""Evaluations and samples of a run, with the averaged weights when there are any; early stopping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seedbed.train import checkpoint, saving
from seedbed.train.reporting import raise_alarms
from seedbed.train.system import Request, Sample

if TYPE_CHECKING:
    from seedbed.train.job import Job

if TYPE_CHECKING:
    from seedbed.data.feed import Source
    from seedbed.train.job import Job


def evaluate(job: Job) -> None:
    """The recipe's metrics on validation data; the best weights are saved, and a run without progress may stop early."""
    numbers = _numbers(job, job.data.valid)
    value = next(iter(numbers.values()))
    improved = job.best is None or value < job.best
    if improved:
        job.best, job.best_step = value, job.step
    job.run.event(job.step, "eval", **numbers, weights=_weights(job), best=improved, seconds=job.clock["train"])
    job.console.evaluation(job.step, numbers, improved)
    with job.clock.timer("eval"):
        found = job.watch.evaluated(job.step, numbers, job.engine, job.stepper.feed, job.items / job.total_items)
    raise_alarms(job, job.step, found)
    if improved and job.step:
        saving.save(job, best=True)
    elif job.patience and job.status == "running":
        _stop_early(job)


def test(job: Job) -> None:
    """The recipe's metrics on the test split, where there is one: at the end, without influence on what is best."""
    if job.data.test is not None:
        numbers = _numbers(job, job.data.test)
        job.run.event(job.step, "test", **numbers, weights=_weights(job))
        job.console.evaluation(job.step, numbers, improved=False, part="test")


def sample(job: Job) -> None:
    """Draw the recipe's sample for a person to look at."""
    with job.clock.timer("sample"), job.engine.evaluating():
        if not job.ranks.is_primary:
            return job.ranks.barrier()
        shown = _draw_sample(job)
        job.ranks.barrier()
    names = [str(f.relative_to(job.run.path)) for f in shown.files]
    job.run.event(job.step, "sample", text=shown.text, files=names, **shown.facts)
    job.console.sample(job.step, shown.text, names)


def _numbers(job: Job, source: Source) -> dict[str, float]:
    with job.clock.timer("eval"), job.engine.evaluating():
        return job.ranks.broadcast_object(job.system.evaluate(source, job.engine))


def _weights(job: Job) -> str:
    return "ema" if job.engine.ema else "live"


def _stop_early(job: Job) -> None:
    """Stop a run whose evaluations have not improved for too long."""
    stale = (job.step - job.best_step) // job.config.every.eval
    if stale >= job.patience:
        test(job)
        sample(job)
        saving.save(job)
        job.run.event(job.step, "early_stop", evaluations=stale, best_step=job.best_step)
        job.console.line(f"step {job.step}: {stale} evaluations without a better one; stopping early")
        job.status = "done"


def _draw_sample(job: Job) -> Sample:
    """The recipe's sample, in the run's folder; an empty one with the reason when it could not be written."""
    folder = job.run.locate() / "samples"
    try:
        folder.mkdir(exist_ok=True)
        return job.system.sample(Request(folder / checkpoint.folder_name(job.step)), job.engine)
    except OSError as error:
        job.console.warn(f"step {job.step}: no sample could be written ({error}); training goes on")
        return Sample(facts={"error": str(error)})
