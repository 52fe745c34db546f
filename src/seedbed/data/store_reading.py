"""Opening a store: its manifest is intact and describes what is there, and its chunks match their checksums."""

import hashlib
import random
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data import store as stores
from seedbed.data.store import DTYPES, FORMAT, Store, damaged, digest, map_array
from seedbed.errors import UserError
from seedbed.track import files
from seedbed.track.files import is_plain_name

# Stores up to this size are hashed completely before use, larger ones in part, so that starting takes about a second.
SURE_BYTES = 1 << 30
# Stores of this process whose chunks were hashed and have not been written since.
_sound: set[tuple[Any, ...]] = set()


def read_store(path: Path, check: bool) -> Store:
    manifest = _read_manifest(path)
    for name in manifest["files"]:
        if not (path / name).is_file():
            raise damaged(path, f"{name} is missing", manifest)
    store = Store(path, manifest, {name: _map(path, name, manifest) for name in manifest["arrays"]})
    if check:
        _refuse_damage(store)
    return store


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    if not path.is_dir():
        raise UserError(f"there is no store at {path}; make one with: seedbed data prepare PATH")
    if not file.is_file():
        raise UserError(f"{path} is not a store: it has no manifest.json; make one with: seedbed data prepare PATH")
    try:
        manifest = files.read_json(file)
        sound = isinstance(manifest, dict) and "hash" in manifest and manifest.pop("hash") == digest(manifest)
    except OSError as error:
        raise damaged(path, f"manifest.json cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
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
    return map_array(file, dtype, shape)


def _refuse_damage(store: Store) -> None:
    """Hash chunks of a store that is to be used, unless this process has done so before."""
    stats = [(store.path / f"{name}.bin").stat() for name in store.arrays]
    key = (str(store.path.resolve()), store.fingerprint, *((s.st_size, s.st_mtime_ns, s.st_ino) for s in stats))
    if key in _sound:
        return
    counts = {name: len(store.manifest["arrays"][name]["chunks"]) for name in store.arrays}
    if any(num != -(-store.arrays[name].nbytes // stores.CHUNK) for name, num in counts.items()):
        raise damaged(store.path, "manifest.json does not name every chunk once", store.manifest)
    chunks = [(name, k) for name, num in counts.items() for k in range(num)]
    if len(chunks) * stores.CHUNK > SURE_BYTES:
        chunks = random.Random().sample(chunks, SURE_BYTES // stores.CHUNK)
    for name, k in chunks:
        flat = store.arrays[name].reshape(-1).view(np.uint8)
        if problem := chunk_problem(name, flat, k, store.manifest["arrays"][name]["chunks"][k]):
            raise damaged(store.path, problem, store.manifest)
    _sound.add(key)


def chunk_problem(name: str, flat: np.ndarray, number: int, sha: str) -> str:
    chunk = flat[number * stores.CHUNK : (number + 1) * stores.CHUNK]
    if hashlib.sha256(chunk.data).hexdigest() == sha:
        return ""
    start = number * stores.CHUNK
    return f"{name}.bin: chunk {number} (bytes {start:,} to {start + len(chunk) - 1:,}) differs from its checksum"
