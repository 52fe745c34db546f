"""Characters of a text that a fixed table lacks: how many there are, and the error that lists them."""

import numpy as np

from seedbed.data.corpus import Corpus
from seedbed.data.store import Progress
from seedbed.data.tokenizers import CharTokenizer, codepoints
from seedbed.errors import UserError


def count_unknown(corpus: Corpus, tokenizer: CharTokenizer) -> int:
    """How many characters of a corpus become the unknown id; an error where the tokenizer has none."""
    found: dict[int, tuple[int, str]] = {}  # count and first place by code point
    progress, before = Progress("reading characters", corpus.unit), 0
    for chunk in corpus.chunks():
        for point, count, index in _unknown_in(tokenizer, chunk.text):
            place = f"at character {before + index:,}" + (f" of document {chunk.document}" if corpus.num_documents > 1 else "")
            total, first = found.get(point, (0, place))
            found[point] = total + count, first
        before = 0 if chunk.ends else before + len(chunk.text)
        progress(chunk.done, corpus.total)
    progress.close()
    if found and tokenizer.unknown == "error":
        raise UserError(_report([(point, count, place) for point, (count, place) in found.items()]))
    return sum(count for count, _ in found.values())


def refused(tokenizer: CharTokenizer, text: str) -> UserError:
    """The error for a text with characters that the table lacks."""
    return UserError(_report([(p, n, f"at character {i:,}") for p, n, i in _unknown_in(tokenizer, text)]))


def _unknown_in(tokenizer: CharTokenizer, text: str) -> list[tuple[int, int, int]]:
    """(code point, count, first index) of each character that the table lacks."""
    points = codepoints(text)
    places = np.flatnonzero(~np.isin(points, codepoints("".join(tokenizer.table))))
    values, first, counts = np.unique(points[places], return_index=True, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), places[first].tolist(), strict=True))


def _report(found: list[tuple[int, int, str]]) -> str:
    """The error for unknown characters, given (code point, count, first position) of each."""
    found = sorted(found, key=lambda item: -item[1])
    shown = "; ".join(f"{chr(v)!r} U+{v:04X} {n:,} times, first {place}" for v, n, place in found[:5])
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return (
        f"{len(found)} characters are not in the tokenizer's table: {shown}{more}\n"
        "map them to one id with data.unknown=unk, or use data.tokenizer=bpe, which encodes every text"
    )
