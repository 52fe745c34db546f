"""Trains several runs as one stacked model. Each run writes its own folder, as if it trained alone."""

import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from seedbed.launch.local import Launch, close_job, open_job, saved_config
from seedbed.track.clocks import Stopwatch
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train.capabilities import packable
from seedbed.train.job import Job
from seedbed.tune.packing.pack import Pack, fit_pack


def train_packed(runs: Sequence[Run], *, patience: int = 0, on_status: Callable[[Job], None] | None = None) -> dict[str, str]:
    """Train locked run folders of one recipe as one pack. Returns the final status of each run by name.

    Runs that were started before resume from their newest checkpoint. Console output goes to console.log only.
    """
    jobs: list[Job] = []

    def on_end(job: Job) -> None:
        if job.status not in ("running", "failed"):
            job.run.close()
            close_job(job, job.status)
        if on_status:
            on_status(job)

    with ExitStack() as stack:
        try:
            for run in runs:
                jobs.append(open_quietly(run, stack))
            return fit_pack(as_pack(jobs), patience, on_end)
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
    """A text stream that discards everything."""

    def write(self, text: str) -> int:
        return len(text)


def open_quietly(run: Run, stack: ExitStack) -> Job:
    """The job of a run folder, without terminal output; `stack` closes its files."""
    console = stack.enter_context(closing(Console(run.path / "console.log", stream=_Nowhere())))
    recipe, config = saved_config(run)
    begun = bool(run.status())
    run.set_status("running")
    return open_job(Launch(run, recipe, config, console, resumed=begun, clock=Stopwatch()), recipe.open_data(config))


def as_pack(jobs: list[Job]) -> Pack:
    """The pack of these jobs, with the system of their padded config."""
    recipe, _ = saved_config(jobs[0].run)
    padded_config = packable(jobs[0].system).padded_config([job.config for job in jobs])
    template = recipe.build(padded_config, recipe.open_data(padded_config))
    return Pack(jobs, template.to(jobs[0].engine.device))
