"""Small versions of the run's job and sources, for checks that need a whole loop or an evaluation."""

import dataclasses
import inspect
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seedbed.checks.subject import CPU, Recorder, Subject
from seedbed.config import override
from seedbed.data.feed import Source
from seedbed.errors import UserError
from seedbed.train import loop
from seedbed.train.engine import Engine
from seedbed.train.job import Job
from seedbed.train.options import options_of
from seedbed.train.system import Batch, Request, Sample, System

# Held-out rows of evaluation checks: enough for several batches, few enough to be quick.
NUM_ROWS = 400
NUM_TOKENS = 12
# The size of a sample where only its mode and side effects matter.
SHORT = {"tokens": NUM_TOKENS, "steps": 8, "num": 8}


def new_job(subject: Subject, *assignments: str, folder: Path | None = None, seed: int | None = None) -> Job:
    """The run's job on the small config and a small held-out set, writing below `folder`."""
    config = override(subject.small, ["batch=4", "accum=1", "budget=none", *assignments])
    system = subject.fresh_system(seed)
    data = dataclasses.replace(subject.data, valid=small_source(subject.data.valid))
    if folder is not None:
        folder.mkdir(exist_ok=True)
    quiet: Any = NullRun(folder or Path("nowhere"))
    return Job(run=quiet, config=config, system=system, data=data, engine=Engine(system, config, CPU), console=quiet)


def take_steps(job: Job, num: int) -> None:
    """Steps as the loop takes them, without reading their results."""
    for _ in range(num):
        loop.take_step(job)
    job.stepper.readback.drop()


class NullRun:
    """Accepts everything a loop writes to console or run folder, and keeps only the rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.name, self.rows, self.listeners = path, "check", [], []

    def row(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    def locate(self) -> Path:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def small_source(source: Source, first: int = 0, num_rows: int = NUM_ROWS) -> Source:
    """A source like this one over fewer rows, made by its own constructor where its arguments are known."""
    longest = max((len(a) for a in source.arrays.values()), default=0)
    if longest <= num_rows:
        return source
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(source)).parameters.items():
        value = getattr(source, name, getattr(source, f"_{name}", parameter.default))
        if value is inspect.Parameter.empty:
            return source
        is_rows = isinstance(value, np.ndarray) and any(value is a for a in source.arrays.values())
        given[name] = value[first : first + num_rows] if is_rows else value
    try:
        return type(source)(**given)
    except Exception:  # the constructor may raise anything: then the whole source is used
        return source


def evaluate(engine: Engine, source: Source) -> dict[str, float]:
    """The numbers of the recipe's evaluation."""
    with engine.evaluating():
        return engine.system.evaluate(source, engine)


def sample_options(engine: Engine) -> dict[str, Any]:
    """The options that the recipe's sample reads, with their defaults."""
    return {name: one.default for name, one in options_of(engine.system.sample_options).items()}


def short_options(engine: Engine) -> dict[str, int]:
    """Options that make a sample short."""
    known = sample_options(engine)
    return {name: most for name, most in SHORT.items() if isinstance(known.get(name), int) and known[name] > most}


def shorten_samples(engine: Engine) -> None:
    """Makes the samples of a system short."""
    real, short = engine.system.sample, short_options(engine)
    if not short:
        return

    def sample(request: Request, engine: Engine) -> Sample:
        try:
            return real(Request(request.folder, {**short, **request.options}, request.write), engine)
        except UserError:
            return real(request, engine)

    engine.system.sample = sample  # type: ignore[method-assign]


def advance_global_rng(seed: int) -> None:
    """Advances every global random generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def loss_now(subject: Subject, system: System, batch: Batch, variant: Any = None) -> float:
    """The training loss with the current random state, changing nothing; of the first step variant unless another is given."""
    kept = {n: b.clone() for n, b in system.named_buffers()}
    recorder = Recorder(system, subject.small, CPU)
    recorder.variant = system.variant(0, subject.small.steps) if variant is None else variant
    system.update(batch, recorder)
    for name, buffer in system.named_buffers():
        buffer.copy_(kept[name])
    return float(sum(v.detach() for v in recorder.norms.values()))
