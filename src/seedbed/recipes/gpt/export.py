"""Export of a trained model as a folder: model.safetensors, config.json and tokenizer.json."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from seedbed import config as configs
from seedbed.config.saved import from_json
from seedbed.data import limits, tokenizers
from seedbed.data.tokenizers import Tokenizer
from seedbed.errors import UserError
from seedbed.nn.init import on_meta
from seedbed.recipes.gpt.model import Transformer
from seedbed.recipes.gpt.presets import ModelConfig

FORMAT = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def export(model: Transformer, tokenizer: Tokenizer | None, folder: Path) -> list[Path]:
    """Write `folder`, which must not exist or be empty, atomically: it is built in a temporary folder and renamed."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; name a new one")
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, aside / WEIGHTS)
    facts = {
        "format": FORMAT,
        "recipe": "gpt",
        "model": configs.to_json(model.config),
        "vocab_size": model.vocab,
        "block": model.block,
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "sha256": _sha256(aside / WEIGHTS),
    }
    (aside / CONFIG).write_text(json.dumps(facts, indent=2) + "\n")
    if tokenizer:
        tokenizer.save(aside)
    if folder.exists():
        folder.rmdir()
    os.replace(aside, folder)
    return sorted(folder.iterdir())


def load_exported(folder: Path) -> tuple[Transformer, Tokenizer | None]:
    """The model, in evaluation mode on the CPU, and the tokenizer that `export` wrote, after verification."""
    facts = _read_config(folder / CONFIG)
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; it is not an exported model")
    if _sha256(path) != facts["sha256"]:
        raise UserError(f"{path} is damaged: it is not the file that {CONFIG} describes; export the run again")
    with on_meta():
        model = Transformer(from_json(ModelConfig(), facts["model"]), facts["vocab_size"], facts["block"])
    try:
        limits.require_header(path)
        model.load_state_dict(load_file(path), assign=True)
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} does not fit its {CONFIG}: {str(error).splitlines()[0]}") from None
    tokenizer = tokenizers.load(folder) if facts["tokenizer"] else None
    if tokenizer and tokenizer.fingerprint != facts["tokenizer"]:
        raise UserError(f"{folder} has tokenizer {tokenizer.fingerprint}, the model was trained with {facts['tokenizer']}")
    return model.eval(), tokenizer


def _read_config(path: Path) -> dict[str, Any]:
    try:
        facts = limits.read_json(path)
        missing = {"format", "recipe", "model", "vocab_size", "block", "tokenizer", "sha256"} - set(facts)
    except FileNotFoundError:
        raise UserError(f"there is no {path}; an exported model is a folder with {CONFIG} and {WEIGHTS}") from None
    except (ValueError, TypeError):
        raise UserError(f"{path} is not the JSON of an exported model") from None
    if missing or facts["recipe"] != "gpt" or facts["format"] != FORMAT:
        raise UserError(f"{path} does not describe a gpt model of format {FORMAT}")
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    if set(facts["model"]) != known:
        raise UserError(f"{path} describes a model of another version: {', '.join(sorted(set(facts['model']) ^ known))}")
    return facts


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
