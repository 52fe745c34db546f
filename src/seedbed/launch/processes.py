"""The number of processes of a command, and the end of a rank when its parent process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from seedbed import config as configs
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.recipes import find, open_saved
from seedbed.track.run import Run

# Most processes that a run's folder can start by itself; the command line may ask for more.
MAX_UNASKED = max(8, os.cpu_count() or 1)
# A pipe that is closed when the command ends, and the seconds that ranks then have to save.
PARENT_PIPE, ORPHAN_GRACE = "SEEDBED_PARENT_PIPE", 300.0


def to_train(name: str, assignments: list[str]) -> int:
    """Number of processes that `train` must start; 0 for a single rank, or inside a rank."""

    def config() -> Config:
        recipe, preset = find(name)
        return configs.override(recipe.preset(preset), assignments)

    return _wanted(config)


def to_resume(root: Path, name: str, assignments: list[str]) -> int:
    """Number of processes that `resume` must start."""

    def config() -> Config:
        run = Run.open(root, name)
        from seedbed.track.edits import verified_config

        return configs.override(open_saved(verified_config(run), run.path)[1], assignments)

    world = _wanted(config)
    if world > MAX_UNASKED and not any(word.startswith("dist.") for word in assignments):
        raise UserError(
            f"run {name} needs {world} processes, and this machine has {os.cpu_count()} cores; "
            f"to start them anyway: seedbed resume {name} dist.replicate=N dist.shard=M"
        )
    return world


def _wanted(config: Callable[[], Config]) -> int:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _end_with_parent()
        return 0
    try:
        world = config().dist.world
    except UserError:  # reported by the command itself
        return 0
    return world if world > 1 else 0


def refuse(num: int, what: str) -> None:
    if num:
        raise UserError(f"{what} is done by one process; set dist.replicate=1 dist.shard=1 for it")


def _end_with_parent() -> None:
    """In a rank: send itself SIGTERM, which saves, when the command that started it has ended for any reason."""
    given = os.environ.pop(PARENT_PIPE, None)
    if given is None:
        return

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(int(given), 1)  # nothing is written to the pipe: the read returns when it is closed
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="parent", daemon=True).start()
