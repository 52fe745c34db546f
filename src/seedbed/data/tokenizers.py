"""Text to token ids and back, exactly: characters, byte-level BPE, or a tokenizer.json from disk."""

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seedbed.data.store import digest
from seedbed.errors import UserError
from seedbed.track import files

FORMAT = 1
NAME = "tokenizer.json"
MAX_BYTES = 256 << 20
NUM_CODEPOINTS = 0x110000
UNKNOWN = "\ufffd"
# 74 characters, tiny-shakespeare's among them, and one id for all others: 75 ids.
TABLE_75 = "\n !$&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every id."""
    assert 0 < vocab_size <= 1 << 31
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<i4")


class Tokenizer(Protocol):
    """Text to ids and back: `decode` is the exact inverse of `encode`, with the replacement character for incomplete characters.

    `bytes_of` gives UTF-8 for streaming decoders; `token_bytes` is the number of bytes of text of each id, for bits per byte.
    """

    kind: str
    vocab_size: int
    token_bytes: np.ndarray
    fingerprint: str
    separator: np.ndarray

    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def bytes_of(self, ids: Iterable[int]) -> bytes: ...
    def to_json(self) -> dict[str, Any]: ...

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def save(self, folder: Path) -> Path:
        """Write `tokenizer.json`, which `load` reads."""
        path = folder / NAME
        files.write_atomic(path, json.dumps(self.to_json(), ensure_ascii=True))
        return path


def codepoints(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


class CharTokenizer(Tokenizer):
    """One id per character, in the order of a table; with `unk` one more for every other character."""

    kind = "char"

    def __init__(self, table: Sequence[str], *, unk: bool = False, unknown: str = "error"):
        assert len(set(table)) == len(table) and all(len(c) == 1 for c in table), "a table lists each character once"
        assert unk or unknown == "error"
        self.table, self.unk, self.unknown = list(table), unk, unknown
        self.vocab_size = len(self.table) + unk
        self._ids = np.full(NUM_CODEPOINTS, -1, np.int32)
        self._ids[[ord(c) for c in self.table]] = np.arange(len(self.table))
        self._text = [*self.table, *([UNKNOWN] if unk else [])]
        sizes = [len(c.encode("utf-8", "surrogatepass")) for c in self.table]
        # An unknown character has at least one byte.
        self.token_bytes = np.array([*sizes, *([1] if unk else [])], np.int64)
        self.fingerprint = digest([FORMAT, self.kind, self.table, unk, unknown])[:16]
        self.separator = self.encode("\n\n") if "\n" in table else np.empty(0, self.dtype)

    def encode(self, text: str) -> np.ndarray:
        ids = self._ids[codepoints(text)]
        missing = ids < 0
        if missing.any():
            if self.unknown == "error":
                from seedbed.data.unknown_characters import refused

                raise refused(self, text)
            ids[missing] = len(self.table)
        return ids.astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._text[i] for i in ids)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode("utf-8", "surrogatepass")

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": self.kind, "table": self.table, "unk": self.unk, "unknown": self.unknown}


class TextStream:
    """Streaming decoder: the bytes of a character may be spread over several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.parts: list[str] = []

    def push(self, ids: list[int], last: bool = False) -> str:
        """The characters that `ids` complete; incomplete bytes are kept, unless these are the last."""
        part = self.decoder.decode(self.tokenizer.bytes_of(ids), last)
        self.parts.append(part)
        return part

    @property
    def text(self) -> str:
        return "".join(self.parts)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's ids. An empty prompt stands for the start of a document: the tokenizer's separator, else its first id."""
    return tokenizer.encode(prompt).tolist() or tokenizer.separator.tolist() or [0]


def load(path: Path) -> Tokenizer:
    """The tokenizer in a file, or in a folder's tokenizer.json: saved by `save`, or a byte-level one of `tokenizers`."""
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no tokenizer at {file}; data.tokenizer is char, char75, bpe or the path of a tokenizer.json")
    if file.stat().st_size > MAX_BYTES:
        raise UserError(f"{file} is larger than {MAX_BYTES >> 20} MiB: not a tokenizer")
    try:
        body = json.loads(file.read_bytes())
        if body.get("kind") == "char":
            if body["format"] != FORMAT:
                raise UserError(f"the tokenizer has format {body['format']}, this version reads {FORMAT}")
            return CharTokenizer(body["table"], unk=body["unk"], unknown=body["unknown"])
        from seedbed.data.bpe import ByteTokenizer

        return ByteTokenizer(body)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except Exception as error:
        # The library raises bare exceptions, and a foreign file may lack anything.
        raise UserError(f"{file} is not a tokenizer: {type(error).__name__}: {error}") from None
