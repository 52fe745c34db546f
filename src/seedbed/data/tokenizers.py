"""Text to token ids and back, exactly: characters, byte-level BPE, or a tokenizer.json from disk."""

import codecs
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data.corpus import cuts
from seedbed.data.store import digest
from seedbed.errors import UserError
from seedbed.track import files

FORMAT = 1
NAME = "tokenizer.json"
MAX_BYTES = 256 << 20
NUM_CODEPOINTS = 0x110000
UNKNOWN = "\ufffd"
SEPARATOR = "<|endoftext|>"
# What other tokenizers call the end of a document.
SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
# 74 characters, tiny-shakespeare's among them, and a place for every other one: 75 ids.
TABLE_75 = "\n !$&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Long text is encoded in pieces of about this many characters, side by side.
SHARE = 1 << 16


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every id."""
    assert 0 < vocab_size <= 1 << 31
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<i4")


class Tokenizer:
    """What every tokenizer offers. `token_bytes` counts the bytes of text behind each id, for bits per byte."""

    kind: str
    vocab_size: int
    token_bytes: np.ndarray
    fingerprint: str
    separator: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text; `decode` gives back the same text."""
        raise NotImplementedError

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no whole character show as the replacement character."""
        raise NotImplementedError

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The text as UTF-8, byte for byte: what a streaming decoder needs."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError

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
        # What stands behind an unknown character is at least one byte.
        self.token_bytes = np.array([*sizes, *([1] if unk else [])], np.int64)
        self.fingerprint = digest([FORMAT, self.kind, self.table, unk, unknown])[:16]
        self.separator = self.encode("\n\n") if "\n" in table else np.empty(0, self.dtype)

    def encode(self, text: str) -> np.ndarray:
        ids = self._ids[codepoints(text)]
        missing = ids < 0
        if missing.any():
            if self.unknown == "error":
                raise UserError(unknown_report([(p, n, f"at character {i:,}") for p, n, i in self.unknown_in(text)]))
            ids[missing] = len(self.table)
        return ids.astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._text[i] for i in ids)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode("utf-8", "surrogatepass")

    def unknown_in(self, text: str) -> list[tuple[int, int, int]]:
        """(code point, count, first index) of each character that the table lacks."""
        points = codepoints(text)
        places = np.flatnonzero(self._ids[points] < 0)
        values, first, counts = np.unique(points[places], return_index=True, return_counts=True)
        return list(zip(values.tolist(), counts.tolist(), places[first].tolist(), strict=True))

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": self.kind, "table": self.table, "unk": self.unk, "unknown": self.unknown}


def unknown_report(found: list[tuple[int, int, str]]) -> str:
    """(code point, count, first place) of each unknown character, as an error."""
    found = sorted(found, key=lambda item: -item[1])
    shown = "; ".join(f"{chr(v)!r} U+{v:04X} {n:,} times, first {place}" for v, n, place in found[:5])
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return (
        f"{len(found)} characters are not in the tokenizer's table: {shown}{more}\n"
        "map them to one id with data.unknown=unk, or use data.tokenizer=bpe, which knows every text"
    )


def char_table(counts: np.ndarray) -> list[str]:
    """The table of a text, from the count of every code point: sorted, so that it is the same in every process."""
    return [chr(p) for p in np.flatnonzero(counts).tolist()]


class ByteTokenizer(Tokenizer):
    """A byte-level tokenizer of the library `tokenizers`: trained here, or read from a tokenizer.json."""

    kind = "bpe"

    def __init__(self, body: dict[str, Any]):
        from tokenizers import Tokenizer as Library

        _require_byte_level(body)
        self._library = Library.from_str(json.dumps(body))
        self._library.no_truncation()
        self._library.no_padding()
        # As the library understood it: it may number added tokens anew.
        self.body = body = json.loads(self._library.to_str())
        # Text that spells a special token is text.
        self._library.encode_special_tokens = True
        self._text, self.token_bytes = _bytes_by_id(body)
        self.vocab_size = len(self._text)
        self.exact = body["normalizer"] is None and '"add_prefix_space": true' not in json.dumps(body["pre_tokenizer"]).lower()
        self.fingerprint = digest([FORMAT, self.kind, *_essence(body)])[:16]
        special = {t["content"]: t["id"] for t in body["added_tokens"] if t["special"]}
        known = [special[name] for name in SEPARATORS if name in special]
        self.separator = np.array(known[:1], self.dtype) if known else self.encode("\n\n")

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        parts = [list(cuts(text, SHARE)) for text in texts]
        try:
            encoded = self._library.encode_batch_fast([p for some in parts for p in some], add_special_tokens=False)
        except TypeError:
            raise UserError("the text holds half a surrogate pair, which has no UTF-8 form; clean it first") from None
        ids = (np.asarray(e.ids, dtype=self.dtype) for e in encoded)
        result = [np.concatenate([np.empty(0, self.dtype), *itertools.islice(ids, len(some))]) for some in parts]
        if not self.exact and any(self.decode(r.tolist()) != text for r, text in zip(result, texts, strict=True)):
            raise UserError(
                "this tokenizer.json changes the text (it normalises or adds a space), so it cannot be given back exactly; "
                "choose one without a normaliser"
            )
        return result

    def decode(self, ids: Iterable[int]) -> str:
        return self.bytes_of(ids).decode("utf-8", "replace")

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._text[i] for i in ids)

    def to_json(self) -> dict[str, Any]:
        return self.body


def train_bpe(pieces: Iterable[str], vocab: int) -> ByteTokenizer:
    """Byte-level BPE with at most `vocab` ids, every byte and the separator among them; the same for the same text."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert vocab > len(alphabet)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[SEPARATOR], initial_alphabet=sorted(alphabet), show_progress=False
    )
    library.train_from_iterator(iter(pieces), trainer=trainer)
    return ByteTokenizer(json.loads(library.to_str()))


