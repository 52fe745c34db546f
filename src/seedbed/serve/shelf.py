"""What the pages know of the runs folder: listings that are renewed where a file changed, and curves that are followed."""

import copy
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import facts, files, lines
from seedbed.track.rows import Columns, Objects, glimpse
from seedbed.track.run import Run, full_name, run_names

# Numbers of runs that were looked at lately stay in memory, up to this much.
MAX_BYTES = 96 << 20
NUM_SPARK = 36
_WATCHED = ("config.json", "status.json", "rows.jsonl", "events.jsonl", "lock")

Stamp = tuple[tuple[int, int, int], ...]


class Shelf:
    """The runs under one root. Safe to use from several threads; every answer is plain values."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.version = 0
        self._looked = False
        self._lock = threading.RLock()
        self._known: dict[str, tuple[Stamp, dict[str, Any]]] = {}
        self._changed: dict[str, int] = {}
        self._columns: OrderedDict[str, Columns] = OrderedDict()
        self._events: OrderedDict[str, Objects] = OrderedDict()

    def run(self, name: str) -> Run:
        """A run that is there, by its plain name; anything that is no such name is a UserError."""
        if not is_name(name) or not (self.root / name).is_dir():
            raise UserError(f"there is no run {name!r} here; it may have been renamed or removed")
        return Run(self.root / name)

    # ---- listings ----------------------------------------------------------------------------------------------------

    def refresh(self) -> int:
        """Look at every run whose files changed; the version rises with each change."""
        with self._lock:
            present = set()
            for name in run_names(self.root):
                present.add(name)
                self._look(name)
            for name in [n for n in self._known if n not in present]:
                del self._known[name]
                self._columns.pop(name, None)
                self._events.pop(name, None)
                self._mark(name)
            self._looked = True
            return self.version

    def listing(self) -> list[dict[str, Any]]:
        """Every run, newest first."""
        with self._lock:
            self.refresh()
            found = [summary for _, summary in self._known.values()]
        # Plain times of day sort as text where they share a zone; a missing one comes last.
        return sorted(found, key=lambda s: (str(s["created"] or ""), s["name"]), reverse=True)

    def since(self, version: int) -> tuple[int, list[dict[str, Any]], list[str]]:
        """The version now, the runs that changed after an earlier one, and those that are gone."""
        with self._lock:
            names = [name for name, at in self._changed.items() if at > version]
            gone = [name for name in names if name not in self._known]
            return self.version, [self._known[name][1] for name in names if name in self._known], gone

    def summary(self, name: str) -> dict[str, Any]:
        with self._lock:
            self.run(name)
            self._look(name)
            return self._known[name][1]

    def stamp(self, name: str, parts: tuple[str, ...] = (*_WATCHED, "console.log")) -> Stamp:
        """Changes when a file of the run that pages show does; all zeros when the run is gone."""
        return tuple(_stamp(f"{self.root}/{name}/{part}") for part in parts)

    def children(self, name: str) -> list[str]:
        """Runs that name this one as their parent, as far as the last look went."""
        with self._lock:
            if not self._looked:
                self.refresh()
            return [child for child, (_, summary) in self._known.items() if summary["parent"] == name]

    def _look(self, name: str) -> None:
        stamp = self.stamp(name, _WATCHED)
        before = self._known.get(name)
        # A killed process leaves no trace but its lock, so what is thought to run is asked again.
        if before is not None and before[0] == stamp and before[1]["status"] != "running":
            return
        summary = _summary(Run(self.root / name))
        if before is None or before[1] != summary:
            self._mark(name)
        self._known[name] = stamp, summary

    def _mark(self, name: str) -> None:
        self.version += 1
        self._changed[name] = self.version

    # ---- one run's numbers -------------------------------------------------------------------------------------------

    def columns(self, name: str) -> Columns:
        """The rows of a run as columns, as they are now."""
        with self._lock:
            found = self._columns.setdefault(name, Columns(self.run(name).path / "rows.jsonl")).refresh()
            self._columns.move_to_end(name)
            while len(self._columns) > 1 and sum(c.num_bytes for c in self._columns.values()) > MAX_BYTES:
                self._columns.popitem(last=False)
            return copy.copy(found)

    def events(self, name: str) -> list[dict[str, Any]]:
        with self._lock:
            found = self._events.setdefault(name, Objects(self.run(name).path / "events.jsonl")).refresh()
            self._events.move_to_end(name)
            while len(self._events) > 64:
                self._events.popitem(last=False)
            return found


def is_name(name: str) -> bool:
    """Whether a word from an address can be a folder right under the root, and none that is hidden."""
    return bool(name) and not name.startswith(".") and not set(name) & {"/", "\\", "\0"} and len(name) < 256


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def _summary(run: Run) -> dict[str, Any]:
    """A line of the list: the command line's summary, the rate, the metric's name, and the loss as a thumbnail."""
    short = facts.summary(run)
    row = next(iter(reversed(lines.decode(files.tail_lines(run.path / "rows.jsonl", 4096)[-2:]))), {})
    metric, _ = facts.evaluations(lines.decode(files.tail_lines(run.path / "events.jsonl", 8192)))
    known = {key: short[key] for key in _SHOWN}
    title = full_name(short["recipe"], short["preset"]) if short["recipe"] else ""
    measured = {"rate": row.get("items_per_s"), "seconds": row.get("seconds"), "metric": metric}
    return {**lines.finite({**known, "title": title, **measured}), "spark": glimpse(run.path / "rows.jsonl", "loss", NUM_SPARK)}


_SHOWN = ("name", "recipe", "preset", "status", "step", "last_step", "loss", "best", "created", "why", "parent", "sweep")
