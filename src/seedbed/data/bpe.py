"""Byte-level BPE of the library `tokenizers`: trained here, or read from a tokenizer.json."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from seedbed.data.corpus import Corpus
from seedbed.data.store import Progress, digest
from seedbed.data.text_files import split_text
from seedbed.data.tokenizers import FORMAT, Tokenizer
from seedbed.errors import UserError

SEPARATOR = "<|endoftext|>"
# What other tokenizers call the end of a document.
SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
# Long text is encoded in chunks of about this many characters, in parallel.
SHARE = 1 << 16
# Merges are learnt from the beginning of a text, up to this many characters.
TRAIN_LIMIT = 512 << 20


class ByteTokenizer(Tokenizer):
    """A byte-level tokenizer of the library `tokenizers`: trained here, or read from a tokenizer.json."""

    kind = "bpe"

    def __init__(self, body: dict[str, Any]):
        from tokenizers import Tokenizer as Library

        _require_byte_level(body)
        self._library = Library.from_str(json.dumps(body))
        self._library.no_truncation()
        self._library.no_padding()
        # As the library understood it: it may renumber added tokens.
        self.body = body = json.loads(self._library.to_str())
        # Text that looks like a special token is encoded as text.
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
        parts = [list(split_text(text, SHARE)) for text in texts]
        try:
            encoded = self._library.encode_batch_fast([p for some in parts for p in some], add_special_tokens=False)
        except TypeError:
            raise UserError("the text holds half a surrogate pair, which has no UTF-8 form; clean it first") from None
        ids = (np.asarray(e.ids, dtype=self.dtype) for e in encoded)
        result = [np.concatenate([np.empty(0, self.dtype), *itertools.islice(ids, len(some))]) for some in parts]
        if not self.exact and any(self.decode(r.tolist()) != text for r, text in zip(result, texts, strict=True)):
            raise UserError(
                "this tokenizer.json changes the text (it normalises or adds a space), so decoding cannot be exact; "
                "choose one without a normaliser"
            )
        return result

    def decode(self, ids: Iterable[int]) -> str:
        return self.bytes_of(ids).decode("utf-8", "replace")

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._text[i] for i in ids)

    def to_json(self) -> dict[str, Any]:
        return self.body


def training_text(corpus: Corpus) -> Iterator[str]:
    """The beginning of a corpus, from which merges are learnt."""
    progress, length = Progress("learning merges from", corpus.unit), 0
    for chunk in corpus.chunks():
        if length >= TRAIN_LIMIT:
            break
        length += len(chunk.text)
        progress(chunk.done, corpus.total)
        yield chunk.text
    progress.close()


def train_bpe(chunks: Iterable[str], vocab: int) -> ByteTokenizer:
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
    library.train_from_iterator(iter(chunks), trainer=trainer)
    return ByteTokenizer(json.loads(library.to_str()))


def _require_byte_level(body: dict[str, Any]) -> None:
    model = body["model"]
    if model.get("type") != "BPE" or '"ByteLevel"' not in json.dumps(body["decoder"]):
        raise UserError(
            f"only byte-level BPE decodes exactly, and this is {model.get('type')} with another decoder; "
            "use one like GPT-2's, or data.tokenizer=bpe"
        )
    if model.get("dropout"):
        raise UserError("the tokenizer has BPE dropout: the same text would give different ids each time; set dropout to null")


def _bytes_by_id(body: dict[str, Any]) -> tuple[list[bytes], np.ndarray]:
    """The bytes of each id, and the number of bytes of text: 0 for a special token."""
    # Byte-level vocabularies write each byte as one visible character: itself, or one from U+0100 on.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
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
    """The fields that decide the ids, independent of the version of the library."""
    merges = [m.split(" ") if isinstance(m, str) else m for m in body["model"]["merges"]]
    added = [[t["id"], t["content"], t["special"]] for t in body["added_tokens"]]
    vocab = sorted(body["model"]["vocab"].items(), key=lambda item: item[1])
    return [vocab, merges, added, body["normalizer"], body["pre_tokenizer"]]
