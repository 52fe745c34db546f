"""Out of memory in a step: the step is taken again with smaller micro-batches and more accumulation, and this is recorded.

The gradient is still that of the whole batch, summed in more parts. Nothing is retried once an optimizer has begun to write.
"""

import gc
from dataclasses import replace

import torch

from seedbed.errors import UserError
from seedbed.track.changes import change_config
from seedbed.train.job import Job

_OUT_OF_MEMORY = (
    "out of memory",
    "cudaerrormemoryallocation",
    "can't allocate memory",
    "not enough memory",
    "alloc_failed",
    "defaultcpuallocator",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, CUDA or Python means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    return any(words in text.lower() for words in _OUT_OF_MEMORY)


def problem_of(error: BaseException) -> str:
    """The first line of an error that means out of memory; any other is raised again."""
    if not is_out_of_memory(error):
        raise error
    return str(error).strip().partition("\n")[0]


def outside_steps(job: Job, error: BaseException) -> UserError:
    """The error for memory that runs out where smaller micro-batches do not help."""
    return UserError(
        f"out of memory after step {job.step}, while evaluating, sampling or saving ({problem_of(error)})\n"
        f"go on with less of that: seedbed resume {job.run.name} every.sample=0, or with a smaller batch"
    )


def shrink(job: Job, problem: str) -> None:
    """Take smaller micro-batches from now on, after a step that ran out of memory; or an error that says what else to do."""
    config, engine = job.config, job.engine
    size = config.batch // config.accum
    parts = config.accum * next((n for n in range(2, size) if size % n == 0), size)
    if size == 1:
        raise UserError(
            f"out of memory at step {job.step + 1} with one item at a time ({problem})\n"
            "make the model or its items smaller, or set remat=full or precision=bf16"
        )
    if engine.touched or not job.ranks.is_single:
        why = "in the middle of an update" if engine.touched else "on one of several ranks"
        raise UserError(
            f"out of memory at step {job.step + 1}, {why} ({problem})\n"
            f"go on from the last checkpoint with smaller micro-batches: seedbed resume {job.run.name} accum={parts}"
        )
    engine.abandon()
    job.config = engine.config = replace(config, accum=parts)
    job.stepper.runner.forget()
    job.stepper.feed.divide(parts)
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    _record(job, config.batch // parts, problem)


def _record(job: Job, size: int, problem: str) -> None:
    """Record the new size: in the events, in config.json (a resumed run starts with it) and on the console."""
    facts = {"accum": job.config.accum, "micro_batch": size, "batch": job.config.batch}
    job.run.event(job.step + 1, "out_of_memory", what=problem, **facts)
    try:
        change_config(job.run, job.config)
    except (OSError, UserError) as error:
        job.console.line(f"config.json could not be renewed ({error})")
    job.console.warn(
        f"step {job.step + 1}: out of memory; now {size} items at a time (accum={job.config.accum}), "
        f"the batch of {job.config.batch} and its gradient stay the same"
    )
