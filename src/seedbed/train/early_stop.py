"""Early stopping, where a run has a patience."""

from seedbed.train import saving
from seedbed.train.job import Job
from seedbed.train.reporting import sample, test


def stop_early(job: Job) -> None:
    """Stop a run whose evaluations have not improved for too long."""
    stale = (job.step - job.best_step) // job.config.every.eval
    if stale >= job.patience:
        test(job)
        sample(job)
        saving.save(job)
        job.run.event(job.step, "early_stop", evaluations=stale, best_step=job.best_step)
        job.console.line(f"step {job.step}: {stale} evaluations without a better one; stopping early")
        job.status = "done"
