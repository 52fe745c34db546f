"""Text corpora, streamed in chunks: Python's own reference here, what is read from files in text_files.py.

No numpy or torch import, so that presets are fast to list.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from seedbed.config import Units, number
from seedbed.errors import UserError

CHUNK = 1 << 20
HELP = "name a file, a folder, `reference`, `stdlib`, hf:NAME or a prepared store"


@dataclass(frozen=True)
class TextConfig:
    """Which text, in which tokens, in blocks of which length."""

    text: str = "reference"
    tokenizer: str = "char"
    vocab: int = number(4096, low=257, high=1 << 20)
    block: int = number(256, low=1, high=1 << 20)
    valid: float = number(0.1, low=0.0001, high=0.9)
    mode: Literal["phase", "blocks", "random"] = "phase"
    unknown: Literal["error", "unk"] = "error"
    cache: str = ""

    def check(self) -> None:
        if not self.text.strip():
            raise UserError(f"data.text is empty; {HELP}")
        if not self.tokenizer.strip():
            raise UserError("data.tokenizer is empty; use char, char75, bpe or the path of a tokenizer.json")
        if self.text.startswith("random:"):
            from seedbed.data.random_tokens import random_size

            random_size(self.text)

    @property
    def units(self) -> Units:
        name = "char" if self.tokenizer in ("char", "char75") else "byte" if self.vocab == 257 else "token"
        items = {"char": "characters"}.get(name, f"{name}s")
        words = f"{{name}}: {{num_tokens:,}} {items} to train on, {{num_valid_tokens:,}} held out"
        return Units("tokens", self.block, f"nats/{name}", words)


class Chunk(NamedTuple):
    """Some text, and the position after it. `done` counts towards the corpus's `total`."""

    text: str
    document: int
    offset: int
    ends: bool
    done: int


class Corpus:
    """Documents, streamed in chunks that depend on the content alone: here one text in memory."""

    unit, num_documents = "bytes", 1

    def __init__(self, name: str, text: str, facts: dict[str, Any]):
        self.name, self._text, self._facts = name, text, facts
        self.total = len(text.encode())

    def identity(self) -> str:
        """Changes when the text does."""
        return f"sha256:{hashlib.sha256(self._text.encode()).hexdigest()}"

    def changed(self) -> bool:
        """Whether its files changed since it was opened, by size and time."""
        return False

    def describe(self) -> dict[str, Any]:
        return self._facts

    def chunks(self, document: int = 0, offset: int = 0) -> Iterator[Chunk]:
        """The text from a position on that an earlier chunk returned."""
        yield from memory_chunks(self._text, 0, offset, self.total) if document == 0 else ()


def open_corpus(text: str) -> Corpus:
    if text == "reference":
        from pydoc_data.topics import topics

        return Corpus(text, "".join(topics[key] for key in sorted(topics)), {"num_documents": 1, "topics": len(topics)})
    from seedbed.data import text_files

    return text_files.open_files(text)


def memory_chunks(text: str, document: int, offset: int, total: int) -> Iterator[Chunk]:
    if not text:
        yield Chunk("", document, 0, True, 0)
    rest: Iterable[str] = [text[offset:]] if offset < len(text) else []
    if len(text) - offset > CHUNK:
        from seedbed.data.text_files import split_text

        rest = split_text(text[offset:], CHUNK)
    for part in rest:
        offset += len(part)
        yield Chunk(part, document, offset, offset == len(text), total * offset // len(text))
