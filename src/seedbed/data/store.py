"""Stores: a folder of raw little-endian arrays, memory-mapped, with a manifest of checksums."""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import random
import re
import shlex
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.errors import UserError
from seedbed.track.files import is_plain_name

FORMAT = 1
CHUNK = 16 << 20
MAX_MANIFEST = 64 << 20
# Stores up to this size are hashed completely before use, larger ones in part, so that starting takes about a second.
SURE_BYTES = 1 << 30
DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8")


class DamagedStore(UserError):
    """A store that differs from its manifest."""


def digest(value: Any) -> str:
    """A content hash of plain values, the same on any machine."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


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

        Of a store beyond `SURE_BYTES` some chunks are hashed, different ones each time; `check=False` hashes none.
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
        counts = {name: len(self.manifest["arrays"][name]["chunks"]) for name in self.arrays}
        if any(num != -(-self.arrays[name].nbytes // CHUNK) for name, num in counts.items()):
            raise damaged(self.path, "manifest.json does not name every chunk once", self.manifest)
        chunks = [(name, k) for name, num in counts.items() for k in range(num)]
        if len(chunks) * CHUNK > SURE_BYTES:
            chunks = random.Random().sample(chunks, SURE_BYTES // CHUNK)
        for name, k in chunks:
            flat = self.arrays[name].reshape(-1).view(np.uint8)
            if problem := chunk_problem(name, flat, k, self.manifest["arrays"][name]["chunks"][k]):
                raise damaged(self.path, problem, self.manifest)
        _sound.add(key)

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
    """The error that names the damage and the remedy."""
    known = (manifest or {}).get("rebuild")
    way = f"rebuild it: {known}" if isinstance(known, str) else f"remove it (rm -r {shlex.quote(str(path))}) and prepare it again"
    return DamagedStore(f"store {path} is damaged: {what}\n{way}")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    if not path.is_dir():
        raise UserError(f"there is no store at {path}; make one with: seedbed data prepare PATH")
    if not file.is_file():
        raise UserError(f"{path} is not a store: it has no manifest.json; make one with: seedbed data prepare PATH")
    if file.stat().st_size > MAX_MANIFEST:
        raise damaged(path, f"manifest.json is larger than {MAX_MANIFEST >> 20} MiB")
    try:
        manifest = json.loads(file.read_bytes())
        sound = isinstance(manifest, dict) and "hash" in manifest and manifest.pop("hash") == digest(manifest)
    except OSError as error:
        raise damaged(path, f"manifest.json cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise damaged(path, f"manifest.json is not JSON ({error})") from None
    except RecursionError:
        raise damaged(path, "manifest.json is nested too deeply") from None
    if not sound:
        known = isinstance(manifest, dict) and "fingerprint" in manifest
        what = "was changed: it differs from its checksum" if known else "lacks its checksum"
        raise damaged(path, f"manifest.json {what}", manifest if known else None)
    if manifest.get("format") != FORMAT:
        raise UserError(f"store {path} has format {manifest.get('format')}, this version reads {FORMAT}; prepare it again")
    if problem := _form_problem(manifest):
        raise damaged(path, f"manifest.json {problem}", manifest)
    return manifest


def _form_problem(manifest: dict[str, Any]) -> str:
    """What is wrong with the structure of a manifest, which a checksum does not prove; empty when it is valid."""
    wrong = [k for k in ("arrays", "files", "splits") if not isinstance(manifest.get(k), dict)]
    if wrong or not isinstance(manifest.get("fingerprint"), str):
        return f"lacks {', '.join(wrong) or 'a fingerprint'}"
    if not all(is_plain_name(name) and isinstance(sha, str) for name, sha in manifest["files"].items()):
        return "names files outside the store"
    for name, info in manifest["arrays"].items():
        if not isinstance(info, dict) or not _is_array(info):
            return f"does not describe the array {name!r}"
    if len({info["shape"][0] for info in manifest["arrays"].values()}) != 1:
        return "describes arrays of different lengths"
    if not all(map(_is_range, manifest["splits"].values())):
        return "names splits that are no ranges"
    return ""


def _is_array(info: dict[str, Any]) -> bool:
    shape, chunks = info.get("shape"), info.get("chunks")
    counts = isinstance(shape, list) and 0 < len(shape) <= 8 and all(type(n) is int and 0 <= n < 2**48 for n in shape)
    hashes = isinstance(chunks, list) and all(isinstance(sha, str) for sha in chunks)
    numbers = all(type(info.get(key, 0)) is int for key in ("min", "max", "limit")) and ("min" in info) == ("max" in info)
    return counts and hashes and numbers and isinstance(info.get("dtype"), str)


def _is_range(bounds: Any) -> bool:
    return isinstance(bounds, list) and len(bounds) == 2 and all(type(n) is int and 0 <= n < 2**48 for n in bounds)


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


def chunk_problem(name: str, flat: np.ndarray, number: int, sha: str) -> str:
    """What is wrong with one chunk; empty when it is intact."""
    chunk = flat[number * CHUNK : (number + 1) * CHUNK]
    if hashlib.sha256(chunk.data).hexdigest() == sha:
        return ""
    start = number * CHUNK
    return f"{name}.bin: chunk {number} (bytes {start:,} to {start + len(chunk) - 1:,}) differs from its checksum"


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
