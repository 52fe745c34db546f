"""Facts about tokens and their text, small parts of them for the checks of text recipes, and other texts to evaluate on."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F

from seedbed.config import Config
from seedbed.data.corpus import Corpus, open_corpus
from seedbed.data.text import TextData, TextSource
from seedbed.data.tokenise import encode_corpus
from seedbed.errors import UserError

# Larger texts are not searched for a batch.
MAX_TEXT = 256 << 20
NUM_REENCODED, MAX_REENCODED, TORN = 2000, 8000, 16
# Ids of random tokens in the checks: nothing that they test depends on how many there are, and a step takes as long as that.
FEW_IDS = 512


def next_token_facts(data: TextData, model: Any) -> dict[str, Any]:
    """What the checks may expect of any model of this text whose `inputs` are tokens and whose `targets` are those after them."""
    tokenizer, text, num_ids = data.tokenizer, text_of(data), model.vocab
    return {
        "inputs": "inputs",
        "targets": "targets",
        "rule": lambda b: F.pad(b["inputs"][:, 1:], (0, 1), value=-1),
        "ranges": {name: (0, num_ids - 1) for name in ("tokens", "inputs", "targets")},
        "oracle": lambda b: 50.0 * F.one_hot(b["targets"], num_ids).to(model.embed.weight.dtype),
        "lower_bound": 0.0,
        "order": "causal",
        "baselines": lambda b: {"unigram entropy": data.unigram_entropy()},
        "decode": None if tokenizer is None else lambda row_T: tokenizer.decode(row_T.tolist()),
        "holds": None if text is None else lambda part: all(piece in text() for piece in part.split("\ufffd")),
        "reencode": None if text is None else lambda: reencode(data),
    }


def text_of(data: TextData) -> Callable[[], str] | None:
    """The text that was tokenised, read lazily; None where there is none or it is too long to search."""
    if data.tokenizer is None or data.facts["num_bytes"] > MAX_TEXT:
        return None
    name, separator = data.facts["name"], data.tokenizer.decode(data.tokenizer.separator.tolist())
    try:
        open_corpus(name)
    except UserError:
        return None
    return lambda: _whole(name, separator)


@functools.lru_cache(maxsize=1)
def _whole(name: str, separator: str) -> str:
    parts = [[]]
    for chunk in open_corpus(name).chunks():
        parts[-1].append(chunk.text)
        if chunk.ends:
            parts.append([])
    return separator.join("".join(part) for part in parts if part)


def reencode(data: TextData) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens as stored, and the beginning of the text encoded again, document by document."""
    assert data.tokenizer is not None
    corpus, parts = open_corpus(data.facts["name"]), []
    for chunk in corpus.chunks():
        # The last few tokens may differ: the text ends in the middle of a longer token.
        ids = data.tokenizer.encode(chunk.text[:MAX_REENCODED])
        whole = len(chunk.text) <= MAX_REENCODED
        parts += [ids, data.tokenizer.separator] if whole else [ids[:-TORN]]
        if not whole or not chunk.ends or sum(map(len, parts)) >= NUM_REENCODED:
            break
    fresh = np.concatenate(parts)[:NUM_REENCODED]
    assert data.store is not None, "checks have all data"
    stored = np.asarray(data.store.arrays["tokens"][: len(fresh)])
    return stored, fresh[: len(stored)]


def subset_text(data: TextData, block: int, num_tokens: int = 200_000) -> TextData:
    """The first tokens of both parts of an open text, in blocks of another length; random tokens of fewer ids."""
    num_ids = data.vocab_size if data.tokenizer else min(data.vocab_size, FEW_IDS)

    def subset(source: TextSource) -> TextSource:
        tokens = source.tokens[: max(num_tokens, 2 * block + 1)]
        few = tokens % num_ids if num_ids < data.vocab_size else tokens
        return type(source)(few, block, source.mode, source.seed, source.token_bytes)

    return replace(data, train=subset(data.train), valid=subset(data.valid), vocab_size=num_ids)


def given_text(config: Config, data: TextData, given: Any) -> Any:
    """A text, or the text at a `Path`, in the run's own tokens: one block where it is shorter than that."""
    if not isinstance(given, str | Path):
        return given
    if data.tokenizer is None:
        raise UserError("this run was trained on random tokens; it cannot be evaluated on a text")
    corpus = Corpus("given", given, {}) if isinstance(given, str) else open_corpus(str(given.expanduser().absolute()))
    tokens = np.concatenate([ids for _, ids in encode_corpus(corpus, data.tokenizer)])
    if len(tokens) < 2:
        raise UserError(f"a text of {len(tokens)} tokens has none to predict; give evaluate a longer one")
    block = min(config.data.block, len(tokens) - 1)
    return type(data.valid)(tokens, block, "blocks", config.seed, data.tokenizer.token_bytes, "given")
