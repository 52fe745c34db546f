"""When and how a run saves checkpoints, and what they store besides tensors. A non-finite state is never saved."""

import errno
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.train import checkpoint, reporting
from seedbed.train.job import Job


def save(job: Job, best: bool = False) -> bool:
    """Save a checkpoint if this step has none; a full or failing disk is a warning and does not end the run."""
    end_save(job)
    folder = Path(job.ranks.broadcast_object(str(job.run.locate() / "checkpoints")))
    if not best and job.ranks.broadcast_object((folder / checkpoint.folder_name(job.step)).exists()):
        return True
    if is_spoiled(job):
        return False
    job.run.sync()
    with job.clock.timer("save"):
        what = (folder, job.step, job.engine.tensors(), Progress.of(job).to_json(), job.part)
        if job.ranks.is_single and not job.async_saves:
            return _saved(job, lambda: checkpoint.save(*what), best)
        if job.saver is None:
            from seedbed.train.async_saving import Saver

            job.saver = Saver()
        job.saver.start(*what, best)
    return True


def save_last(job: Job) -> bool:
    """Save and wait; once more if the run's folder was moved during the first attempt."""
    where = job.run.locate()
    done = save(job) and end_save(job)
    if job.ranks.broadcast_object(not done and job.run.locate() != where):
        done = save(job) and end_save(job)
    return done


def end_save(job: Job) -> bool:
    """Wait for the pending checkpoint, if there is one, and report it; False when it could not be written."""
    if job.saver is None or not job.saver.is_busy:
        return True
    with job.clock.timer("save"):
        return _saved(job, job.saver.result, job.saver.is_best)


def is_spoiled(job: Job) -> bool:
    """Whether weights, moments or averages are not finite; such a state is reported and never saved."""
    found = next((name for name in job.ranks.all_gather_object(job.engine.spoiled()) if name), "")
    if found:
        job.run.event(job.step, "spoiled", what=f"{found} is not finite")
        job.console.warn(f"step {job.step}: {found} is not finite; this state is not saved; earlier checkpoints are intact")
    return bool(found)


def _saved(job: Job, write: Callable[[], Path], best: bool) -> bool:
    """Write a checkpoint, or wait until it is written; mark, prune and report."""
    try:
        path = write()
        if job.ranks.is_primary:
            folder = job.run.locate() / "checkpoints"
            if not (folder / path.name).is_dir():  # the run's folder was removed, and perhaps created again
                raise FileNotFoundError(errno.ENOENT, "the checkpoint is gone with its folder", str(folder / path.name))
            if best:
                checkpoint.mark_best(folder, path)
            checkpoint.prune(folder, job.config.keep)
    except OSError as error:
        job.run.event(job.step, "save_failed", error=str(error))
        job.console.line(f"step {job.step}: no checkpoint could be written ({error}); earlier ones are intact")
        return False
    job.run.event(checkpoint.step_at(path), "checkpoint", path=path.name, best=best)
    reporting.set_status(job)
    return True


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counters, the best evaluation, and the states of guard, clock, system and global random generators, as JSON values."""

    items: int
    skipped_items: int
    total_items: int
    planned_steps: int
    best: float | None
    best_step: int
    incidents: dict[str, Any]
    clock: dict[str, Any]
    system: dict[str, Any]
    data: str
    python_rng: list[Any]
    numpy_rng: list[Any]
    compile_mode: str | None = None

    @classmethod
    def of(cls, job: Job) -> "Progress":
        python, (kind, keys, *rest) = random.getstate(), np.random.get_state()
        return cls(
            items=job.items,
            skipped_items=job.skipped_items,
            total_items=job.total_items,
            planned_steps=job.config.steps,
            compile_mode=job.stepper.runner.mode,
            best=job.best,
            best_step=job.best_step,
            incidents=job.incidents.state(),
            clock=job.clock.state(),
            system=job.system.state(),
            data=job.data.facts.get("fingerprint", ""),
            python_rng=[python[0], list(python[1]), python[2]],
            numpy_rng=[kind, np.asarray(keys).tolist(), *rest],
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
