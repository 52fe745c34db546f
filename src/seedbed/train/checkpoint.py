"""Checkpoints: complete, atomic, verified by checksum, and falling back to the one before when damaged.

A checkpoint is a folder `step-000240/` with safetensors files, `state.json`, and `manifest.json` with the sha256 of each.
It is built aside, synced and re-read before one rename gives it its name, so a folder with that name is whole.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

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


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def save(folder: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
    """Write a checkpoint so that at every instant the folder holds only whole ones."""
    final, aside = folder / folder_name(step), folder / f".aside-{folder_name(step)}"
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        hashes = {}
        for name, group in tensors.items():
            data = safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in group.items()})
            hashes[f"{name}.safetensors"] = _write(aside / f"{name}.safetensors", data)
        hashes["state.json"] = _write(aside / "state.json", json.dumps({**state, "step": step}, indent=1).encode())
        manifest = {"format": FORMAT, "step": step, "torch": torch.__version__, "sha256": hashes}
        _write(aside / "manifest.json", json.dumps(manifest, indent=1).encode())
        for name, wanted in hashes.items():
            if _hash_file(aside / name) != wanted:
                raise OSError(f"{aside / name} reads back differently from what was written: the disk is failing")
        files.sync_folder(aside)
        files.replace(aside, final)
        files.sync_folder(folder)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint; raises Damaged with the reason."""
    manifest = _read_json(path / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise Damaged(f"{path.name}: format {manifest.get('format')} is not {FORMAT}; written by another version")
    contents = {name: _verified(path / name, wanted) for name, wanted in manifest["sha256"].items()}
    state = json.loads(contents.pop("state.json"))
    tensors = {name.removesuffix(".safetensors"): safetensors.torch.load(data) for name, data in contents.items()}
    return Checkpoint(path, tensors, state)


def load_newest(folder: Path, warn: Any = print) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over. None when there never was one."""
    paths = steps_in(folder)
    for path in reversed(paths):
        try:
            return load(path)
        except Damaged as problem:
            warn(f"checkpoint damaged, falling back to the one before: {problem}")
    if paths:
        raise UserError(f"every checkpoint in {folder} is damaged; start the run again under another name")
    return None


def steps_in(folder: Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and not p.is_symlink())


def best(folder: Path) -> Path | None:
    """The checkpoint that `best` points at, if there is one."""
    link = folder / "best"
    return link.resolve() if link.is_symlink() and link.resolve().is_dir() else None


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
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        raise Damaged(f"{path.parent.name}/{path.name} is missing or unreadable") from None
    if not isinstance(value, dict) or not isinstance(value.get("sha256", {}), dict):
        raise Damaged(f"{path.parent.name}/{path.name} is not a manifest")
    return value
