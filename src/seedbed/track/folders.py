"""Folders of runs and checkpoints: their names, the lock of the process that trains, and a handle that follows a rename."""

import contextlib
import datetime
import fcntl
import hashlib
import os
import re
from collections.abc import Container
from pathlib import Path

from seedbed.errors import UserError
from seedbed.track import files, jsonl

# ---- names of runs: date, recipe and two words ------------------------------------------------------------------------------

_FIRST, _SECOND = (part.split() for part in Path(__file__).with_name("names.txt").read_text().split("\n\n"))
_LEGAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def two_words(seed: int) -> str:
    """Two words joined by a dash, by a hash of the seed."""
    number = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big")
    number, second = divmod(number, len(_SECOND))
    return f"{_FIRST[number % len(_FIRST)]}-{_SECOND[second]}"


def new_name(recipe: str, moment: datetime.datetime, taken: Container[str]) -> str:
    """A free name such as 2026-03-01-gpt-amber-wren for a run that starts at `moment`."""
    title = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower()).strip("-")[:40] or "run"
    seed = int(moment.timestamp() * 1e6)
    for attempt in range(100_000):
        name = f"{moment:%Y-%m-%d}-{title}-{two_words(seed + attempt)}"
        if name not in taken:
            return name
    raise UserError(f"no free run name is left for {title} on {moment:%Y-%m-%d}; choose one with --name NAME")


def check_name(name: str) -> str:
    """`name` if it is a valid run name: no slash, no leading dot, no special characters."""
    if not _LEGAL.fullmatch(name):
        raise UserError(f"{name!r} cannot name a run: use letters, digits, dots, dashes and underscores, 100 at most")
    return name


# ---- names of checkpoints: by step ------------------------------------------------------------------------------------------

# Six digits, more where the step needs them: a name with other zeros, or with anything behind, is not one of ours.
_NAME = re.compile(r"step-(\d{6}|[1-9]\d{6,18})")


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint folder's name; None for other names."""
    found = _NAME.fullmatch(name) if name.isascii() else None
    return int(found[1]) if found else None


def step_names(folder: Path) -> list[str]:
    """The checkpoint folders by step, oldest first; links, files and other names are ignored."""
    try:
        with os.scandir(folder) as entries:
            found = [e.name for e in entries if step_of(e.name) is not None and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(found, key=lambda name: step_of(name) or 0)


# ---- locks: held by one process, released by the system when it dies, never inherited by its children -------------------------

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


def sign(fd: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, jsonl.encode({"pid": os.getpid(), "host": os.uname().nodename, "since": since}), 0)


def release(fd: int) -> None:
    _held.discard(fd)
    os.close(fd)


class FolderHandle:
    """An open folder, still identified after its path has changed."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(self.fd)
        self._key = found.st_dev, found.st_ino

    def is_at(self, path: Path) -> bool:
        """Whether this path still is the folder; on an I/O error it is assumed to be."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return (found.st_dev, found.st_ino) == self._key

    def close(self) -> None:
        os.close(self.fd)
