"""Jobs for benchmarks: any preset, alone or as a pack, ready to step, in run folders that go away; and clocks for steps."""

import contextlib
import gc
import io
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from seedbed import config as configs
from seedbed.launch import local, trials
from seedbed.recipes import find
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train import loop
from seedbed.train.stepper import build
from seedbed.train.system import describe, flops_per_item
from seedbed.tune.packing.pack import Pack


@contextlib.contextmanager
def open_job(name: str, *assignments: str) -> Iterator[loop.Job]:
    """A job for `seedbed train NAME ASSIGNMENTS`, compiled and captured as that would be, silent."""
    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), list(assignments))
    with tempfile.TemporaryDirectory() as folder, local.ranks_of(config) as ranks:
        run = Run.create(Path(folder), recipe.name, preset, config, name="bench", code={}, base=config)
        console = Console(stream=io.StringIO())
        data = recipe.open_data(config)
        engine = build(recipe, config, data, ranks=ranks)
        job = loop.Job(run=run, config=config, system=engine.system, data=data, engine=engine, console=console)
        try:
            loop.warm_up(job)
            job.clock.start("train")
            yield job
        finally:
            job.stepper.close()
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
    loop.take_step(job)
    result = job.stepper.pop_result()
    assert result is None or loop.accept_step(job, result), "a benchmark step was not finite"


def _wait(job: loop.Job) -> None:
    loop.settle(job)
    if job.engine.device.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, settings: list[str], num_steps: int) -> dict[str, Any]:
    """A preset on CUDA as one row: speed, memory, how it ran, MFU. What cannot run is a row too."""
    torch.cuda.reset_peak_memory_stats()
    try:
        with open_job(name, *settings) as job:
            seconds = time_steps(job, num_steps)
            row: dict[str, Any] = {
                "ms": round(seconds * 1e3, 3),
                "items_per_s": job.config.batch / seconds,
                "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                "how": job.stepper.runner.how,
                "compile_s": round(job.clock["compile"], 1),
                "loss": round(job.last_loss, 4),
            }
            row |= {k: v for k, v in describe(job.system).items() if "attention" in k}
            flops = flops_per_item(job.system) * job.config.batch / seconds
            row["mfu"] = (
                {"nominal": flops / job.meter.nominal, "measured": flops / job.meter.measured} if job.meter.nominal else None
            )
    except Exception as error:
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}"[:300]}
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return row


@contextlib.contextmanager
def open_pack(name: str, num: int, *assignments: str) -> Iterator[Pack]:
    """`num` runs of one preset that differ in seed and rate, as one pack, compiled and captured as a sweep's would be."""
    recipe, preset = find(name)
    base = configs.override(recipe.preset(preset), list(assignments))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs = []
        for k in range(num):
            config = configs.override(base, [f"seed={k + 1}", f"optim.lr={base.optim.lr * (1 - k / (2 * num))}"])
            runs.append(Run.create(Path(folder), recipe.name, preset, config, name=f"bench{k}", code={}, base=base))
        pack = trials.as_pack([trials.open_quietly(run, stack) for run in runs])
        try:
            pack.prepare()
            for job in pack.jobs:
                job.clock.start("train")
            yield pack
        finally:
            for job in pack.jobs:
                job.stepper.feed.close()
                job.run.close()


def time_pack(pack: Pack, num_steps: int) -> float:
    """Seconds per step of all trials together, the reading and judging of every trial's measurements included."""
    for count in (2, num_steps):
        start = time.perf_counter()
        for _ in range(count):
            pack.take_step()
            pack.read_results(leave=1)
        pack.read_results(leave=0)
        if pack.stack.device.type == "cuda":
            torch.cuda.synchronize()
    assert len(pack.training) == len(pack.trials), "a trial ended while it was timed"
    return (time.perf_counter() - start) / num_steps
