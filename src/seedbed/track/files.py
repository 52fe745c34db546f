"""The write layer: everything that must survive a crash is written by these functions; drills inject faults here."""

import contextlib
import errno
import itertools
import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_counter = itertools.count()

# Bytes of appended lines kept in memory while the disk is full; beyond it the oldest lines are dropped.
_MAX_WAITING = 1 << 20
# Largest file of JSON that is read: parsing needs many times its size in memory.
MAX_JSON = 64 << 20


def open_write(path: Path) -> int:
    """File descriptor of an empty file; a symbolic link at the path is refused, since it may point to another file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def open_append(path: Path) -> int:
    """File descriptor that appends to a regular file; symbolic links are refused."""
    return _only_regular(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), path)


def _only_regular(fd: int, path: Path | str) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def write(fd: int, data: bytes) -> None:
    """Write all of it, or raise OSError."""
    done = os.write(fd, data)
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])


def fsync(fd: int) -> None:
    os.fsync(fd)


def replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that its names are durable; network disks that cannot are ignored."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and fsync it; atomic only in a folder that is renamed into place afterwards."""
    fd = open_write(path)
    try:
        write(fd, data)
        fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace a file atomically: readers, and a restart after a power cut, see the old content or the new one."""
    content = data.encode(errors="replace") if isinstance(data, str) else data
    aside = path.with_name(f".{path.name}.{os.getpid()}-{next(_counter)}.tmp")
    try:
        write_synced(aside, content)
        replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    sync_folder(path.parent)


class Appender:
    """Appends whole lines to a file. After a failed write the file is truncated back and the lines wait for the next write."""

    def __init__(self, path: Path):
        self._fd = open_append(path)
        self._size = os.fstat(self._fd).st_size
        torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"
        self._prefix = b"\n" if torn else b""
        self._waiting: deque[bytes] = deque()

    def write(self, line: bytes) -> None:
        """Write the pending lines and this one, or raise OSError and keep them pending."""
        if self._waiting or self._prefix:
            self._waiting.append(line)
            line = self._prefix + b"".join(self._waiting)
        try:
            write(self._fd, line)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            if not self._waiting:
                self._waiting.append(line)
            while sum(map(len, self._waiting)) > _MAX_WAITING:
                self._waiting.popleft()
            raise
        self._size += len(line)
        self._waiting.clear()
        self._prefix = b""

    def sync(self) -> None:
        fsync(self._fd)

    def content(self) -> bytes:
        """All of the file, even when its name is gone, and the pending lines."""
        found, at = [], 0
        while part := os.pread(self._fd, 1 << 20, at):
            found.append(part)
            at += len(part)
        return b"".join([*found, *([self._prefix] if self._waiting else []), *self._waiting])

    def close(self) -> None:
        os.close(self._fd)


def open_regular(path: Path | str) -> int:
    """File descriptor for reading. Links to regular files are followed; a FIFO, a device or a folder is an OSError."""
    # Checked before opening, since opening a device can have effects; and after, since the name may change in between.
    # Without O_NONBLOCK opening a FIFO blocks until there is a writer.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return _only_regular(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), path)


def read_regular(path: Path | str, limit: int) -> bytes:
    """All bytes of a regular file; OSError for anything else, and for more than `limit` bytes."""
    with open(open_regular(path), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit >> 20} MiB" if limit >> 20 else f"larger than {limit} bytes", str(path))
    return content


def read_json(path: Path) -> Any:
    """The values of a JSON file of limited size; OSError or ValueError otherwise."""
    try:
        return json.loads(read_regular(path, MAX_JSON))
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ValueError(f"{path.name} is {error.strerror}") from None
        raise
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None


# Temporary names: files of `write_atomic`, and folders of runs that are being created or removed.
_ASIDE_FILE = re.compile(r"\..+\.\d+-\d+\.tmp", re.DOTALL)
_ASIDE_FOLDER = re.compile(r"\.(new-\d+|removed-.+)-\d+\.tmp", re.DOTALL)


def leftover_files(folder: Path) -> Iterator[Path]:
    """Temporary files that a killed process left in `folder`, of any age: the caller holds the folder's lock."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if _ASIDE_FILE.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
                yield path


def leftover_folders(root: Path, older_than: float = 3600.0) -> Iterator[Path]:
    """Temporary folders that a killed process left while it created or removed a run."""
    now = time.time()
    for path in root.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if _ASIDE_FOLDER.fullmatch(path.name) and stat.S_ISDIR(found.st_mode) and now - found.st_mtime > older_than:
                yield path


_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def is_plain_name(name: object) -> bool:
    """Whether this is a plain file name: no separators, no parent references, not hidden."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None
