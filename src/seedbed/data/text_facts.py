"""Facts about tokens and their text, and small parts of them, for the checks of text recipes."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from seedbed.data.corpus import open_corpus
from seedbed.data.text import TextData, TextSource
from seedbed.errors import UserError

# Larger texts are not searched for a batch.
MAX_TEXT = 256 << 20
NUM_REENCODED, MAX_REENCODED, TORN = 2000, 8000, 16


def decode_row(tokenizer: Any, row_T: Tensor) -> str:
    return tokenizer.decode(row_T.tolist())


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
    """The first tokens of both parts of an open text, in blocks of another length."""

    def subset(source: TextSource) -> TextSource:
        return type(source)(source.tokens[: max(num_tokens, 2 * block + 1)], block, source.mode, source.seed, source.token_bytes)

    return replace(data, train=subset(data.train), valid=subset(data.valid))
