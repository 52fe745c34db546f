"""The write layer: whatever must survive a crash goes through these few functions, and fault drills patch them here."""

import contextlib
import errno
import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_counter = itertools.count()

# What appended lines may wait in memory while a disk is full; beyond it the oldest are dropped.
_MAX_WAITING = 1 << 20


def open_write(path: Path) -> int:
    """A file descriptor on an empty file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)


def open_append(path: Path) -> int:
    """A file descriptor whose writes go to the end of the file."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


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
    """Make the names in a folder durable; some network disks cannot, and need no telling."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """A new file with its bytes on the disk; atomic only inside a folder that is itself built aside."""
    fd = open_write(path)
    try:
        write(fd, data)
        fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str) -> None:
    """The old content or the new, at every instant and after a power cut; never a mixture."""
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


def append_line(path: Path, line: str) -> None:
    """Add one line; a half-written line before it stays apart."""
    appender = Appender(path)
    try:
        appender.write(line.encode(errors="replace") + b"\n")
    finally:
        appender.close()


class Appender:
    """A file that grows by whole lines. After a failed write the file is cut back and the lines wait for the next one."""

    def __init__(self, path: Path):
        self._fd = open_append(path)
        self._size = os.fstat(self._fd).st_size
        torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"
        self._prefix = b"\n" if torn else b""
        self._waiting: deque[bytes] = deque()

    def write(self, line: bytes) -> None:
        """Write the lines that waited and this one, or raise OSError and keep them."""
        if self._waiting or self._prefix:
            self._waiting.append(line)
            line = self._prefix + b"".join(self._waiting)
        try:
            write(self._fd, line)
        except OSError:
            self._keep(line)
            raise
        self._size += len(line)
        self._waiting.clear()
        self._prefix = b""

    def sync(self) -> None:
        """What was written so far survives a power cut."""
        fsync(self._fd)

    def _keep(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)
        if not self._waiting:
            self._waiting.append(line)
        while sum(map(len, self._waiting)) > _MAX_WAITING:
            self._waiting.popleft()

    def close(self) -> None:
        os.close(self._fd)


def tail_lines(path: Path, num_bytes: int = 1 << 15) -> list[bytes]:
    """The whole lines among the last `num_bytes` of a file; none when it cannot be read."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            lines = file.read(num_bytes).split(b"\n")
    except OSError:
        return []
    # The first piece may lack its beginning, the last is empty or still being written.
    return lines[1 if start else 0 : -1]


def leftovers(folder: Path, older_than: float = 3600.0) -> Iterator[Path]:
    """Things a killed process built aside in `folder` and nobody will ask for again."""
    now = time.time()
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if now - path.lstat().st_mtime > older_than:
                yield path
