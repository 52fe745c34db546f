"""Characters that a tokenizer's table lacks: how many there are, where, and the error for them."""

from typing import NoReturn

import numpy as np

from seedbed.data.corpus import Corpus
from seedbed.data.prepare import read_all
from seedbed.data.tokenizers import CharTokenizer, codepoints
from seedbed.errors import UserError


def count_unknown(tokenizer: CharTokenizer, corpus: Corpus) -> int:
    """The number of characters of a text that the table lacks; an error where it has no id for them."""
    found: dict[int, tuple[int, str]] = {}
    before = 0
    for chunk in read_all(corpus, "reading characters"):
        for point, count, index in unknown_in(tokenizer, chunk.text):
            place = f"at character {before + index:,}" + (f" of document {chunk.document}" if corpus.num_documents > 1 else "")
            total, first = found.get(point, (0, place))
            found[point] = total + count, first
        before = 0 if chunk.ends else before + len(chunk.text)
    if found and tokenizer.unknown == "error":
        _refuse([(point, count, place) for point, (count, place) in found.items()])
    return sum(count for count, _ in found.values())


def refuse_text(tokenizer: CharTokenizer, text: str) -> NoReturn:
    """The error for a text with such characters."""
    _refuse([(point, count, f"at character {index:,}") for point, count, index in unknown_in(tokenizer, text)])


def unknown_in(tokenizer: CharTokenizer, text: str) -> list[tuple[int, int, int]]:
    """(code point, count, first index) of each character that the table lacks."""
    points = codepoints(text)
    places = np.flatnonzero(tokenizer.ids[points] < 0)
    values, first, counts = np.unique(points[places], return_index=True, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), places[first].tolist(), strict=True))


def _refuse(found: list[tuple[int, int, str]]) -> NoReturn:
    found = sorted(found, key=lambda item: -item[1])
    shown = "; ".join(f"{chr(v)!r} U+{v:04X} {n:,} times, first {place}" for v, n, place in found[:5])
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    raise UserError(
        f"{len(found)} characters are not in the tokenizer's table: {shown}{more}\n"
        "map them to one id with data.unknown=unk, or use data.tokenizer=bpe, which encodes every text"
    )
