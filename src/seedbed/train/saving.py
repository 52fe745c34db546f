"""When and how a run saves checkpoints: synchronously or in the background, and never a non-finite state."""

from __future__ import annotations

import copy
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from seedbed.train import checkpoint, reporting
from seedbed.train.progress import Progress

if TYPE_CHECKING:
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
    if not job.saver.is_busy:
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


def forget_after(job: Job, step: int) -> None:
    """Remove checkpoints beyond `step`, once every rank has read what it needs."""
    job.ranks.barrier()
    if job.ranks.is_primary:
        checkpoint.forget_after(job.run.path / "checkpoints", step)
    job.ranks.barrier()


def _saved(job: Job, write: Callable[[], Path], best: bool) -> bool:
    """Write a checkpoint, or wait until it is written; mark, prune and report."""
    try:
        path = write()
        if job.ranks.is_primary:
            folder = _require_there(job.run.locate() / "checkpoints", path.name)
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


Tensors = dict[str, dict[str, Tensor]]


class Saver:
    """Asynchronous checkpoints: a snapshot in host memory, then `thread` writes it; threads of several ranks communicate.

    There is at most one at a time: the next save, and the end of the run, wait for it. `result` returns or raises its outcome.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.is_best = False

    @property
    def is_over(self) -> bool:
        """Whether a checkpoint has been written or has failed, and `result` was not called yet."""
        return self.thread is not None and not self.thread.is_alive()

    @property
    def is_busy(self) -> bool:
        return self.thread is not None

    def start(
        self,
        folder: Path,
        step: int,
        tensors: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        part: checkpoint.Part,
        best: bool,
    ) -> None:
        """Copy everything to the host, and start a thread that writes it."""
        assert self.thread is None, "a checkpoint is under way"
        state = copy.deepcopy(state)
        kept = {file: {n: t.detach().to("cpu", copy=True) for n, t in group.items()} for file, group in tensors.items()}
        self._path, self._error, self.is_best = None, None, best

        def write() -> None:
            try:
                self._path = checkpoint.save(folder, step, kept, state, part)
            except BaseException as error:  # raised again by `result`
                self._error = error

        self.thread = threading.Thread(target=write, name="seedbed-saver", daemon=True)
        self.thread.start()

    def result(self) -> Path:
        """Wait for the checkpoint; returns its path or raises the error."""
        assert self.thread is not None
        self.thread.join()
        self.thread = None
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


def _require_there(folder: Path, name: str) -> Path:
    """The checkpoint folder that was just written; its run's folder may have been removed and created again since."""
    if not (folder / name).is_dir():
        raise FileNotFoundError(errno.ENOENT, "the checkpoint is gone with its folder", str(folder / name))
    return folder
