"""Locks of runs and trials as other processes see them: whether one is held, and by whom."""

import fcntl
import json
from pathlib import Path

from seedbed.track import files


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock; the test takes the lock for an instant."""
    try:
        with open(files.open_regular(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock, or the disk has none
        return False
    return False


def holder(path: Path) -> str:
    try:
        facts = json.loads(files.read_regular(path, 1 << 16))
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
