"""A run's folder that was renamed or removed while it trained: it is followed, or created again beside its old place."""

import contextlib
import fcntl
import itertools
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from seedbed.track import files, folders
from seedbed.track.run import Run


def follow(run: Run, held: folders.FolderHandle) -> folders.FolderHandle:
    """Set the run's path to where its folder is now; returns the handle to hold from now on."""
    old, found = run.path, find(held)
    if found is None:
        held = _create_again(run, held)
    elif found != Path(os.path.realpath(old)):
        run.path = found if old.is_absolute() else Path(os.path.relpath(found))
        run.warn(f"the run's folder {old} was renamed: going on in {run.path}")
    if run.path != old:
        run.name = run.path.name
        run.event(run.last_step, "moved", path=str(run.path), was=str(old), removed=found is None)
    return held


def find(held: folders.FolderHandle) -> Path | None:
    """The folder's current path; None when it was removed or the system cannot tell."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            name = fcntl.fcntl(held.fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")
        else:
            name = os.readlink(b"/proc/self/fd/%d" % held.fd)
        path = Path(os.fsdecode(name))
        # Some network disks change inode numbers: a folder that is not reported as deleted still exists.
        return path if held.is_at(path) or (path.is_dir() and not name.endswith(b" (deleted)")) else None
    return None


def _create_again(run: Run, held: folders.FolderHandle) -> folders.FolderHandle:
    """Create a folder next to the removed one; keep the old handle when that fails."""
    old = run.path
    try:
        run.path = recreate(old, run.kept_files, run.appenders.items())
        run.close()
        run.new_lock = folders.open_lock(run.path / "lock")
        folders.try_lock(run.new_lock)
        folders.sign(run.new_lock)
        new = folders.FolderHandle(run.path)
        held.close()
        run.warn(f"the run's folder {old} was removed: what is left of the run goes to {run.path}, and it stops there")
    except OSError as error:
        new = held
        run.warn_once("", error)
    if not run.was_removed:
        run.was_removed = True
        run.on_removed()
    return new


def recreate(path: Path, content: Mapping[str, bytes], opened: Iterable[tuple[str, files.Appender]]) -> Path:
    """Create a folder next to the removed one, with these files and the content of the open ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path
    for number in itertools.count(1):
        new = path.with_name(f"{path.name}-rescued" + (f"-{number}" if number > 1 else ""))
        with contextlib.suppress(FileExistsError):
            new.mkdir()
            break
    for name in ("samples", "checkpoints"):
        (new / name).mkdir()
    for name, data in (*content.items(), *((name, appender.content()) for name, appender in opened)):
        files.write_atomic(new / name, data)
    return new
