"""Blocks of tokens for training, and every token of a split, once, for evaluation.

Shape suffixes: B items, T context length; a block has T + 1 tokens, so that inputs and targets are two views of it.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seedbed.config import Config
from seedbed.data import inference_data, tokenizers
from seedbed.data.corpus import TextConfig
from seedbed.data.feed import Data, Source
from seedbed.data.order import draw, key_of
from seedbed.data.prepare import Say, load_tokenizer, prepare_text
from seedbed.data.store import Store
from seedbed.data.tokenizers import Tokenizer
from seedbed.errors import UserError

# Separates the random phase of an epoch from its permutation, which has the same seed.
_PHASE = 0x70686173
# Validation tokens that are saved for prompts.
NUM_KEPT = 1 << 14


class TextSource(Source):
    """Blocks of a row of tokens.

    `blocks`: at multiples of T, each target once per epoch. `phase`: the same with another offset in every epoch, so that
    block borders change. `random`: anywhere.
    """

    def __init__(
        self, tokens: np.ndarray, block: int, mode: str, seed: int, token_bytes: np.ndarray | None = None, name: str = "text"
    ):
        self.tokens, self.block, self.mode, self.seed = tokens, block, mode, seed
        self.arrays, self.spans, self.wide = {"tokens": tokens}, {"tokens": block + 1}, {"tokens": np.dtype(np.int64)}
        self.num_targets = len(tokens) - 1
        self.num_items = (len(tokens) - block) // block if mode == "phase" else self.num_targets // block
        self.token_bytes, self._target_bytes = token_bytes, None
        self._epoch, self._key = -1, 0
        if self.num_targets < block:
            raise UserError(
                f"the {name} part has {len(tokens):,} tokens, and one block needs data.block + 1 = {block + 1:,}; "
                f"use data.block={max(1, self.num_targets)} or less, or more text"
            )
        if not self.num_items:
            raise UserError(
                f"the {name} part has {len(tokens):,} tokens, and mode=phase needs 2 x data.block = {2 * block:,}; "
                f"use data.mode=blocks or data.block={len(tokens) // 2}"
            )

    @property
    def num_dropped(self) -> int:
        """Targets that are in no block of an epoch."""
        return self.num_targets - self.num_items * self.block

    @property
    def num_target_bytes(self) -> int:
        """The number of bytes of text of all targets; 0 for random tokens."""
        if self._target_bytes is None:
            sizes, starts = self.token_bytes, range(1, len(self.tokens), 1 << 22)
            self._target_bytes = 0 if sizes is None else sum(int(sizes[self.tokens[i : i + (1 << 22)]].sum()) for i in starts)
        return self._target_bytes

    def locate(self, epoch_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        if self.mode == "blocks":
            return index_B * self.block
        first, last = int(epoch_B[0]), int(epoch_B[-1])
        if first == last:
            return self._starts(first, index_B)
        return np.concatenate([self._starts(e, index_B[epoch_B == e]) for e in range(first, last + 1)])

    def _starts(self, epoch: int, index: np.ndarray) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch, self._key = epoch, key_of(self.seed, epoch, _PHASE)
        if self.mode == "phase":
            starts = index * self.block
            starts += self._key % self.block
            return starts
        return (draw(self._key, index) % np.uint64(len(self.tokens) - self.block)).astype(np.int64)

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = raw["tokens"]
        return {"tokens": tokens.long()}  # the feed converts while it gathers; then this is the same tensor

    def first(self, num: int) -> "TextSource":
        """The first `num` blocks, without the tokens after them."""
        num = min(num, self.num_items)
        size = (num + 1) * self.block if self.mode == "phase" else num * self.block + 1
        return type(self)(self.tokens[:size], self.block, self.mode, self.seed, self.token_bytes)


def windows(source: TextSource, batch: int, device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """Every target of a split exactly once: non-overlapping (B, T+1) windows, then the tail as one shorter window."""
    tokens, size = source.tokens, source.block
    whole = source.num_targets // size
    for start in range(0, whole, batch):
        end = min(start + batch, whole)
        part = torch.from_numpy(tokens[start * size : end * size + 1].astype(np.int64))
        yield part.to(device).unfold(0, size + 1, size)
    if whole * size < source.num_targets:
        yield torch.from_numpy(tokens[whole * size :].astype(np.int64)).to(device)[None]


@dataclass
class TextData(Data):
    """Text for training and evaluation, with the tokenizer that made it; random tokens have none."""

    train: TextSource
    valid: TextSource
    tokenizer: Tokenizer | None
    store: Store | None  # None where only a part was kept for inference
    vocab_size: int

    def unigram_entropy(self) -> float:
        """In nats per token, of the first million training tokens: the loss of a model that ignores its input."""
        counts = np.bincount(self.train.tokens[: 1 << 20].astype(np.int64), minlength=self.vocab_size)
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


def open_data(config: Config) -> TextData:
    """The text that `config.data`, a `TextConfig`, names; long work shows its progress on standard error."""
    return open_text(config.data, config.seed, say=lambda line: print(line, file=sys.stderr))


def open_text(config: TextConfig, seed: int, say: Say = lambda line: None) -> TextData:
    store = prepare_text(config, say=say)
    tokenizer = load_tokenizer(store)
    token_bytes = tokenizer.token_bytes if tokenizer else None
    train = TextSource(store.split("train", "tokens"), config.block, config.mode, seed, token_bytes, "training")
    valid = TextSource(store.split("valid", "tokens"), config.block, "blocks", seed, token_bytes, "validation")
    facts = {
        "name": store.manifest["source"]["name"],
        "fingerprint": store.fingerprint,
        "tokenizer": store.manifest["tokenizer"],
        "vocab_size": store.manifest["tokenizer"]["vocab_size"],
        "num_tokens": len(train.tokens),
        "num_valid_tokens": len(valid.tokens),
        "num_blocks": train.num_items,
        "num_dropped": train.num_dropped,
        "num_bytes": store.manifest["counts"]["num_bytes"],
        "store": str(store.path),
    }
    return TextData(train, valid, facts, tokenizer, store, facts["vocab_size"])


def save_for_inference(data: TextData, folder: Path) -> None:
    tokens = np.ascontiguousarray(data.valid.tokens[: max(NUM_KEPT, 2 * data.valid.block + 1)])
    inference_data.write(folder, {"facts": data.facts, "vocab_size": data.vocab_size}, {"tokens": tokens})
    if data.tokenizer is not None:
        data.tokenizer.save(folder)


def open_for_inference(config: Config, folder: Path) -> TextData:
    """Data whose splits are both the validation tokens that `save_for_inference` saved."""
    about, arrays = inference_data.read(folder)
    tokenizer = tokenizers.load(folder) if (folder / tokenizers.NAME).is_file() else None
    made = about["facts"]["tokenizer"]
    if made["kind"] != "random" and (tokenizer is None or tokenizer.fingerprint != made["fingerprint"]):
        raise UserError(f"{folder} has no tokenizer.json or that of another run; copy it again from where the run was trained")
    token_bytes = tokenizer.token_bytes if tokenizer else None
    source = TextSource(arrays["tokens"], config.data.block, "blocks", config.seed, token_bytes, "kept")
    return TextData(source, source, about["facts"], tokenizer, None, int(about["vocab_size"]))


def text_metrics(name: str, nats: float, source: TextSource) -> dict[str, float]:
    """Nats per token first: it decides which checkpoint is best. Bits per byte compare across tokenizers."""
    per_token = nats / source.num_targets
    numbers = {name: per_token, "perplexity": math.exp(min(per_token, 700.0))}
    if source.num_target_bytes:
        numbers["bits_per_byte"] = nats / (math.log(2) * source.num_target_bytes)
    return numbers
