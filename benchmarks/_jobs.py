"""Jobs for benchmarks: any preset, ready to step, in a run folder that goes away; and a clock for its steps."""

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from seedbed import config as configs
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train import loop


@contextlib.contextmanager
def open_job(name: str, *assignments: str) -> Iterator[loop.Job]:
    """A job for `seedbed train NAME ASSIGNMENTS`, compiled and captured as that would be, silent."""
    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), list(assignments))
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder), recipe.name, preset, config, name="bench", code={}, base=config)
        console = Console(stream=io.StringIO())
        data = recipe.open_data(config)
        engine, system = local._build(recipe, config, data)
        job = loop.Job(run=run, config=config, system=system, data=data, engine=engine, console=console)
        try:
            loop._warm_up(job)
            job.clock.start("train")
            yield job
        finally:
            job.feed.close()
            run.close()


def time_steps(job: loop.Job, num_steps: int) -> float:
    """Seconds per step over real steps, the loop's own reading of measurements included."""
    for _ in range(3):
        _step(job)
    _wait(job)
    start = time.perf_counter()
    for _ in range(num_steps):
        _step(job)
    _wait(job)
    return (time.perf_counter() - start) / num_steps


def _step(job: loop.Job) -> None:
    loop._take_step(job)
    measured = job.readback.pop(leave=1)
    assert not (measured and loop._look(job, *measured)), "a benchmark step was not finite"


def _wait(job: loop.Job) -> None:
    loop._settled(job)
    if job.engine.device.type == "cuda":
        torch.cuda.synchronize()
