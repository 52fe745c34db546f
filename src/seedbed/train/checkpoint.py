"""Checkpoints: complete, atomic, verified by checksum, and falling back to the one before when damaged.

A checkpoint is a folder `step-000240/` with safetensors files, `state.json`, and `manifest.json` with the sha256 of each and,
where ranks wrote pieces, their rows. It is built aside, synced and re-read before one rename gives it its name: then it is whole.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from seedbed.data import limits
from seedbed.dist.ranks import ALONE, Ranks
from seedbed.dist.shards import Rows
from seedbed.errors import UserError
from seedbed.track import files

FORMAT = 1


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the text names the file and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, read into memory."""

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])


@dataclass(frozen=True)
class Part:
    """What one rank saves and reads of a checkpoint: the rows of a tensor by file and name, None being all of them."""

    ranks: Ranks = ALONE
    rows: Callable[[str, str], Rows | None] = lambda file, name: None


WHOLE = Part()


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def save(folder: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], part: Part = WHOLE) -> Path:
    """Write a checkpoint so that at every instant the folder holds only whole ones; all ranks call it, and all learn the end.

    Every rank writes the pieces it holds; the first one writes what is whole, then state and manifest, and gives the name.
    """
    final, aside, ranks = folder / folder_name(step), folder / f".aside-{folder_name(step)}", part.ranks
    if ranks.tell(final.exists()):
        return final
    try:
        _agree(ranks, lambda: _make_aside(folder, aside) if ranks.is_first else None)
        written = _agree(ranks, lambda: _write_part(aside, tensors, part))
        _agree(ranks, lambda: _commit(aside, final, step, state, written) if ranks.is_first else None)
    except OSError:
        if ranks.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def _agree(ranks: Ranks, act: Callable[[], Any]) -> list[Any]:
    """What `act` gives on every rank; an error of the disk on one rank is raised on all of them."""
    if ranks.is_alone:
        return [act()]
    done, problem = None, ""
    try:
        done = act()
    except OSError as error:
        problem = f"rank {ranks.rank}: {error}"
    found = ranks.collect([done, problem])
    for _, told in found:
        if told:
            raise OSError(told)
    return [done for done, _ in found]


def _make_aside(folder: Path, aside: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()


def _write_part(aside: Path, tensors: dict[str, dict[str, Tensor]], part: Part) -> dict[str, dict[str, Any]]:
    """Write this rank's files: checksum and, where a tensor is a piece, [its first row, rows in all], by file."""
    ranks, written = part.ranks, {}
    if ranks.copy_rank:
        return {}  # the other copies of the weights hold the same
    for file, group in tensors.items():
        pieces = {n: rows for n in group if (rows := part.rows(file, n)) is not None}
        own = {n: t for n, t in group.items() if (len(t) if n in pieces else ranks.is_first)}
        if not own and not ranks.is_first:
            continue
        of_all = f"-{ranks.shard_rank + 1:05d}-of-{ranks.degrees.shard:05d}" if ranks.degrees.shard > 1 else ""
        path = aside / f"{file}{of_all}.safetensors"
        wanted = _write(path, safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in own.items()}))
        _read_back(path, wanted)
        written[path.name] = {"sha256": wanted, "pieces": {n: [pieces[n].first, pieces[n].num] for n in own if n in pieces}}
    return written


def _commit(aside: Path, final: Path, step: int, state: dict[str, Any], written: list[dict[str, dict[str, Any]]]) -> None:
    """Everything is on the disk: say so in the manifest, and rename."""
    facts = {name: fact for part in written for name, fact in part.items()}
    hashes = {name: fact["sha256"] for name, fact in facts.items()}
    hashes["state.json"] = _write(aside / "state.json", json.dumps({**state, "step": step}, indent=1).encode())
    _read_back(aside / "state.json", hashes["state.json"])
    manifest = {"format": FORMAT, "step": step, "torch": torch.__version__, "sha256": hashes}
    pieces = {name: fact["pieces"] for name, fact in facts.items() if fact["pieces"]}
    _write(aside / "manifest.json", json.dumps({**manifest, **({"pieces": pieces} if pieces else {})}, indent=1).encode())
    files.sync_folder(aside)
    files.replace(aside, final)
    files.sync_folder(final.parent)


def _read_back(path: Path, wanted: str) -> None:
    if _hash_file(path) != wanted:
        raise OSError(f"{path} reads back differently from what was written: the disk is failing")


