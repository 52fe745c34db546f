"""Locks on files: held by one process, freed by the system at once when it dies, never inherited by its children."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from seedbed.track import lines

# Locks live on open files, and a forked child shares them: it must let go, or a dead parent would seem alive.
_held: set[int] = set()


def _release_in_child() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


def open_lock(path: Path) -> int:
    """A file to lock, made where it is missing; `release` closes it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _held.add(fd)
    return fd


def try_lock(fd: int) -> bool:
    """Whether the lock is ours now; OSError on a disk that has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def waiting_turn(path: Path) -> Iterator[None]:
    """Alone with the file at `path` while the block runs; on a disk without locks, as it comes."""
    fd = open_lock(path)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        release(fd)


def sign(fd: int, since: str) -> None:
    """Write into the file who holds the lock, for others to read."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, lines.encode({"pid": os.getpid(), "host": os.uname().nodename, "since": since}), 0)


def release(fd: int) -> None:
    _held.discard(fd)
    os.close(fd)


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock; looking takes it for an instant."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
