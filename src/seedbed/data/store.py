"""Stores: a folder of raw little-endian arrays, memory-mapped, with a manifest of checksums.

store_reading.py opens them; `Writer` builds them.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import mmap
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.errors import UserError
from seedbed.track import files

FORMAT = 1
CHUNK = 16 << 20
DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8")

QUIET = 1.0  # seconds without a progress line


class DamagedStore(UserError):
    """A store that differs from its manifest."""


def digest(value: Any) -> str:
    """A content hash of plain values, the same on any machine."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def is_store(path: Path) -> bool:
    """Whether a folder has the manifest of a store; False where it cannot be read."""
    with contextlib.suppress(OSError):
        return (path / "manifest.json").is_file()
    return False


class Store:
    """An opened store: `arrays` are read-only memory maps, `manifest` describes them."""

    def __init__(self, path: Path, manifest: dict[str, Any], arrays: dict[str, np.ndarray]):
        self.path, self.manifest, self.arrays = path, manifest, arrays

    @classmethod
    def open(cls, path: Path, *, check: bool = True) -> "Store":
        """Open after quick checks: the manifest is intact, every file has its size, and chunks match their checksums.

        Of a large store some chunks are hashed, different ones each time; `check=False` hashes none.
        """
        from seedbed.data.store_reading import read_store

        return read_store(path, check)

    @property
    def fingerprint(self) -> str:
        """Identifies the content: equal arrays, splits and tokenizer give equal fingerprints on any machine."""
        return self.manifest["fingerprint"]

    def split(self, name: str, array: str) -> np.ndarray:
        start, end = self.manifest["splits"][name]
        return self.arrays[array][start:end]

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
        """A line for everything that is wrong: hashes by chunk, splits, and values against the recorded range."""
        from seedbed.data import store_verify

        return store_verify.problems(self, progress)


def damaged(path: Path, what: str, manifest: dict[str, Any] | None = None) -> DamagedStore:
    known = (manifest or {}).get("rebuild")
    way = f"rebuild it: {known}" if isinstance(known, str) else f"remove it (rm -r {shlex.quote(str(path))}) and prepare it again"
    return DamagedStore(f"store {path} is damaged: {what}\n{way}")


def map_array(file: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A file as a read-only array; an empty one cannot be mapped."""
    if not prod(shape):
        return np.empty(shape, dtype)
    with open(file, "rb") as handle:
        return np.frombuffer(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), dtype).reshape(shape)


@contextlib.contextmanager
def building(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let only one process build a store; the others wait and then use it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"cannot write in {path.parent}: {error.strerror}; choose another place with data.cache=") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"another process is preparing {path}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


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
        text = json.dumps({**manifest, "hash": digest(manifest)}, indent=1)
        files.write_atomic(self.aside / "manifest.json", text)
        # An existing store is renamed first, and removed once the new one is in place.
        if self.path.exists():
            files.replace(self.path, self.path.with_name(f".{self.path.name}.old-{os.getpid()}"))
        files.replace(self.aside, self.path)
        files.sync_folder(self.path.parent)
        for leftover in self.path.parent.glob(f".{glob.escape(self.path.name)}.old-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        (self.path / "progress.json").unlink(missing_ok=True)
        made = {name: (array.dtype, (array.num_rows, *array.row)) for name, array in self.arrays.items()}
        arrays = {name: map_array(self.path / f"{name}.bin", *form) for name, form in made.items()}
        return Store(self.path, json.loads(json.dumps(manifest)), arrays)

    def close(self) -> None:
        for array in self.arrays.values():
            array.close()

    def discard(self) -> None:
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
            handle.seek(len(self.chunks) * CHUNK)
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
            room = CHUNK - self.num_bytes % CHUNK
            self.hash.update(data[:room])
            self.num_bytes += len(data[:room])
            if self.num_bytes % CHUNK == 0:
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
        chunks = self.chunks + ([self.hash.hexdigest()] if self.num_bytes % CHUNK else [])
        shape = [self.num_rows, *self.row]
        extent = {} if self.high is None else {"min": self.low, "max": self.high}
        return {"dtype": self.dtype.str, "shape": shape, "sha256": digest(chunks), "chunks": chunks, **extent}


class Progress:
    """A line on standard error: amount done, rate and time left. Called with the amount done and the total, it prints nothing in
    the first second, then at intervals."""

    def __init__(self, what: str, unit: str = "bytes"):
        self.what, self.unit = what, unit
        self._start = self._spoke = time.monotonic()
        self._first: int | None = None
        self._open = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            # Continued work starts in the middle; the rate is that of this process.
            self._first, self._start = done, now
        terminal = sys.stderr.isatty()
        if now - self._start < QUIET or (now - self._spoke < (0.2 if terminal else 10.0) and done < total):
            return
        rate = (done - self._first) / (now - self._start)
        left = _time_left((total - done) / rate) if rate > 0 else "unknown"
        line = f"{self.what}: {self._size(done)} of {self._size(total)}, {self._size(rate)}/s, {left} left"
        sys.stderr.write(f"\r\x1b[2K{line}" if terminal else f"{line}\n")
        sys.stderr.flush()
        self._spoke, self._open = now, terminal

    def _size(self, count: float) -> str:
        if self.unit != "bytes":
            return f"{count:,.0f} {self.unit}"
        return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"

    def close(self) -> None:
        """End the line on a terminal."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False


def _time_left(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
