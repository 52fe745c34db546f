"""What a run reports: rows and alarms at its log points, evaluations and samples between steps, its status and last steps."""

from seedbed.data.feed import Source
from seedbed.track.events import is_score
from seedbed.train import checkpoint, saving, stepper
from seedbed.train.job import Job
from seedbed.train.optim import multiplier
from seedbed.train.stepper import StepResult
from seedbed.train.system import Request, Sample, alarms, maximized
from seedbed.train.watch import Alarm, Point


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


def evaluate(job: Job) -> None:
    """The recipe's metrics on validation data; the best weights are saved, and a run without progress may stop early."""
    numbers = _numbers(job, job.data.valid)
    (metric, value), higher = next(iter(numbers.items())), maximized(job.system, numbers)
    if job.best is None:
        if is_score(metric) and metric not in higher:
            from seedbed.train.recipe_mistakes import refuse_score

            refuse_score(metric)
        job.run.set_status(job.status, metric=metric, higher_is_better=metric in higher)
    improved = job.best is None or (value > job.best if metric in higher else value < job.best)
    if improved:
        job.best, job.best_step = value, job.step
    goals = {"higher_is_better": higher} if higher else {}
    job.run.event(job.step, "eval", **numbers, weights=_weights(job), best=improved, seconds=job.clock["train"], **goals)
    job.console.evaluation(job.step, numbers, improved)
    with job.clock.timer("eval"):
        found = job.watch.evaluated(job.step, numbers, job.engine, job.stepper.feed, job.items / job.total_items)
    raise_alarms(job, job.step, found)
    if improved and job.step:
        saving.save(job, best=True)
    elif job.patience and job.status == "running":
        from seedbed.train.early_stop import stop_early

        stop_early(job)


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


def _draw_sample(job: Job) -> Sample:
    """The recipe's sample, in the run's folder; an empty one with the reason when it could not be written."""
    folder = job.run.locate() / "samples"
    try:
        folder.mkdir(exist_ok=True)
        return job.system.sample(Request(folder / checkpoint.folder_name(job.step)), job.engine)
    except OSError as error:
        job.console.warn(f"step {job.step}: no sample could be written ({error}); training goes on")
        return Sample(facts={"error": str(error)})
