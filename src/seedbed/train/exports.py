"""Exports: a folder with the weights that inference uses and the settings to build their system: safetensors and JSON."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from seedbed import config as configs
from seedbed.errors import UserError
from seedbed.track import jsonl
from seedbed.train.checkpoint import hash_file
from seedbed.train.checkpoint_loading import Checkpoint, Damaged, read_tensors
from seedbed.train.engine import EvalEngine
from seedbed.train.inference_weights import inference_tensors

FORMAT = 2  # 1 was of gpt alone
CONFIG = "config.json"


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder`, which must not exist or be empty, when all is written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; name a new one with --out")
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if folder.exists():
            folder.rmdir()
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write(engine: EvalEngine, facts: dict[str, Any], folder: Path) -> None:
    """Weights and saved buffers, halves as float32; and `facts`: recipe, preset, config and data."""
    sha256 = {}
    for group, tensors in inference_tensors(engine).items():
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        path = folder / f"{group}.safetensors"
        save_file({name: t.float() if t.is_floating_point() and t.itemsize < 4 else t for name, t in stored.items()}, path)
        sha256[path.name] = hash_file(path)
    known = {"format": FORMAT, **facts, "hash": configs.digest_values(configs.flat(facts["config"])), "sha256": sha256}
    (folder / CONFIG).write_text(json.dumps(known, indent=1) + "\n")


def read(folder: Path) -> Checkpoint | None:
    """The verified weights of an export; None where the folder is that of a run."""
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} is neither a run nor an export: it has no {CONFIG}")
    facts = jsonl.read_object(folder / CONFIG)
    found = facts.get("format")
    if found is None:
        return None
    if found != FORMAT:
        newer = isinstance(found, int) and found > FORMAT
        how = "use the newer version of seedbed that wrote it" if newer else "export its run again: seedbed export RUN"
        raise UserError(f"{folder} is an export of format {found}, and this version reads {FORMAT}; {how}")
    try:
        if facts["hash"] != configs.digest_values(configs.flat(facts["config"])):
            raise Damaged(f"{CONFIG} was edited")
        hashes = {"model": facts["sha256"]["model.safetensors"], "ema2": facts["sha256"].get("ema2.safetensors")}
        tensors = {name: read_tensors(folder / f"{name}.safetensors", wanted) for name, wanted in hashes.items() if wanted}
        return Checkpoint(folder, tensors, {"step": facts.get("step", 0), "data": facts["data"].get("fingerprint", "")})
    except (Damaged, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as problem:
        raise UserError(f"the export {folder} is damaged: {problem}; copy it, or export its run again") from None
