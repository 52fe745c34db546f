"""The training loop: take a step, read the result of the previous one, accept it or not, and run the actions that are due."""

from seedbed.errors import UserError
from seedbed.train import saving
from seedbed.train.engine import cpu_threads
from seedbed.train.guard import catch_signals, explain_oom, gc_collect, gc_paused, restore_signals, retry_on_oom, stall_watchdog
from seedbed.train.job import Action, Job
from seedbed.train.reporting import evaluate, log_step, raise_alarms, sample, set_status, test, write_history
from seedbed.train.stepper import StepResult


def fit(job: Job) -> str:
    """Train until the last step, a signal or an incident that ends the run; returns the run's status."""
    handlers = catch_signals(job)
    try:
        with cpu_threads(job.system.num_cpu_threads):
            retry_on_oom(job, warm_up)
            with gc_paused(), stall_watchdog(job), explain_oom(job):
                set_status(job)
                job.meter.start(job.items, job.clock["train"], job.stepper.feed.wait)
                job.clock.start("train")
                _train(job)
                finish(job)
    finally:
        if job.ranks.is_single:
            saving.end_save(job)  # after an error too: measurements are kept
        write_history(job)
        job.stepper.close()
        restore_signals(handlers)
    return job.status


def _train(job: Job) -> None:
    todo = actions(job)
    while job.status == "running" and not job.is_stopped:
        last_step = job.num_steps  # later variants of a step may be slower
        if job.step >= last_step:
            if settle(job):
                break
            continue
        retry_on_oom(job, take_step)
        result = job.stepper.pop_result(lag=1)
        if result and not accept_step(job, result):
            continue
        for action in todo:
            if action.due(job.step) and job.step < last_step and settle(job):
                action.run(job)
                gc_collect()


def actions(job: Job) -> list[Action]:
    """What is done between steps, in this order; a recipe adds its own."""
    every = job.config.every
    return [Action(every.eval, evaluate), Action(every.sample, sample), Action(every.save, saving.save), *job.system.actions]


def take_step(job: Job) -> None:
    """Start the next step; its result is read one step later."""
    if job.saver and job.saver.is_over:
        saving.end_save(job)
    job.engine.wants_stop = bool(job.stop_signal)
    job.stepper.load(job.step, job.counter, job.num_steps)
    job.step_history.add(job.step + 1, job.counter, job.items, job.engine.variant)
    job.stepper.run(job.step, job.progress)
    job.step += 1
    job.items += job.config.batch


def accept_step(job: Job, result: StepResult) -> bool:
    """Check and log the result of a step; False when it rolled the run back or ended it."""
    job.step_history.record(result)
    if result.stop:
        job.stop_together()
    if result.halted:
        from seedbed.train import rollback

        rollback.on_nonfinite(job, result)
        return False
    job.last_loss = result.loss
    spikes = job.incidents.watch.spikes(result.loss, result.metrics.get(job.system.stage_metric, 0.0))
    if spikes or job.incidents.watch.far:
        from seedbed.train import outliers

        if not outliers.accept(job, result):
            return False
    if result.step % job.config.every.log == 0:
        log_step(job, result)
    return True


def settle(job: Job) -> bool:
    """Read the outstanding results; False when one of them rolled the run back or ended it."""
    while result := job.stepper.pop_result(lag=0):
        if not accept_step(job, result):
            return False
    return job.status == "running"


def warm_up(job: Job) -> None:
    """Compile and capture before the clock starts; with a time budget, measure a step and set the run's length by it."""
    job.engine.variant = job.system.variant(job.step, job.num_steps)
    with job.clock.timer("compile"):
        job.stepper.feed.load(job.counter)
        job.engine.begin(job.step, job.progress)
        if job.stepper.runner.is_undecided:
            from seedbed.train import compile_choice

            compile_choice.decide(job)
        else:
            job.stepper.runner.prepare()
        if job.config.budget and job.step == 0:
            from seedbed.train import budget

            budget.fix_length(job)
    job.console.detail(f"step: {job.stepper.runner.how}; data: {job.stepper.feed.describe()}")


def finish(job: Job) -> None:
    """The last evaluation, test, sample and checkpoint of a completed run; a checkpoint of an interrupted one."""
    while job.status == "running" and not settle(job):
        pass
    job.clock.pause()
    if job.status == "running" and saving.is_spoiled(job):
        job.status = "nan"
    if job.status == "running":
        if job.is_stopped:
            job.status = "interrupted"
            saving.save_last(job)
        else:
            job.status = "done"
            evaluate(job)
            test(job)
            saving.save(job)  # written beside the sampling where saves are asynchronous
            sample(job)
            for action in job.system.actions:
                action.run(job)
            if not saving.save_last(job):
                raise UserError("the run is finished but its last checkpoint could not be written; free some space and resume")
    raise_alarms(job, job.step, job.watch.end())
    job.run.event(job.step, "end", status=job.status, **({"wall": job.run.wall()} if job.run.wall else {}))
    set_status(job)
