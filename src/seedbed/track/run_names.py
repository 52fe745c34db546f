"""The runs in a folder by name, and the error for one that is not there."""

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from seedbed.errors import UserError

if TYPE_CHECKING:
    from seedbed.track.run import Run


def find_folder(root: Path, name: str) -> "Run":
    """A run by its name, or the run or export in a folder by its path."""
    from seedbed.track.run import Run

    is_path = os.sep in name or (not (Path(root) / name).exists() and (Path(name) / "config.json").is_file())
    paths = (Path(root) / name, Path(name)) if is_path else ()
    return next((Run(path) for path in paths if path.is_dir()), None) or Run.open(root, name)


def folder_of(root: Path, name: str) -> Path:
    """The folder of an existing run by its name or its path."""
    typed = Path(name)
    if len(typed.parts) > 1 and os.path.realpath(typed.parent) == os.path.realpath(root):
        name = typed.name
    path = root / name
    if name and Path(name).name == name and not name.startswith(".") and os.path.isdir(path):
        return path
    refuse(root, name)


def run_names(root: Path) -> list[str]:
    """Names of all folders that may be runs, sorted."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if not e.name.startswith(".") and _may_be_run(e))
    except OSError:
        return []


def _may_be_run(entry: os.DirEntry[str]) -> bool:
    """A folder, or an entry that cannot be examined, such as a link to itself: it is listed with the reason."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def refuse(root: Path, name: str) -> NoReturn:
    """The error that there is no such run, with the nearest names."""
    known = run_names(root)
    if not known:
        raise UserError(f"there is no run {name!r}: {root} holds no runs yet; start one with: seedbed train RECIPE/PRESET")
    near = difflib.get_close_matches(name, known, 3, 0.4) or [n for n in known if name and name in n][-3:] or known[-3:]
    raise UserError(f"there is no run {name!r} in {root}; nearest: {', '.join(near)}")
