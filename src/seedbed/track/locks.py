"""File locks: held by one process, released by the system when it dies, never inherited by its children."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from seedbed.track import files, jsonl

# Locks belong to open files, which a forked child shares: it must close them, or a dead parent would seem alive.
_held: set[int] = set()


def _release_in_child() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


def open_lock(path: Path) -> int:
    """Open a lock file, created if missing; `release` closes it."""
    fd = files.open_append(path)  # no symbolic links: the file is written to
    _held.add(fd)
    return fd


def try_lock(fd: int) -> bool:
    """Try to take the lock; OSError on a disk without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def waiting_turn(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` inside the block; without effect on a disk without locks."""
    fd = open_lock(path)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        release(fd)


def sign(fd: int, since: str) -> None:
    """Write the holder of the lock into the file."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, jsonl.encode({"pid": os.getpid(), "host": os.uname().nodename, "since": since}), 0)


def release(fd: int) -> None:
    _held.discard(fd)
    os.close(fd)


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
