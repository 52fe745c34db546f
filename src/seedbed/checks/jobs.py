"""The run's own job and sources, made small, for checks that need a whole loop or an evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seedbed.checks.case import CPU, Case, Recorder
from seedbed.config import override
from seedbed.data.feed import Source
from seedbed.errors import UserError
from seedbed.train.engine import Engine
from seedbed.train.loop import Job
from seedbed.train.system import Batch, Request, Sample, System

# Held-out rows that evaluation checks look at: enough for several batches, few enough to be quick.
NUM_ROWS = 400
NUM_TOKENS = 12

_MISSING: Any = object()


class Silent:
    """Takes whatever a loop tells a person or a run folder, and keeps nothing but the rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.name, self.rows = path, "check", []

    def row(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def new_job(case: Case, *assignments: str, folder: Path | None = None, seed: int | None = None) -> Job:
    """The run's own job on the small config, on a small held-out part, writing below `folder`."""
    config = override(case.small, ["batch=4", "accum=1", "budget=none", *assignments])
    system = case.fresh_system(seed)
    data = dataclasses.replace(case.data, valid=small_source(case.data.valid))
    quiet: Any = Silent(folder or Path("nowhere"))
    return Job(run=quiet, config=config, system=system, data=data, engine=Engine(system, config, CPU), console=quiet)


def small_source(source: Source, first: int = 0, num_rows: int = NUM_ROWS) -> Source:
    """A source like this one over fewer rows: made by its own constructor where its arguments can be found again."""
    longest = max((len(a) for a in source.arrays.values()), default=0)
    if longest <= num_rows:
        return source
    names = [p for p in inspect.signature(type(source).__init__).parameters.values() if p.name != "self"]
    given: dict[str, Any] = {}
    for name in names:
        value = getattr(source, name.name, getattr(source, f"_{name.name}", _MISSING))
        if value is _MISSING:
            if name.default is inspect.Parameter.empty:
                return source
            continue
        is_rows = isinstance(value, np.ndarray) and any(value is a for a in source.arrays.values())
        given[name.name] = value[first : first + num_rows] if is_rows else value
    try:
        return type(source)(**given)
    except Exception:  # whatever a stranger's constructor minds: then the whole source it is
        return source


class _Enough(Exception):
    """Stops a sample once its options are known."""


def known_options(engine: Engine) -> dict[str, Any]:
    """The options that the recipe's sample reads, found by letting it ask for them."""
    seen: dict[str, Any] = {}

    class Spy(Request):
        def read(self, **defaults: Any) -> dict[str, Any]:
            seen.update(defaults)
            raise _Enough

    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(_Enough), engine.evaluating():
        engine.system.sample(Spy(Path(scratch)), engine)
    return seen


def shorten_samples(engine: Engine) -> None:
    """Let the system's samples be a few tokens long, where it counts tokens and has some to give."""
    real = engine.system.sample
    if "tokens" not in known_options(engine):
        return

    def sample(request: Request, engine: Engine) -> Sample:
        try:
            return real(Request(request.folder, {"tokens": NUM_TOKENS, **request.options}, request.write), engine)
        except UserError:
            return real(request, engine)

    engine.system.sample = sample  # type: ignore[method-assign]


def roll_all_dice(seed: int) -> None:
    """Move every global generator on, as an evening of other work would."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def loss_now(case: Case, system: System, batch: Batch) -> float:
    """The training loss with the dice as they lie, changing nothing."""
    kept = {n: b.clone() for n, b in system.named_buffers()}
    recorder = Recorder(system, case.small, CPU)
    recorder.variant = system.variant(0, case.small.steps)
    system.update(batch, recorder)
    for name, buffer in system.named_buffers():
        buffer.copy_(kept[name])
    return float(sum(v.detach() for v in recorder.norms.values()))
