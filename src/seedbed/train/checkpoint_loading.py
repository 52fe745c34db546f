"""Reading of checkpoints: verified by checksum, assembled from shards, and falling back to the one before when damaged."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from seedbed.data import limits
from seedbed.data.store import digest
from seedbed.dist import Ranks
from seedbed.errors import UserError
from seedbed.track import files
from seedbed.track.files import is_plain_name
from seedbed.track.folders import step_of
from seedbed.train.checkpoint import FORMAT, FULL, Part, hash_file, steps_in

if TYPE_CHECKING:
    from seedbed.dist.shards import Rows

T = TypeVar("T")


class Damaged(Exception):
    """A damaged checkpoint; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, read into memory."""

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    origin: dict[str, Any] = field(default_factory=dict)  # the run that wrote it; empty where an older version did

    @property
    def step(self) -> int:
        return int(self.state["step"])


def load(path: Path, part: Part = FULL, groups: Collection[str] | None = None) -> Checkpoint:
    """Read and verify one checkpoint; every rank reads its own rows. Damage is raised on all ranks.

    With `groups`, only files of these groups of tensors are read; the others may be missing.
    """
    ranks = part.ranks
    manifest, state = _together(ranks, path, lambda: _read_facts(path))
    if groups is not None:
        wanted = {n for n in manifest["sha256"] if n == "state.json" or _group(n) in groups}
        for key in manifest.keys() & {"sha256", "pieces"}:
            manifest[key] = {n: facts for n, facts in manifest[key].items() if n in wanted}
    hashes, origin = {n: h for n, h in manifest["sha256"].items() if n != "state.json"}, manifest.get("run", {})
    if ranks.is_single and "pieces" not in manifest and len(set(map(_group, hashes))) == len(hashes):
        found = _together(ranks, path, lambda: {_group(n): read_tensors(path / n, h) for n, h in hashes.items()})
        return Checkpoint(path, found, state, origin)
    _together(ranks, path, lambda: _verify_files(path, ranks.shard_of(sorted(hashes.items()))))
    return Checkpoint(path, _together(ranks, path, lambda: _read_rows(path, manifest, part)), state, origin)


def _together(ranks: Ranks, path: Path, act: Callable[[], T]) -> T:
    """This rank's result of `act`, once every rank has done it; damage that one rank finds is raised on all of them."""
    found, problem = None, ""
    try:
        found = act()
    except Damaged as damage:
        problem = str(damage)
    except OSError as error:
        problem = f"{path.name} cannot be read ({error.strerror or error})"
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError, OverflowError) as error:
        problem = f"{path.name} holds a file that is not safetensors: {error}"
    message = next(filter(None, ranks.all_gather_object(problem)), "")
    if message:
        raise Damaged(message)
    return found  # type: ignore[return-value]


def _read_facts(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and state; their step must be the one in the folder's name."""
    manifest = read_manifest(path)
    try:
        state = json.loads(_verified(path / "state.json", manifest["sha256"]["state.json"]))
    except (ValueError, RecursionError):
        raise Damaged(f"{path.name}/state.json is not JSON") from None
    if not isinstance(state, dict) or type(state.get("step")) is not int:
        raise Damaged(f"{path.name}/state.json is not the state of a run")
    if manifest.get("step") != state["step"] or step_of(path.name) not in (None, state["step"]):
        raise Damaged(f"{path.name} holds the state of step {state['step']}")
    return manifest, state


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, verified by its own checksum; tensors are not read."""
    try:
        manifest = files.read_json(path / "manifest.json")
    except (OSError, ValueError):
        raise Damaged(f"{path.name}/manifest.json is missing or unreadable") from None
    if not isinstance(manifest, dict):
        raise Damaged(f"{path.name}/manifest.json is not a manifest")
    if manifest.get("format") not in (1, FORMAT):
        raise Damaged(f"{path.name}: format {manifest.get('format')} is not {FORMAT}; written by another version")
    wanted = manifest.pop("hash", None)
    # Format 1 had no checksum of the manifest.
    if (manifest["format"] != 1 or wanted is not None) and wanted != digest(manifest):
        raise Damaged(f"{path.name}/manifest.json does not match its checksum")
    # The manifest must name only files of this folder, of kinds that `save` writes, and valid rows for every shard.
    hashes, shards, run = manifest.get("sha256"), manifest.get("pieces", {}), manifest.get("run", {})
    if not isinstance(hashes, dict) or not isinstance(shards, dict) or not isinstance(run, dict):
        raise Damaged(f"{path.name}/manifest.json is not a manifest")
    for name in (*hashes, *shards):
        if not is_plain_name(name) or not (name == "state.json" or name.endswith(".safetensors")):
            raise Damaged(f"{path.name}/manifest.json names {name!r}, which is no file of a checkpoint")
    if "state.json" not in hashes:
        raise Damaged(f"{path.name}/manifest.json names no state.json")
    for name, found in shards.items():
        if name not in hashes or not isinstance(found, dict) or not all(map(_is_row_range, found.values())):
            raise Damaged(f"{path.name}/manifest.json does not say which rows {name} holds")
    return manifest


def _is_row_range(value: Any) -> bool:
    ints = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
    return ints and 0 <= value[0] < value[1] < 2**62


def read_tensors(path: Path, wanted: str) -> dict[str, Tensor]:
    """The tensors of a file that must have this checksum."""
    data = _verified(path, wanted)
    if problem := limits.header_problem(data[:8]):
        raise ValueError(problem)
    return safetensors.torch.load(data)


def _verify_files(path: Path, hashes: Iterable[tuple[str, str]]) -> None:
    for name, wanted in hashes:
        try:
            if hash_file(path / name) != wanted:
                raise Damaged(f"{path.name}/{name} does not match its checksum")
        except OSError as error:
            raise Damaged(f"{path.name}/{name} cannot be read ({error.strerror})") from None


class _Shard(NamedTuple):
    """Rows of a tensor in one file: from `first` on, of `num` in total; `num` is None for an unsharded tensor."""

    opened: Any
    first: int
    num: int | None
    shape: tuple[int, ...]


def _group(name: str) -> str:
    """The group of tensors that a file belongs to: `model` for model-00001-of-00002.safetensors."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", name)


