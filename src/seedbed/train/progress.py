"""Progress restored from a checkpoint: every tensor, counter and random generator."""

import random
from dataclasses import fields
from typing import Any

import numpy as np

from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.track import edits
from seedbed.train import checkpoint_loading
from seedbed.train.checkpoint_loading import Checkpoint
from seedbed.train.job import Job
from seedbed.train.saving import Progress

# Names in checkpoints of earlier versions.
RENAMED = {"python_dice": "python_rng", "numpy_dice": "numpy_rng"}


def restore(job: Job, saved: Checkpoint) -> None:
    """Continue from a checkpoint: restore every tensor, in place, and every counter; the caller restores the clock."""
    progress = load_progress(saved.state)
    edits.require_own(job.run, saved.origin, job.config, saved.path.name)
    if not is_same_data(job.data, progress.data, "this run"):
        job.console.warn("frames were rendered again by another processor: pixels at edges may differ from those trained on")
    checkpoint_loading.restore(job.engine.tensors(), saved.tensors, f"checkpoint {saved.path.name}")
    job.step, job.items, job.skipped_items = saved.step, progress.items, progress.skipped_items
    job.total_items = progress.total_items
    job.best, job.best_step = progress.best, progress.best_step
    if job.stepper.runner.is_undecided and progress.compile_mode is not None:
        job.stepper.runner.settle(progress.compile_mode)
    job.incidents.load_state(progress.incidents)
    job.system.load_state(progress.system)
    version, numbers, gauss = progress.python_rng
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = progress.numpy_rng
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def is_same_data(data: Data, wanted: str, whose: str) -> bool:
    """Whether these are the data of training; others are refused, unless they were rendered here from the same config."""
    have = data.facts.get("fingerprint", "")
    if have != wanted and not getattr(data, "is_rendered", False):
        raise UserError(f"the data has changed: {whose} was trained on {wanted}, the source now gives {have}")
    return have == wanted


def load_progress(state: dict[str, Any]) -> Progress:
    """From a checkpoint of this or an earlier version; unknown keys are ignored."""
    known = {field.name for field in fields(Progress)}
    current = {RENAMED.get(name, name): value for name, value in state.items()}
    return Progress(**{name: value for name, value in current.items() if name in known})
