"""Checkpoints: complete, atomic, verified by checksum. checkpoint_loading.py reads them.

A checkpoint is a folder `step-000240/` with safetensors files, `state.json`, and `manifest.json` with the sha256 of each and of
itself, the run it belongs to and, where ranks wrote shards, their rows. It is written to a temporary folder, synced and read
back, then renamed: a folder with the final name is complete.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from seedbed.data.store import digest
from seedbed.dist import SINGLE, Ranks
from seedbed.track import files
from seedbed.track.folders import folder_name, step_names, step_of

if TYPE_CHECKING:
    from seedbed.dist.shards import Rows

FORMAT = 2


@dataclass(frozen=True)
class Part:
    """What one rank saves and reads of a checkpoint: its rows of a tensor, by file and name; None for all rows.

    `origin` describes the run and its config when a checkpoint is saved.
    """

    ranks: Ranks = SINGLE
    rows: "Callable[[str, str], Rows | None]" = lambda file, name: None
    origin: Callable[[], dict[str, Any]] = dict


FULL = Part()


def save(folder: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], part: Part = FULL) -> Path:
    """Write a checkpoint atomically; all ranks call it, and an error on one rank is raised on all.

    Every rank writes its shards. The primary rank also writes the unsharded tensors, then state and manifest, and renames.
    """
    final, aside, ranks = folder / folder_name(step), folder / f".aside-{folder_name(step)}", part.ranks
    if ranks.broadcast_object(final.exists()):
        return final
    try:
        ranks.agree(lambda: _make_aside(folder, aside) if ranks.is_primary else None)
        written = ranks.agree(lambda: _write_part(aside, tensors, part))
        facts = {**state, "step": step}
        ranks.agree(lambda: _commit(aside, final, facts, written, part.origin()) if ranks.is_primary else None)
    except OSError:
        if ranks.is_primary:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def _make_aside(folder: Path, aside: Path) -> None:
    # Not its parents: a run's folder that was removed must not be created again without its other files.
    folder.mkdir(exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()


def _write_part(aside: Path, tensors: dict[str, dict[str, Tensor]], part: Part) -> dict[str, dict[str, Any]]:
    """Write this rank's files; by file, the checksum and, for shards, [first row, total rows]."""
    ranks, written = part.ranks, {}
    if ranks.rank >= ranks.degrees.shard:
        return {}  # the first replica writes the same tensors
    for file, group in tensors.items():
        shards = {n: rows for n in group if (rows := part.rows(file, n)) is not None}
        own = {n: t for n, t in group.items() if (len(t) if n in shards else ranks.is_primary)}
        if not own and not ranks.is_primary:
            continue
        suffix = f"-{ranks.shard_rank + 1:05d}-of-{ranks.degrees.shard:05d}" if ranks.degrees.shard > 1 else ""
        path = aside / f"{file}{suffix}.safetensors"
        sha256 = _write(path, safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in own.items()}))
        written[path.name] = {"sha256": sha256, "pieces": {n: [shards[n].first, shards[n].num] for n in own if n in shards}}
    return written


def _commit(
    aside: Path, final: Path, state: dict[str, Any], written: list[dict[str, dict[str, Any]]], origin: dict[str, Any]
) -> None:
    """Once every tensor is on the disk: write state and manifest, and rename."""
    facts = {name: fact for part in written for name, fact in part.items()}
    hashes = {name: fact["sha256"] for name, fact in facts.items()}
    hashes["state.json"] = _write(aside / "state.json", json.dumps(state, indent=1).encode())
    manifest = {"format": FORMAT, "step": state["step"], "torch": torch.__version__, "sha256": hashes}
    manifest |= {"run": origin} if origin else {}
    shards = {name: fact["pieces"] for name, fact in facts.items() if fact["pieces"]}
    manifest |= {"pieces": shards} if shards else {}
    _write(aside / "manifest.json", json.dumps({**manifest, "hash": digest(manifest)}, indent=1).encode())
    files.sync_folder(aside)
    files.replace(aside, final)
    files.sync_folder(final.parent)


def steps_in(folder: Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    return [folder / name for name in step_names(folder)]


def steps_before(folder: Path, step: int) -> list[Path]:
    """The checkpoint folders of earlier steps, oldest first."""
    return [path for path in steps_in(folder) if step_at(path) < step]


def step_at(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    step = step_of(path.name)
    assert step is not None, f"{path.name} is not a checkpoint"
    return step


def best(folder: Path) -> Path | None:
    """The checkpoint that `best` points at, if there is one."""
    link = folder / "best"
    path = link.resolve()
    # A link that points elsewhere was not made by `mark_best`.
    ours = link.is_symlink() and path.is_dir() and path.parent == folder.resolve() and step_of(path.name) is not None
    return path if ours else None


def mark_best(folder: Path, path: Path) -> None:
    """Point `best` at a checkpoint, atomically."""
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
    for leftover in folder.glob(".aside-step-*"):
        if leftover.is_dir() and not leftover.is_symlink() and step_of(leftover.name.removeprefix(".aside-")) is not None:
            shutil.rmtree(leftover, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; the manifest goes first, so that a partly removed folder is not taken for a checkpoint."""
    (path / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def forget_after(folder: Path, step: int) -> None:
    """Remove checkpoints beyond `step`: damaged ones, or those of steps that were rolled back."""
    for path in steps_in(folder):
        if step_at(path) > step:
            remove(path)


def _write(path: Path, data: bytes) -> str:
    """Write, and read back; the checksum."""
    files.write_synced(path, data)
    if hash_file(path) != (wanted := hashlib.sha256(data).hexdigest()):
        raise OSError(f"{path} reads back differently from what was written: the disk is failing")
    return wanted


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