def _read_rows(path: Path, manifest: dict[str, Any], part: Part) -> dict[str, dict[str, Tensor]]:
    """This rank's rows of every tensor, from the shards that overlap them; nothing else is read."""
    tensors: dict[str, dict[str, Tensor]] = {}
    with contextlib.ExitStack() as stack:
        for group, found in _open_shards(path, manifest, stack).items():
            tensors[group] = {}
            for key, shards in found.items():
                _require_cover(f"{group} tensor {key}", path, shards)
                tensors[group][key] = _assemble(key, shards, part.rows(group, key))
    return tensors


def _open_shards(path: Path, manifest: dict[str, Any], stack: contextlib.ExitStack) -> dict[str, dict[str, list[_Shard]]]:
    """The shards of every tensor, by group and name, sorted by row; only headers are read."""
    found: dict[str, dict[str, list[_Shard]]] = {}
    for name in sorted(manifest["sha256"].keys() - {"state.json"}):
        limits.require_header(path / name)
        opened = stack.enter_context(safetensors.safe_open(path / name, framework="pt"))
        rows, keys = manifest.get("pieces", {}).get(name, {}), list(opened.keys())
        if rows.keys() - set(keys):
            raise Damaged(f"{path.name}/{name} lacks tensors that the manifest names")
        for key in keys:
            first, num = rows.get(key, (0, None))
            shard = _Shard(opened, first, num, tuple(opened.get_slice(key).get_shape()))
            found.setdefault(_group(name), {}).setdefault(key, []).append(shard)
    for group in found.values():
        for shards in group.values():
            shards.sort(key=lambda shard: shard.first)
    return found


def _require_cover(what: str, path: Path, shards: list[_Shard]) -> None:
    """The shards must cover the tensor exactly: no row is missing, and none is there twice."""
    one = shards[0]
    if one.num is None:
        if len(shards) > 1:
            raise Damaged(f"{path.name} holds {what} more than once")
        return
    if any(p.num != one.num or len(p.shape) == 0 or p.shape[1:] != one.shape[1:] for p in shards):
        raise Damaged(f"{path.name} holds shards of {what} that do not belong together")
    end = 0
    for shard in shards:
        if shard.first < end or shard.first + shard.shape[0] > one.num:
            raise Damaged(f"{path.name} holds rows of {what} twice, or too many")
        end = shard.first + shard.shape[0] if shard.first == end else end
    if end < one.num:
        raise Damaged(f"{path.name} lacks {one.num - sum(p.shape[0] for p in shards)} rows of {what}")


def _assemble(key: str, shards: list[_Shard], wanted: "Rows | None") -> Tensor:
    """The wanted rows of a tensor, or all of them."""
    one = shards[0]
    if one.num is None and wanted is None:
        return one.opened.get_tensor(key)
    num = one.num if one.num is not None else one.shape[0]
    if wanted and wanted.num != num:  # another model: `restore` raises the error
        return torch.empty(num, *one.shape[1:], device="meta")
    low, high = (wanted.first, wanted.last) if wanted else (0, num)
    overlaps = [(p, max(low, p.first) - p.first, min(high, p.first + p.shape[0]) - p.first) for p in shards]
    rows = [p.opened.get_slice(key)[start:stop] for p, start, stop in overlaps if stop > start]
    return torch.cat(rows or [one.opened.get_slice(key)[:0]])


def load_newest(folder: Path, warn: Any = print, part: Part = FULL, groups: Collection[str] | None = None) -> Checkpoint | None:
    """The newest undamaged checkpoint; damaged ones are reported and skipped. None when there is no checkpoint."""
    names = part.ranks.broadcast_object([path.name for path in steps_in(folder)])
    for name in reversed(names):
        try:
            return load(folder / name, part, groups)
        except Damaged as problem:
            warn(f"checkpoint damaged, falling back to the previous one: {problem}")
    if names:
        raise UserError(f"every checkpoint in {folder} is damaged; start the run again under another name")
    return None


@torch.no_grad()
def restore(into: dict[str, dict[str, Tensor]], saved: dict[str, dict[str, Tensor]], where: str) -> None:
    """Copy saved tensors into live ones, in place: captured CUDA graphs keep their addresses."""
    for name, group in into.items():
        if name not in saved:
            raise UserError(f"{where} has no {name} tensors; it was written with other settings")
        missing, extra = sorted(group.keys() - saved[name].keys()), sorted(saved[name].keys() - group.keys())
        if missing or extra:
            word, names = ("lacks", missing) if missing else ("has unknown", extra)
            raise UserError(f"{where} {word} {name} tensors: {', '.join(names[:3])}; it does not fit this model")
        for key, tensor in group.items():
            if tensor.shape != saved[name][key].shape:
                have, want = tuple(saved[name][key].shape), tuple(tensor.shape)
                raise UserError(f"{where}: {key} is {have}, this model wants {want}; it does not fit this model")
            tensor.copy_(saved[name][key])


def _verified(path: Path, wanted: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.parent.name}/{path.name} cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != wanted:
        raise Damaged(f"{path.parent.name}/{path.name} does not match its checksum")
    return data
