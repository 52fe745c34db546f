"""The runs in a folder by name, and the error for one that is not there."""

import difflib
import os
from pathlib import Path
from typing import NoReturn

from seedbed.errors import UserError


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
