"""What can be told about tokens from the text behind them: for recipes that open themselves up to the checks."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from seedbed.data.corpus import open_corpus
from seedbed.data.text import TextData
from seedbed.errors import UserError

# Larger texts are not searched for a batch.
MAX_TEXT = 256 << 20
NUM_REENCODED = 2000


def decode_row(tokenizer: Any, row_T: Tensor) -> str:
    return tokenizer.decode(row_T.tolist())


def entropy(tokens: np.ndarray, vocab: int) -> float:
    """Nats per token for one who knows how often each occurs, and nothing else."""
    counts = np.bincount(tokens[: 1 << 20].astype(np.int64), minlength=vocab)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def text_of(data: TextData) -> Callable[[], str] | None:
    """The text that was tokenised, read when it is asked for; None where there is none or it is too long to search."""
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
    for piece in open_corpus(name).pieces():
        parts[-1].append(piece.text)
        if piece.ends:
            parts.append([])
    return separator.join("".join(part) for part in parts if part)


def reencode(data: TextData, text: str) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens as stored, and the beginning of the text encoded anew."""
    assert data.tokenizer is not None
    fresh = data.tokenizer.encode(text[: 4 * NUM_REENCODED])
    # The last few may be parts of a longer token that the cut tore.
    size = min(NUM_REENCODED, len(fresh) - 16)
    return np.asarray(data.store.arrays["tokens"][:size]), fresh[:size]
