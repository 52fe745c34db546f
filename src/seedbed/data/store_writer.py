"""Building of stores: aside, hashed as rows pass, resumed after an interruption, renamed into place."""

import glob
import hashlib
import json
import os
import shutil
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data import store
from seedbed.data.store import DTYPES, FORMAT, Store, digest
from seedbed.track import files


class Writer:
    """Builds a store in a temporary folder and renames it; continues what a killed process had saved.

    `plan` identifies what is being built: a partial store of another plan is removed.
    """

    def __init__(self, path: Path, plan: str):
        self.path, self.plan = path, plan
        self.aside = path.with_name(f".{path.name}.partial")
        saved = self._saved()
        if saved is None and self.aside.exists():
            shutil.rmtree(self.aside)
        self.aside.mkdir(parents=True, exist_ok=True)
        self.state: dict[str, Any] = saved["state"] if saved else {}
        self._past: dict[str, Any] = saved["arrays"] if saved else {}
        self.arrays: dict[str, _Growing] = {}

    def array(self, name: str, dtype: np.dtype, row: tuple[int, ...] = ()) -> None:
        """Start or continue an array; `row` is the shape of its rows."""
        self.arrays[name] = _Growing(self.aside, name, dtype, row, self._past.get(name))

    def _saved(self) -> dict[str, Any] | None:
        try:
            saved = json.loads((self.aside / "progress.json").read_bytes())
            whole = all(
                (self.aside / f"{name}.bin").stat().st_size >= past["num_bytes"] for name, past in saved["arrays"].items()
            )
        except (OSError, ValueError):
            return None
        return saved if whole and saved["plan"] == self.plan else None

    def append(self, name: str, rows: np.ndarray) -> None:
        self.arrays[name].append(rows)

    def save(self, **state: Any) -> None:
        """A point from which a killed process continues: bytes are synced first, then the note of their number."""
        self.state = state
        for array in self.arrays.values():
            array.sync()
        past = {name: array.past() for name, array in self.arrays.items()}
        files.write_atomic(self.aside / "progress.json", json.dumps({"plan": self.plan, "arrays": past, "state": state}))

    def commit(self, *, splits: dict[str, tuple[int, int]], limits: dict[str, int], extra: list[str], **facts: Any) -> Store:
        """Write the manifest, move the folder into place, and open it. `extra` names further files inside."""
        for array in self.arrays.values():
            array.sync()
            array.close()
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "arrays": {n: a.info() | ({"limit": limits[n]} if n in limits else {}) for n, a in self.arrays.items()},
            "files": {name: hashlib.sha256((self.aside / name).read_bytes()).hexdigest() for name in extra},
            "splits": {name: list(bounds) for name, bounds in splits.items()},
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **facts,
        }
        content = {n: [i["dtype"], i["shape"], i["sha256"]] for n, i in manifest["arrays"].items()}
        manifest["fingerprint"] = digest([content, manifest["splits"], facts.get("tokenizer")])[:16]
        manifest["hash"] = digest(manifest)
        files.write_atomic(self.aside / "manifest.json", json.dumps(manifest, indent=1))
        _move_into_place(self.aside, self.path)
        (self.path / "progress.json").unlink(missing_ok=True)
        return Store.open(self.path, check=False)

    def close(self) -> None:
        for array in self.arrays.values():
            array.close()

    def discard(self) -> None:
        """Remove what was built so far."""
        self.close()
        shutil.rmtree(self.aside)


class _Growing:
    """One array while it is written, hashed chunk by chunk."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, row: tuple[int, ...], past: dict[str, Any] | None):
        assert dtype.str in DTYPES
        self.dtype, self.row = dtype, row
        past = past or {"num_bytes": 0, "chunks": [], "min": None, "max": None}
        self.num_bytes, self.chunks = past["num_bytes"], past["chunks"]
        self.low, self.high = past["min"], past["max"]
        file = folder / f"{name}.bin"
        self.fd: int | None = files.open_append(file)
        os.ftruncate(self.fd, self.num_bytes)
        with open(file, "rb") as handle:
            handle.seek(len(self.chunks) * store.CHUNK)
            self.hash = hashlib.sha256(handle.read())

    def append(self, rows: np.ndarray) -> None:
        assert self.fd is not None and rows.shape[1:] == self.row and rows.dtype == self.dtype
        if not rows.size:
            return
        if self.dtype.kind in "iu":
            low, high = int(rows.min()), int(rows.max())
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)
        written = rows.tobytes()
        files.write(self.fd, written)
        data = memoryview(written)
        while data:
            room = store.CHUNK - self.num_bytes % store.CHUNK
            self.hash.update(data[:room])
            self.num_bytes += len(data[:room])
            if self.num_bytes % store.CHUNK == 0:
                self.chunks.append(self.hash.hexdigest())
                self.hash = hashlib.sha256()
            data = data[room:]

    def sync(self) -> None:
        assert self.fd is not None
        files.fsync(self.fd)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    @property
    def num_rows(self) -> int:
        return self.num_bytes // (self.dtype.itemsize * prod(self.row))

    def past(self) -> dict[str, Any]:
        return {"num_bytes": self.num_bytes, "chunks": self.chunks, "min": self.low, "max": self.high}

    def info(self) -> dict[str, Any]:
        chunks = self.chunks + ([self.hash.hexdigest()] if self.num_bytes % store.CHUNK else [])
        shape = [self.num_rows, *self.row]
        extent = {} if self.high is None else {"min": self.low, "max": self.high}
        return {"dtype": self.dtype.str, "shape": shape, "sha256": digest(chunks), "chunks": chunks, **extent}


def _move_into_place(aside: Path, path: Path) -> None:
    """Rename; an existing store is renamed first, and removed once the new one is in place."""
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    if path.exists():
        files.replace(path, old)
    files.replace(aside, path)
    files.sync_folder(path.parent)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.old-*"):
        shutil.rmtree(leftover, ignore_errors=True)
