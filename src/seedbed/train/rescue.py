"""Out of memory in a step: the micro-batch shrinks, the accumulation grows, the same step is taken again, and it is recorded.

The gradient is that of the same whole batch, summed in more parts. Nothing is retried once an optimizer has begun to write.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from seedbed.errors import UserError

if TYPE_CHECKING:
    from seedbed.train.loop import Job


def surviving(job: Job, act: Callable[[Job], None]) -> None:
    """Run `act(job)`; whenever memory runs out in it, again with smaller micro-batches."""
    while True:
        try:
            return act(job)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error).strip().partition("\n")[0]
        # Outside the handler: the error held on to every tensor of the failed step.
        _shrink(job, problem)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host's allocator, had no memory left to give."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextlib.contextmanager
def explaining(job: Job) -> Iterator[None]:
    """Want of memory beside the steps, where smaller parts do not help, ends the run with words on what does."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        problem = str(error).strip().partition("\n")[0]
        raise UserError(
            f"out of memory after step {job.step}, while evaluating, sampling or saving ({problem})\n"
            f"go on with less of that: seedbed resume {job.run.name} every.sample=0, or with a smaller batch"
        ) from None


def _shrink(job: Job, problem: str) -> None:
    config, engine = job.config, job.engine
    size = config.batch // config.accum
    parts = config.accum * _smallest_factor(size)
    if size == 1:
        raise UserError(
            f"out of memory at step {job.step + 1} with one item at a time ({problem})\n"
            "make the model or its items smaller, or set recompute=full or precision=bf16"
        )
    if engine.touched or job.num_ranks > 1:
        why = "in the middle of an update" if engine.touched else "on one of several ranks"
        raise UserError(
            f"out of memory at step {job.step + 1}, {why} ({problem})\n"
            f"go on from the last checkpoint with smaller micro-batches: seedbed resume {job.run.name} accum={parts}"
        )
    engine.abandon()
    job.config = engine.config = replace(config, accum=parts)
    job.runner.forget()
    job.feed.divide(parts)
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    _record(job, config.batch // parts, problem)


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, number) if number % n == 0), number)


def _record(job: Job, size: int, problem: str) -> None:
    """In the events, in config.json, so that a resumed run starts where this one had to go, and on the screen."""
    facts = {"accum": job.config.accum, "micro_batch": size, "batch": job.config.batch}
    job.run.event(job.step + 1, "out_of_memory", what=problem, **facts)
    try:
        job.run.change_config(job.config)
    except (OSError, UserError) as error:
        job.console.line(f"config.json could not be renewed ({error})")
    job.console.warn(
        f"step {job.step + 1}: out of memory; now {size} items at a time (accum={job.config.accum}), "
        f"the batch of {job.config.batch} and its gradient stay the same"
    )
