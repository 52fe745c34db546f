"""Locks of runs and trials as other processes see them: whether one is held, and by whom."""

import fcntl
import json
import os
from pathlib import Path

from seedbed.track import files


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock; the test takes the lock for an instant."""
    try:
        fd = files.open_regular(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def holder(path: Path) -> str:
    """The process that signed a lock, in words."""
    try:
        facts = json.loads(files.read_regular(path, 1 << 16))
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
