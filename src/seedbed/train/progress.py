"""What a checkpoint stores about a run's progress, besides its tensors: one record, saved and loaded as a whole."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from seedbed.errors import UserError

if TYPE_CHECKING:
    from seedbed.train.checkpoint_loading import Checkpoint
    from seedbed.train.job import Job

# Names in checkpoints of earlier versions.
RENAMED = {"python_dice": "python_rng", "numpy_dice": "numpy_rng"}


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
    def of(cls, job: Job) -> Progress:
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

    @classmethod
    def load(cls, state: dict[str, Any]) -> Progress:
        """From a checkpoint of this or an earlier version; unknown keys are ignored."""
        known = {field.name for field in fields(cls)}
        current = {RENAMED.get(name, name): value for name, value in state.items()}
        return cls(**{name: value for name, value in current.items() if name in known})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def restore(job: Job, saved: Checkpoint) -> None:
    """Continue from a checkpoint: restore every tensor, in place, and every counter; the caller restores the clock."""
    from seedbed.track import edits
    from seedbed.train import checkpoint_loading

    progress = Progress.load(saved.state)
    edits.require_own(job.run, saved.origin, job.config, saved.path.name)
    have = job.data.facts.get("fingerprint", "")
    if have != progress.data:
        raise UserError(f"the data has changed: this run was trained on {progress.data}, the source now gives {have}")
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