def load(path: Path, part: Part = WHOLE) -> Checkpoint:
    """Read and verify one checkpoint, of which ranks read what they hold; raises Damaged with the reason, on all of them."""
    manifest = _read_json(path / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise Damaged(f"{path.name}: format {manifest.get('format')} is not {FORMAT}; written by another version")
    hashes = _hashes(path, manifest)
    if part.ranks.is_alone and "pieces" not in manifest:
        contents = {name: _verified(path / name, wanted) for name, wanted in hashes.items()}
        state = _parsed_state(path, contents.pop("state.json"))
        with _only_tensors(path):
            tensors = {name.removesuffix(".safetensors"): _parsed(data) for name, data in contents.items()}
        return Checkpoint(path, tensors, state)
    state = _parsed_state(path, _verified(path / "state.json", hashes.pop("state.json")))
    _verify_together(path, hashes, part.ranks)
    with _only_tensors(path):
        return Checkpoint(path, _read_rows(path, hashes, manifest.get("pieces", {}), part), state)


def _hashes(path: Path, manifest: dict[str, Any]) -> dict[str, str]:
    """Checksum by file, as the manifest names them: files of this folder, and only of the kinds we write."""
    hashes = manifest.get("sha256", {})
    for name in hashes:
        if not limits.is_plain_name(name) or not (name == "state.json" or name.endswith(".safetensors")):
            raise Damaged(f"{path.name}/manifest.json names {name!r}, which is no file of a checkpoint")
    if "state.json" not in hashes:
        raise Damaged(f"{path.name}/manifest.json names no state.json")
    return dict(hashes)


def _parsed_state(path: Path, data: bytes) -> dict[str, Any]:
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        raise Damaged(f"{path.name}/state.json is not JSON") from None
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise Damaged(f"{path.name}/state.json is not the state of a run")
    return state


def _parsed(data: bytes) -> dict[str, Tensor]:
    if problem := limits.header_problem(data[:8]):
        raise ValueError(problem)
    return safetensors.torch.load(data)


@contextlib.contextmanager
def _only_tensors(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file that should hold tensors, the checkpoint is damaged; no other reader is tried."""
    try:
        yield
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name} holds a file that is not safetensors: {error}") from None


def _verify_together(path: Path, hashes: dict[str, str], ranks: Ranks) -> None:
    """Every file is checked by one rank, and all learn what is wrong."""
    problem = ""
    for name, wanted in ranks.mine(sorted(hashes.items())):
        try:
            if _hash_file(path / name) != wanted:
                problem = f"{path.name}/{name} does not match its checksum"
        except OSError as error:
            problem = f"{path.name}/{name} cannot be read ({error.strerror})"
    found = next((told for told in ranks.collect(problem) if told), "")
    if found:
        raise Damaged(found)


def _read_rows(path: Path, hashes: dict[str, str], pieces: dict[str, Any], part: Part) -> dict[str, dict[str, Tensor]]:
    """Tensors put together from the pieces that overlap what this rank holds; nothing else is read."""
    tensors: dict[str, dict[str, Tensor]] = {}
    missed: dict[str, dict[str, int]] = {}
    for name in sorted(hashes):
        file = re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", name)
        group, missing = tensors.setdefault(file, {}), missed.setdefault(file, {})
        limits.require_header(path / name)
        with safetensors.safe_open(path / name, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118, it is no dict
                _read_piece(opened, key, pieces.get(name, {}).get(key), part.rows(file, key), group, missing)
    for file, found in missed.items():
        for key, num in found.items():
            if num:
                raise Damaged(f"{path.name} lacks {num} rows of {file} tensor {key}")
    return tensors


def _read_piece(
    opened: Any, key: str, piece: list[int] | None, wanted: Rows | None, group: dict[str, Tensor], missing: dict[str, int]
) -> None:
    """Copy the rows that are wanted of one saved piece; `missing` counts those that other pieces must bring."""
    if piece is None and wanted is None:
        group[key] = opened.get_tensor(key)
        return
    held = opened.get_slice(key)
    shape, empty = held.get_shape(), held[:0]
    first, num = piece or (0, shape[0])
    low, high = (wanted.first, wanted.last) if wanted else (0, num)
    if wanted and wanted.num != num:  # another model: `restore` will say so
        group[key] = torch.empty(num, *shape[1:], device="meta")
        return
    if key not in group:
        group[key], missing[key] = empty.new_empty(high - low, *shape[1:]), high - low
    start, stop = max(low, first), min(high, first + shape[0])
    if stop > start:
        group[key][start - low : stop - low] = held[start - first : stop - first]
        missing[key] -= stop - start


def load_newest(folder: Path, warn: Any = print, part: Part = WHOLE) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over. None when there never was one."""
    names = part.ranks.tell([path.name for path in steps_in(folder)])
    for name in reversed(names):
        try:
            return load(folder / name, part)
        except Damaged as problem:
            warn(f"checkpoint damaged, falling back to the one before: {problem}")
    if names:
        raise UserError(f"every checkpoint in {folder} is damaged; start the run again under another name")
    return None


def steps_in(folder: Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and not p.is_symlink())


def best(folder: Path) -> Path | None:
    """The checkpoint that `best` points at, if there is one."""
    link = folder / "best"
    path = link.resolve()
    # A link that leads elsewhere is none of ours.
    return path if link.is_symlink() and path.is_dir() and path.parent == folder.resolve() else None


def mark_best(folder: Path, path: Path) -> None:
    """Point `best` at a checkpoint, in one rename."""
    link = folder / ".aside-best"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    files.replace(link, folder / "best")


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` and the best."""
    kept = best(folder)
    for path in steps_in(folder)[:-keep]:
        if path.resolve() != kept:
            remove(path)
    for leftover in folder.glob(".aside-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


def remove(path: Path) -> None:
    """Take a checkpoint away; the manifest goes first, since a half-removed folder must not look whole."""
    (path / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def forget_after(folder: Path, step: int) -> None:
    """Remove checkpoints beyond `step`: damaged, or from a course the run has left."""
    for path in steps_in(folder):
        if path.name > folder_name(step):
            remove(path)


@torch.no_grad()
def restore(into: dict[str, dict[str, Tensor]], saved: dict[str, dict[str, Tensor]], where: str) -> None:
    """Copy saved tensors into live ones, in place, so that a captured step goes on with the same addresses."""
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


def _write(path: Path, data: bytes) -> str:
    files.write_synced(path, data)
    return hashlib.sha256(data).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified(path: Path, wanted: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.parent.name}/{path.name} cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != wanted:
        raise Damaged(f"{path.parent.name}/{path.name} does not match its checksum")
    return data


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = limits.read_json(path)
    except (OSError, ValueError):
        raise Damaged(f"{path.parent.name}/{path.name} is missing or unreadable") from None
    if not isinstance(value, dict) or not isinstance(value.get("sha256", {}), dict):
        raise Damaged(f"{path.parent.name}/{path.name} is not a manifest")
    return value
