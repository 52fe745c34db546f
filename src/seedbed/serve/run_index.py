"""Cached index of the runs folder: summaries refreshed when files change, rows and events read incrementally."""

import contextlib
import copy
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.report import facts, summaries
from seedbed.track import jsonl
from seedbed.track.rows import Columns, Objects, tail_lines, thumbnail
from seedbed.track.run import Run, full_name
from seedbed.track.run_names import run_names

# Limit of the cached rows of recently viewed runs.
MAX_BYTES = 96 << 20
NUM_SPARK = 36
_WATCHED = ("config.json", "status.json", "rows.jsonl", "events.jsonl", "labels.json", "lock")
# As many runs are read before the first answer; the others follow as changes.
NUM_FIRST = 300
_SHOWN = ("name", "recipe", "preset", "status", "step", "last_step", "loss", "best", "created", "why", "parent", "sweep")

Stamp = tuple[tuple[int, int, int], ...]


class RunIndex:
    """The runs under one root. Thread-safe; returns plain values."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.version = 0
        self._is_complete = False
        self._lock = threading.RLock()
        self._summaries: dict[str, tuple[Stamp, dict[str, Any]]] = {}
        self._changed: dict[str, int] = {}
        self._columns: OrderedDict[str, Columns] = OrderedDict()
        self._events: OrderedDict[str, Objects] = OrderedDict()
        self._configs: dict[str, tuple[Stamp, dict[str, Any]]] = {}

    def run(self, name: str) -> Run:
        if not is_name(name) or not os.path.isdir(self.root / name):
            raise UserError(f"there is no run {name!r} here; it may have been renamed or removed")
        return Run(self.root / name)

    def refresh(self) -> int:
        """Update the summaries of runs whose files changed; the version rises with each change."""
        present = run_names(self.root)
        for name in present:  # one at a time: pages need not wait for all of a large folder
            with self._lock:
                self._update(name)
        with self._lock:
            for name in self._summaries.keys() - present:
                del self._summaries[name]
                self._columns.pop(name, None)
                self._events.pop(name, None)
                self._mark_changed(name)
            self._is_complete = True
            return self.version

    def listing(self) -> list[dict[str, Any]]:
        """Every run, newest first; of many that have not been read yet, the newest ones."""
        if self._is_complete or len(names := run_names(self.root)) <= NUM_FIRST:
            self.refresh()
        else:
            with self._lock:
                newest = sorted(((self.stamp(name, ("status.json",))[0][2], name) for name in names), reverse=True)
                for _, name in newest[:NUM_FIRST]:
                    self._update(name)
        with self._lock:
            found = [summary for _, summary in self._summaries.values()]
        # ISO times sort as text within one time zone; a missing one comes last.
        return sorted(found, key=lambda s: (str(s["created"] or ""), s["name"]), reverse=True)

    def since(self, version: int) -> tuple[int, list[dict[str, Any]], list[str]]:
        """The current version, the runs that changed after `version`, and those that are gone."""
        with self._lock:
            names = [name for name, at in self._changed.items() if at > version]
            gone = [name for name in names if name not in self._summaries]
            return self.version, [self._summaries[name][1] for name in names if name in self._summaries], gone

    def summary(self, name: str) -> dict[str, Any]:
        with self._lock:
            self.run(name)
            self._update(name)
            return self._summaries[name][1]

    def configs(self) -> list[tuple[Run, dict[str, Any]]]:
        """Every run that has a readable config.json, with its recipe and settings."""
        with self._lock:
            for name in (present := run_names(self.root)):
                stamp = self.stamp(name, ("config.json",))
                if self._configs.get(name, ((), {}))[0] != stamp:
                    found: dict[str, Any] = {}
                    with contextlib.suppress(UserError):
                        found = Run(self.root / name).config_json()
                    self._configs[name] = stamp, {key: found[key] for key in ("recipe", "config") if key in found}
            return [(Run(self.root / name), about) for name in present if (about := self._configs[name][1])]

    def stamp(self, name: str, parts: tuple[str, ...] = (*_WATCHED, "console.log")) -> Stamp:
        """Inode, size and time of the files that pages show; all zeros when the run is gone."""
        found = []
        for part in parts:
            try:
                stat = os.stat(f"{self.root}/{name}/{part}")
                found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)

    def children(self, name: str) -> list[str]:
        """Runs whose parent is this one, as of the last refresh."""
        with self._lock:
            if not self._is_complete:
                self.refresh()
            return [child for child, (_, summary) in self._summaries.items() if summary["parent"] == name]

    def _update(self, name: str) -> None:
        stamp = self.stamp(name, _WATCHED)
        before = self._summaries.get(name)
        # A killed process only releases its lock, so running runs are always checked again.
        if before is not None and before[0] == stamp and before[1]["status"] != "running":
            return
        summary = _summary(Run(self.root / name))
        if before is None or before[1] != summary:
            self._mark_changed(name)
        self._summaries[name] = stamp, summary

    def _mark_changed(self, name: str) -> None:
        self.version += 1
        self._changed[name] = self.version

    def columns(self, name: str) -> Columns:
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
    """Whether a string from an address is a valid name of a folder directly under the root."""
    return bool(name) and not name.startswith(".") and not set(name) & {"/", "\\", "\0"} and len(name) < 256


def labels(run: Run) -> dict[str, Any]:
    """What people wrote about a run on the list page: tags, the name that is shown, and whether it is archived."""
    found: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        found = jsonl.read_object(run.path / "labels.json")
    tags = found["tags"] if isinstance(found.get("tags"), list) else []
    return {
        "tags": [tag for tag in tags if isinstance(tag, str)],
        "label": str(found.get("label") or ""),
        "archived": found.get("archived") is True,
    }


def _summary(run: Run) -> dict[str, Any]:
    """Summary of a run for the list: facts, speed, name of the metric, and a thumbnail of the loss; of a damaged one, why."""
    try:
        short, rows = summaries.summary(run), run.path / "rows.jsonl"
        row = next(iter(reversed(jsonl.decode(tail_lines(rows, 4096)[-2:]))), {})
        events = jsonl.decode(tail_lines(run.path / "events.jsonl", 8192))
        metric, _ = facts.evaluations(events)
        last = next((event for event in reversed(events) if event.get("kind") == "eval"), {})
        numbers = {key: value for key, value in last.items() if facts.is_number(value) and key not in ("step", "time", "seconds")}
        about = {**labels(run), "numbers": numbers, "higher": facts.is_higher_better(events, metric)}
        known = {key: short[key] for key in _SHOWN}
        title = full_name(short["recipe"], short["preset"]) if short["recipe"] else ""
        measured = {"rate": row.get("items_per_s"), "seconds": row.get("seconds"), "metric": metric}
        return {**jsonl.finite({**known, "title": title, **measured, **about}), "spark": thumbnail(rows, "loss", NUM_SPARK)}
    except Exception as error:  # one bad folder must not break the list
        nothing: dict[str, Any] = dict.fromkeys((*_SHOWN, "rate", "seconds", "metric")) | {**labels(run), "numbers": {}}
        why = f"{run.path} cannot be read ({type(error).__name__}: {error})"
        return {**nothing, "name": run.name, "status": "damaged", "title": "", "why": why, "spark": []}
