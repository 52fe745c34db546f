"""Runs on this machine that train together as one stacked model; each ends as it would have ended alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from seedbed.launch.local import close_job, open_job, saved_config
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train.loop import Job
from seedbed.train.pack import Pack, fit_pack


def train_packed(runs: Sequence[Run], *, patience: int = 0, tell: Callable[[Job], None] | None = None) -> dict[str, str]:
    """Train run folders of one recipe, which the caller has locked, as one pack; the names of the runs with their statuses.

    A run that was begun before goes on from its newest checkpoint. What a run says goes to its console.log only.
    """
    jobs: list[Job] = []

    def told(job: Job) -> None:
        if job.status not in ("running", "failed"):
            job.run.close()
            close_job(job, job.status)
        if tell:
            tell(job)

    with ExitStack() as stack:
        try:
            for run in runs:
                jobs.append(open_quietly(run, stack))
            return fit_pack(as_pack(jobs), patience, told)
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            ended = {job.run.name for job in jobs if job.status != "running"}
            for run in runs:
                if run.name not in ended:
                    run.set_status(status, error=str(error)[:500])
            raise
        finally:
            for run in runs:
                run.close()


class _Nowhere(io.StringIO):
    """A stream for what nobody reads: the screens of many runs at once."""

    def write(self, text: str) -> int:
        return len(text)


def open_quietly(run: Run, stack: ExitStack) -> Job:
    """A run folder as a job that tells nothing to the screen; `stack` closes what is open."""
    console = stack.enter_context(closing(Console(run.path / "console.log", stream=_Nowhere())))
    recipe, config = saved_config(run)
    begun = bool(run.status())
    run.set_status("running")
    return open_job(run, recipe, config, recipe.open_data(config), console, resumed=begun)


def as_pack(jobs: list[Job]) -> Pack:
    """Jobs of one recipe, and the system whose shapes hold all of them."""
    recipe, _ = saved_config(jobs[0].run)
    envelope = jobs[0].system.envelope([job.config for job in jobs])
    template = recipe.build(envelope, recipe.open_data(envelope))
    return Pack(jobs, template.to(jobs[0].engine.device))
