"""Turns a budget of training seconds into a number of steps: measured before the first step, adjusted at log points."""

import time

from seedbed.train.job import Job

# Seconds over which the steps of a budget are timed; log points correct the estimate.
TIMED = 0.3


def fix_length(job: Job) -> None:
    """Measure a step and set the run's length by it."""
    assert job.config.budget
    seconds = time_steps(job, TIMED)
    # A dry step skips the optimizer's writes, and a real run logs: leave a margin, so that the budget is kept.
    job.total_items = max(1, int(0.94 * job.config.budget / seconds)) * job.config.batch
    length = job.total_items // job.config.batch
    job.console.line(f"budget {job.config.budget:g} s at {seconds * 1e3:.2f} ms a step: {length:,} steps")
    job.run.event(job.step, "budget", seconds_per_step=seconds, steps=length)


def adjust_length(job: Job) -> None:
    """At a log point, correct the run's length by the measured time of a step.

    Slower steps shorten the run at any time; faster ones lengthen it in its first half only, before the learning rate decays.
    """
    assert job.config.budget
    job.pace.append((job.clock["train"], job.step))
    (since, first), (now, last) = job.pace[0], job.pace[-1]
    if last - first <= 0:
        return
    affordable = int(0.99 * (job.config.budget - now) * (last - first) / (now - since))
    steps, left = max(1, job.ranks.broadcast_object(affordable)), job.num_steps - job.step
    slower, faster = steps < 0.98 * left, steps > 1.1 * left and job.progress < 0.5
    if slower or faster:
        job.total_items = job.items + steps * job.config.batch
        job.console.line(f"steps have become {'slower' if slower else 'faster'}: the budget allows {job.num_steps:,} in all")
        job.run.event(job.step, "budget", seconds_per_step=(now - since) / (last - first), steps=job.num_steps)


def time_steps(job: Job, at_least: float) -> float:
    """Seconds per step, measured by at least this many seconds of dry steps; the primary rank's value on all ranks."""
    with job.engine.dry_run():
        for count in (2, 0):
            start, counter = time.perf_counter(), job.counter
            done = 0
            while done < (count or 400) and (
                count or done < 5 or job.ranks.broadcast_object(time.perf_counter() - start < at_least)
            ):
                job.stepper.feed.load(counter)
                job.engine.begin(job.step, job.progress)
                job.stepper.readback.push(0, job.stepper.runner())
                job.stepper.readback.pop(leave=1)
                counter += job.config.batch
                done += 1
            job.stepper.readback.pop(leave=0)
    return job.ranks.broadcast_object((time.perf_counter() - start) / done)