class TextStream:
    """Token ids to text as they come; the bytes of a character may be spread over several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pieces: list[str] = []

    def push(self, ids: list[int], last: bool = False) -> str:
        """The characters that `ids` complete; what is left over waits, unless these are the last."""
        piece = self.decoder.decode(self.tokenizer.bytes_of(ids), last)
        self.pieces.append(piece)
        return piece

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's ids. An empty prompt stands for the start of a document: the tokenizer's separator, else its first id."""
    return tokenizer.encode(prompt).tolist() or tokenizer.separator.tolist() or [0]


def load(path: Path) -> Tokenizer:
    """The tokenizer in a file, or in a folder's tokenizer.json: one of ours or a byte-level one of `tokenizers`."""
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no tokenizer at {file}; data.tokenizer is char, char75, bpe or the path of a tokenizer.json")
    if file.stat().st_size > MAX_BYTES:
        raise UserError(f"{file} is larger than {MAX_BYTES >> 20} MiB: not a tokenizer")
    try:
        return from_json(json.loads(file.read_bytes()))
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except Exception as error:
        # The library raises bare exceptions, and a foreign file may lack anything.
        raise UserError(f"{file} is not a tokenizer: {type(error).__name__}: {error}") from None


def from_json(body: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_json` described."""
    if body.get("kind") == "char":
        if body["format"] != FORMAT:
            raise UserError(f"the tokenizer has format {body['format']}, this version reads {FORMAT}")
        return CharTokenizer(body["table"], unk=body["unk"], unknown=body["unknown"])
    return ByteTokenizer(body)


def _require_byte_level(body: dict[str, Any]) -> None:
    model = body["model"]
    if model.get("type") != "BPE" or '"ByteLevel"' not in json.dumps(body["decoder"]):
        raise UserError(
            f"only byte-level BPE gives text back exactly, and this is {model.get('type')} with another decoder; "
            "use one like GPT-2's, or data.tokenizer=bpe"
        )
    if model.get("dropout"):
        raise UserError("the tokenizer has BPE dropout: the same text would give other ids each time; set dropout to null")


def _byte_of() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one visible character: itself, or one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


def _bytes_by_id(body: dict[str, Any]) -> tuple[list[bytes], np.ndarray]:
    """The bytes of each id, and how many bytes of text they stand for: none for a special token."""
    byte_of = _byte_of()
    added = {token["id"]: token for token in body["added_tokens"]}
    names = {i: name for name, i in body["model"]["vocab"].items()}
    size = max([*added, *names]) + 1
    text, count = [b""] * size, np.zeros(size, np.int64)
    for i in range(size):
        if i in added:
            text[i] = added[i]["content"].encode()
            count[i] = 0 if added[i]["special"] else len(text[i])
        elif i in names:
            text[i] = bytes(byte_of[c] for c in names[i])
            count[i] = len(text[i])
    return text, count


def _essence(body: dict[str, Any]) -> list[Any]:
    """What decides the ids, whichever version of the library wrote the file."""
    merges = [m.split(" ") if isinstance(m, str) else m for m in body["model"]["merges"]]
    added = [[t["id"], t["content"], t["special"]] for t in body["added_tokens"]]
    vocab = sorted(body["model"]["vocab"].items(), key=lambda item: item[1])
    return [vocab, merges, added, body["normalizer"], body["pre_tokenizer"]]
