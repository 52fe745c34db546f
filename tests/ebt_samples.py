"""Small ebt systems on a text of their own, for the tests of that recipe."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.bpe import train_bpe
from seedbed.data.text import TextData
from seedbed.data.tokenizers import CharTokenizer, Tokenizer
from seedbed.nn.decoding import Decoder
from seedbed.recipes import find
from seedbed.recipes.ebt.data import CountedText
from seedbed.recipes.ebt.system import EnergySystem, PlainSystem, build

TEXT = "the quick brown fox jumps over the lazy dog; size is 17.\n" * 30
BLOCK = 12
CHARS = CharTokenizer(sorted(set(TEXT)))
BYTES = train_bpe([TEXT], 257)
TINY = ["device=cpu", f"data.block={BLOCK}", "batch=4", "model.depth=2", "model.heads=2", "model.width=16", "model.control=false"]
# Terms summed in one optimisation step: forward, and twice as much for its gradient, the fan-in of two blocks and of the ends.
STEP_TERMS = 3 * (2 * (16 + BLOCK + 16 + 16 + 64) + 2 * CHARS.vocab_size)


def make_config(*settings: str, preset: str = "demo") -> Config:
    recipe, name = find(f"ebt/{preset}")
    base = configs.override(recipe.preset(name), ["precision=fp32", "compile=off"])
    return configs.override(base, [*TINY, *settings])


def make_data(ids: np.ndarray, tokenizer: Tokenizer) -> TextData:
    cut = len(ids) * 3 // 4
    parts = [CountedText(some, BLOCK, "blocks", 1, tokenizer.token_bytes) for some in (ids[:cut], ids[cut : cut + 100])]
    facts = {"fingerprint": "small", "name": "nowhere", "num_bytes": len(TEXT)}
    return TextData(*parts, facts, tokenizer=tokenizer, store=None, vocab_size=tokenizer.vocab_size)  # type: ignore[arg-type]


def make(*settings: str, preset: str = "demo", tokenizer: Tokenizer = CHARS) -> EnergySystem:
    system = build(make_config(*settings, preset=preset), make_data(tokenizer.encode(TEXT), tokenizer))
    assert isinstance(system, EnergySystem)
    return system


def make_plain(*settings: str) -> PlainSystem:
    system = build(make_config("model.kind=plain", *settings), make_data(CHARS.encode(TEXT), CHARS))
    assert isinstance(system, PlainSystem)
    return system


def batch_of(system: EnergySystem | PlainSystem, rows: int = 4, first: int = 0) -> dict[str, Tensor]:
    tokens = system.data.train.tokens
    starts = (np.arange(rows) + first) * BLOCK
    blocks = np.stack([tokens[s : s + BLOCK + 1] for s in starts]).astype(np.int64)
    return {"tokens": torch.from_numpy(blocks), "index": torch.arange(first, first + rows)}


class Written(NamedTuple):
    """Text after a prompt, token by token, with the energy and the steps of each."""

    text: str
    tokens: list[int]
    energies: list[float]
    steps: list[float]


def written_rows(decoder: Decoder, num: int, tokenizer: Tokenizer = CHARS) -> list[Written]:
    """Generate `num` tokens in every row of an energy model's decoder, and read what was recorded."""
    for _ in decoder.run(num, 1):
        pass
    columns = (decoder.history_BN, decoder.initial.energy_BL, decoder.initial.steps_BL)  # type: ignore[attr-defined]
    rows = [[column_BL[row, end - num : end].tolist() for column_BL in columns] for row, end in enumerate(decoder.lengths)]
    return [Written(tokenizer.decode(tokens), tokens, *rest) for tokens, *rest in rows]
