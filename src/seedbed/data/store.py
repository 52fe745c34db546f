"""Stores: a folder of raw little-endian arrays, memory-mapped, with a manifest that can tell when anything in it changed."""

import contextlib
import fcntl
import glob
import hashlib
import json
import mmap
import os
import random
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data import limits
from seedbed.errors import UserError
from seedbed.track import files

FORMAT = 1
CHUNK = 16 << 20
MAX_MANIFEST = 64 << 20
# What is hashed before use, so that starting stays a matter of a second: a store up to this size whole, a larger one in part.
SURE_BYTES = 1 << 30
DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8")


class DamagedStore(UserError):
    """A store that is not what its manifest says."""


def digest(value: Any) -> str:
    """A content hash of plain values, the same on any machine."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def is_store(path: Path) -> bool:
    """Whether a folder calls itself a store; what cannot be looked at does not."""
    with contextlib.suppress(OSError):
        return (path / "manifest.json").is_file()
    return False


class Store:
    """An opened store: `arrays` are read-only memory maps, `manifest` says what they are."""

    def __init__(self, path: Path, manifest: dict[str, Any], arrays: dict[str, np.ndarray]):
        self.path, self.manifest, self.arrays = path, manifest, arrays

    @classmethod
    def open(cls, path: Path, *, check: bool = True) -> "Store":
        """Open after quick checks: the manifest is whole, every file has its size, and chunks match their checksums.

        Of a store beyond `SURE_BYTES` some chunks are hashed, others each time; `check=False` hashes none.
        """
        manifest = _read_manifest(path)
        for name in manifest["files"]:
            if not (path / name).is_file():
                raise damaged(path, f"{name} is missing", manifest)
        store = cls(path, manifest, {name: _map(path, name, manifest) for name in manifest["arrays"]})
        if check:
            store._refuse_damage()
        return store

    def _refuse_damage(self) -> None:
        stats = [(self.path / f"{name}.bin").stat() for name in self.arrays]
        key = (str(self.path.resolve()), self.fingerprint, *((s.st_size, s.st_mtime_ns, s.st_ino) for s in stats))
        if key in _sound:
            return
        chunks = [(name, k) for name in self.arrays for k in range(len(self.manifest["arrays"][name]["chunks"]))]
        if len(chunks) * CHUNK > SURE_BYTES:
            chunks = random.Random().sample(chunks, SURE_BYTES // CHUNK)
        for name, k in chunks:
            flat = self.arrays[name].reshape(-1).view(np.uint8)
            if problem := _chunk_problem(name, flat, k, self.manifest["arrays"][name]["chunks"][k]):
                raise damaged(self.path, problem, self.manifest)
        _sound.add(key)

    @property
    def fingerprint(self) -> str:
        """Names the content: equal arrays, splits and tokenizer give equal fingerprints, wherever they were made."""
        return self.manifest["fingerprint"]

    def split(self, name: str, array: str) -> np.ndarray:
        start, end = self.manifest["splits"][name]
        return self.arrays[array][start:end]

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
        """Everything that is wrong, in words: hashes by chunk, splits, and values against the recorded range."""
        wrong = _check_splits(self.manifest)
        for name, sha in self.manifest["files"].items():
            if hashlib.sha256((self.path / name).read_bytes()).hexdigest() != sha:
                wrong.append(f"{name} differs from its checksum")
        total = sum(array.nbytes for array in self.arrays.values())
        done = 0
        for name, array in self.arrays.items():
            for problem in _check_array(name, array, self.manifest["arrays"][name]):
                if problem:
                    wrong.append(problem)
                done += CHUNK
                progress(min(done, total), total)
        return wrong


def damaged(path: Path, what: str, manifest: dict[str, Any] | None = None) -> DamagedStore:
    """The error that names the damage and the way out."""
    known = (manifest or {}).get("rebuild")
    way = f"rebuild it: {known}" if isinstance(known, str) else f"remove it (rm -r {shlex.quote(str(path))}) and prepare it again"
    return DamagedStore(f"store {path} is damaged: {what}\n{way}")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    if not path.is_dir():
        raise UserError(f"there is no store at {path}; make one with: seedbed data prepare PATH")
    if not file.is_file():
        raise UserError(f"{path} is no store: it has no manifest.json; make one with: seedbed data prepare PATH")
    if file.stat().st_size > MAX_MANIFEST:
        raise damaged(path, f"manifest.json is larger than {MAX_MANIFEST >> 20} MiB")
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as error:
        raise damaged(path, f"manifest.json is not JSON ({error})") from None
    if not isinstance(manifest, dict) or "hash" not in manifest:
        raise damaged(path, "manifest.json lacks its checksum")
    if manifest.pop("hash") != digest(manifest):
        raise damaged(path, "manifest.json was changed: it differs from its checksum", manifest)
    if not all(limits.is_plain_name(name) for name in manifest["files"]):
        raise damaged(path, "manifest.json names files outside the store")
    if manifest["format"] != FORMAT:
        raise UserError(f"store {path} has format {manifest['format']}, this version reads {FORMAT}; prepare it again")
    return manifest


def _map(path: Path, name: str, manifest: dict[str, Any]) -> np.ndarray:
    info = manifest["arrays"][name]
    if info["dtype"] not in DTYPES or not re.fullmatch(r"[a-z0-9_]+", name):
        raise damaged(path, f"array {name!r} of type {info['dtype']!r} is not one that a store may hold", manifest)
    dtype, shape, file = np.dtype(info["dtype"]), tuple(info["shape"]), path / f"{name}.bin"
    if not file.is_file():
        raise damaged(path, f"{name}.bin is missing", manifest)
    size = prod(shape) * dtype.itemsize
    if file.stat().st_size != size:
        raise damaged(path, f"{name}.bin has {file.stat().st_size:,} bytes instead of {size:,}", manifest)
    if size == 0:
        return np.empty(shape, dtype)
    with open(file, "rb") as handle:
        return np.frombuffer(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), dtype).reshape(shape)


# Stores of this process whose chunks were hashed and have not been written since.
_sound: set[tuple[Any, ...]] = set()


def _chunk_problem(name: str, flat: np.ndarray, number: int, sha: str) -> str:
    """What is wrong with one chunk; nothing when it is sound."""
    chunk = flat[number * CHUNK : (number + 1) * CHUNK]
    if hashlib.sha256(chunk.data).hexdigest() == sha:
        return ""
    start = number * CHUNK
    return f"{name}.bin: chunk {number} (bytes {start:,} to {start + len(chunk) - 1:,}) differs from its checksum"


def _check_array(name: str, array: np.ndarray, info: dict[str, Any]) -> Iterator[str]:
    """One line per chunk, empty when it is sound; after the last one, what is wrong with the values."""
    flat = array.reshape(-1).view(np.uint8)
    starts = range(0, flat.size, CHUNK)
    if len(starts) != len(info["chunks"]):
        yield f"{name}.bin has {len(starts)} chunks, its manifest names {len(info['chunks'])}"
    low, high = [], []
    for start, sha in zip(starts, info["chunks"], strict=False):
        yield _chunk_problem(name, flat, start // CHUNK, sha)
        if "max" in info:
            chunk = flat[start : start + CHUNK]
            low.append(chunk.view(array.dtype).min())
            high.append(chunk.view(array.dtype).max())
    if high and [int(min(low)), int(max(high))] != [info["min"], info["max"]]:
        yield f"{name}.bin holds values {min(low)} to {max(high)}, its manifest says {info['min']} to {info['max']}"
    if high and "limit" in info and max(high) >= info["limit"]:
        yield f"{name}.bin holds {max(high)}, but values must stay below {info['limit']}"


def _check_splits(manifest: dict[str, Any]) -> list[str]:
    """Splits follow one another and together are the whole."""
    (num_rows,) = {info["shape"][0] for info in manifest["arrays"].values()}
    wrong, end = [], 0
    for name, (start, stop) in sorted(manifest["splits"].items(), key=lambda item: item[1]):
        if start != end:
            wrong.append(
                f"split {name} starts at {start:,}, {'inside' if start < end else 'after a gap to'} the split before ({end:,})"
            )
        if stop <= start:
            wrong.append(f"split {name} is empty ({start:,} to {stop:,})")
        end = stop
    if end != num_rows:
        wrong.append(f"splits end at {end:,}, the arrays have {num_rows:,} rows")
    return wrong


class Writer:
    """Builds a store aside and renames it into place; what a killed process had saved is continued.

    `plan` names what is being built: a half-built store of another plan is thrown away.
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
        """Begin or continue an array; `row` is the shape of its rows."""
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
        """From here a killed process continues: the bytes are on the disk, then the note that says so."""
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
        """Throw away what was built so far."""
        self.close()
        shutil.rmtree(self.aside)


class _Growing:
    """One array on its way to the disk, hashed as it passes."""

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


def _move_into_place(aside: Path, path: Path) -> None:
    """Rename; a store that stood there steps aside first and goes when the new one stands."""
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    if path.exists():
        files.replace(path, old)
    files.replace(aside, path)
    files.sync_folder(path.parent)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.old-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def building(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Only one process builds a store; the others wait and then find it ready."""
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
