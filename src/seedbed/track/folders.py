"""Handle of a run's folder during training: a renamed folder is followed, a removed one is created again."""

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from seedbed.track import files


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

    def find(self) -> Path | None:
        """The folder's current path; None when it was removed or the system cannot tell."""
        with contextlib.suppress(OSError):
            if sys.platform == "darwin":
                name = fcntl.fcntl(self.fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")
            else:
                name = os.readlink(b"/proc/self/fd/%d" % self.fd)
            path = Path(os.fsdecode(name))
            # Some network disks change inode numbers: a folder that is not reported as deleted still exists.
            return path if self.is_at(path) or (path.is_dir() and not name.endswith(b" (deleted)")) else None
        return None

    def close(self) -> None:
        os.close(self.fd)


def like(path: Path, found: Path) -> Path:
    """The new path of a folder, relative if the old one was."""
    return found if path.is_absolute() else Path(os.path.relpath(found))


def recreate(path: Path, content: Mapping[str, bytes], opened: Iterable[tuple[str, files.Appender]]) -> Path:
    """Create a folder next to the removed one, with these files and the content of the open ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}-rescued")
    number = 1
    while True:
        try:
            new.mkdir()
            break
        except FileExistsError:
            number += 1
            new = path.with_name(f"{path.name}-rescued-{number}")
    for name in ("samples", "checkpoints"):
        (new / name).mkdir()
    for name, data in (*content.items(), *((name, appender.content()) for name, appender in opened)):
        files.write_atomic(new / name, data)
    return new
