"""A simulated power cut: records the calls of the write layer and removes what was not durable.

Synced bytes stay; later ones are truncated, zeroed or kept at random. A new file or a rename without a sync of its folder
is undone or kept.
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from seedbed.drills.faults import OpenFiles, die
from seedbed.track import files


class Recorder:
    """In the run: tracks what is durable after each call of the write layer, and cuts the power at call number `calls`."""

    def __init__(self, calls: int, note: Path) -> None:
        self.left, self.note = calls, note
        self.open_files = OpenFiles()
        self.synced: dict[str, int] = {}  # bytes of a file that are on the disk
        self.renames: list[dict[str, str]] = []  # those whose folder has not been synced since
        self.durable: list[str] = []
        self.real = {name: getattr(files, name) for name in ("write", "fsync", "replace", "sync_folder")}
        for name in self.real:
            setattr(files, name, getattr(self, name))

    def _tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            new = sorted(self.open_files.new)
            facts = {"synced": self.synced, "new": new, "renames": self.renames, "durable": self.durable}
            self.note.write_text(json.dumps(facts))
            die()

    def write(self, fd: int, data: bytes) -> None:
        self._tick()
        self.real["write"](fd, data)
        path = self.open_files.paths[fd]
        self.synced.setdefault(str(path), 0 if str(path) in self.open_files.new else os.fstat(fd).st_size - len(data))

    def fsync(self, fd: int) -> None:
        self._tick()
        self.real["fsync"](fd)
        if fd in self.open_files.paths:
            self.synced[str(self.open_files.paths[fd])] = os.fstat(fd).st_size

    def replace(self, source: Path, target: Path) -> None:
        self._tick()
        old = self._keep(target)
        self.real["replace"](source, target)
        self._move(str(source), str(target))
        self.renames.append({"source": str(source), "target": str(target), "old": old})

    def _keep(self, target: Path) -> str:
        """Saves the content that a rename is about to replace."""
        if not target.is_file() or target.is_symlink():
            return ""
        kept = self.note.with_name(f"{self.note.stem}-old-{len(list(self.note.parent.glob('*-old-*')))}")
        os.link(target, kept)
        return str(kept)

    def _move(self, source: str, target: str) -> None:
        for path in [p for p in self.synced if p == source or p.startswith(f"{source}/")]:
            moved = target + path.removeprefix(source)
            self.synced[moved] = self.synced.pop(path)
            if path in self.open_files.new:
                self.open_files.new.discard(path)
                # Renamed over another file: only the rename can be undone.
                self.open_files.new |= {moved} if path != source else set()

    def sync_folder(self, path: Path) -> None:
        self._tick()
        self.real["sync_folder"](path)
        self.open_files.new = {p for p in self.open_files.new if Path(p).parent != Path(path)}
        done = [r for r in self.renames if Path(r["target"]).parent == Path(path)]
        self.durable += [r["target"] for r in done]
        self.renames = [r for r in self.renames if r not in done]


def lose_power(note: Path, rng: random.Random) -> None:
    """After the run: removes what was not durable."""
    record: dict[str, Any] = json.loads(note.read_text())
    for path, size in record["synced"].items():
        _lose_bytes(Path(path), size, rng)
    for path in record["new"]:
        if rng.random() < 0.5:
            Path(path).unlink(missing_ok=True)
    for rename in reversed(record["renames"]):
        if rng.random() < 0.5:
            _undo(rename)


def _lose_bytes(path: Path, synced: int, rng: random.Random) -> None:
    if not path.is_file() or path.stat().st_size <= synced:
        return
    size, kind = path.stat().st_size, rng.choice(("cut", "zero", "part"))
    with path.open("r+b") as file:
        if kind == "zero":
            file.seek(synced)
            file.write(b"\0" * (size - synced))
        else:
            file.truncate(synced if kind == "cut" else rng.randint(synced, size))


def _undo(rename: dict[str, str]) -> None:
    source, target = Path(rename["source"]), Path(rename["target"])
    if not os.path.lexists(target):
        return
    if os.path.lexists(source):
        shutil.rmtree(source) if source.is_dir() and not source.is_symlink() else source.unlink()
    os.replace(target, source)
    if rename["old"]:
        os.link(rename["old"], target)
