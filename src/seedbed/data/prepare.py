"""Token stores, cached by content: the one that exists, or a new one, tokenised in bounded memory.

An interrupted preparation continues where it stopped, and gives the same store as an uninterrupted one.
"""

import math
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.cache import cache_folder
from seedbed.data import tokenizers
from seedbed.data.corpus import Chunk, Corpus, TextConfig, open_corpus
from seedbed.data.progress import Progress
from seedbed.data.store import Say, Store, Writer, damaged, digest, find_or_build, is_store
from seedbed.data.tokenizers import NUM_CODEPOINTS, TABLE_75, CharTokenizer, Tokenizer, char_table, codepoints
from seedbed.errors import UserError

# Bump when the same text and tokenizer give other tokens than before.
FORMAT = 1
# Names that are never files.
NAMES = {"reference", "stdlib", "char", "char75", "bpe"}
# A killed preparation loses at most this much text, or time.
SAVE_EVERY, SAVE_SECONDS = 32 << 20, 5.0
# Merges are learnt from the beginning of a text, up to this many characters.
TRAIN_LIMIT, BATCH_CHARACTERS = 512 << 20, 1 << 20


def prepare_text(config: TextConfig, *, out: Path | None = None, rebuild: bool = False, say: Say = lambda line: None) -> Store:
    """The store for this text and tokenizer: the one that exists, or a new one. `rebuild` replaces a damaged one."""
    if is_store(Path(config.text).expanduser()):
        return _open_named(config)
    if config.text.startswith("random:"):
        from seedbed.data.random_tokens import RandomPlan

        plan = RandomPlan(config)
    else:
        plan = TextPlan(config)
    path = out.absolute() if out else cache_folder(config.cache) / f"{plan.label}-{plan.key[:12]}"
    return find_or_build(path, plan.key, plan.build, rebuild=rebuild, say=say)


def load_tokenizer(store: Store) -> Tokenizer | None:
    """The tokenizer stored with the tokens; None for random ones. It must be the one that made them."""
    facts = store.manifest["tokenizer"]
    if facts["kind"] == "random":
        return None
    found = tokenizers.load(store.path)
    if found.fingerprint != facts["fingerprint"]:
        what = f"its tokenizer.json has fingerprint {found.fingerprint}, the tokens were made with {facts['fingerprint']}"
        raise damaged(store.path, what, store.manifest)
    return found


def _open_named(config: TextConfig) -> Store:
    store = Store.open(Path(config.text).expanduser())
    made = store.manifest["text"]["valid"]
    if made != config.valid:
        raise UserError(f"store {store.path} was split with valid={made}, not data.valid={config.valid}; name its text instead")
    return store


class TextPlan:
    """A corpus in the tokens that a config asks for; the key names the content."""

    def __init__(self, config: TextConfig):
        self.config, self.corpus = config, open_corpus(config.text)
        named = config.tokenizer in NAMES
        self.given = None if named else tokenizers.load(Path(config.tokenizer).expanduser())
        self.identity = self.corpus.identity()
        spec = [config.tokenizer, config.vocab if config.tokenizer == "bpe" else config.unknown]
        self.key = digest([FORMAT, self.identity, self.given.fingerprint if self.given else spec, config.valid])
        kind = self.given.kind if self.given else config.tokenizer
        self.label = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', self.corpus.name)[:40]}-{kind}"

    def build(self, writer: Writer) -> Store:
        if "tokenizer" in writer.state:
            tokenizer = tokenizers.load(writer.aside)
        else:
            tokenizer, num_unknown = self._make_tokenizer()
            tokenizer.save(writer.aside)
            writer.save(tokenizer=tokenizer.fingerprint, document=0, offset=0, num_bytes=0, num_unknown=num_unknown)
        writer.array("tokens", tokenizer.dtype)
        self._write(writer, tokenizer)
        self._require(self.corpus.identity() == self.identity, writer)
        facts = {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
        source = {"name": self.config.text, "identity": self.identity, **self.corpus.describe()}
        counts = {name: writer.state[name] for name in ("num_bytes", "num_unknown")}
        return commit(writer, self.key, self.config, facts, source, counts)

    def _make_tokenizer(self) -> tuple[Tokenizer, int]:
        """The tokenizer, and how many characters of the text it does not know."""
        name, unknown = self.config.tokenizer, self.config.unknown
        if name == "bpe":
            from seedbed.data.bpe import train_bpe

            return train_bpe(_training_text(self.corpus), self.config.vocab), 0
        fixed = CharTokenizer(TABLE_75, unk=True, unknown=unknown) if name == "char75" else self.given
        if fixed is None:
            counts = _count_characters(self.corpus)
            counts[ord("\n")] += self.corpus.num_documents > 1  # the line end separates documents
            return CharTokenizer(char_table(counts), unk=unknown == "unk", unknown=unknown), 0
        if not isinstance(fixed, CharTokenizer):
            return fixed, 0
        from seedbed.data.unknown_characters import count_unknown

        return fixed, count_unknown(fixed, self.corpus)

    def _write(self, writer: Writer, tokenizer: Tokenizer) -> None:
        progress = Progress("tokenising", self.corpus.unit)
        state, unsaved, saved_at = dict(writer.state), 0, time.monotonic()
        for chunks in _batched(self.corpus.chunks(state["document"], state["offset"])):
            tokens = []
            for chunk, ids in zip(chunks, tokenizer.encode_all([p.text for p in chunks]), strict=True):
                between = chunk.ends and chunk.offset > 0 and chunk.document + 1 < self.corpus.num_documents
                tokens += [ids, tokenizer.separator] if between else [ids]
            writer.append("tokens", np.concatenate(tokens))
            last, size = chunks[-1], sum(len(p.text.encode()) for p in chunks)
            state["document"], state["offset"] = (last.document + 1, 0) if last.ends else (last.document, last.offset)
            state["num_bytes"] += size
            unsaved += size
            if unsaved >= SAVE_EVERY or time.monotonic() - saved_at > SAVE_SECONDS:
                self._require(not self.corpus.changed(), writer)
                writer.save(**state)
                unsaved, saved_at = 0, time.monotonic()
            progress(last.done, self.corpus.total)
        progress.close()
        writer.save(**state)

    def _require(self, unchanged: bool, writer: Writer) -> None:
        """A text that changes while it is read may mix two versions: nothing is kept."""
        if not unchanged:
            writer.discard()
            raise UserError(f"{self.config.text} changed while it was read; run again when nothing writes to it")


def _batched(chunks: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    """Many small documents, or one chunk of a large one: enough work for every core."""
    some, length = [], 0
    for chunk in chunks:
        some.append(chunk)
        length += len(chunk.text)
        if length >= BATCH_CHARACTERS:
            yield some
            some, length = [], 0
    if some:
        yield some


def read_all(corpus: Corpus, what: str) -> Iterator[Chunk]:
    """All chunks of a text, under a progress line."""
    progress = Progress(what, corpus.unit)
    try:
        for chunk in corpus.chunks():
            yield chunk
            progress(chunk.done, corpus.total)
    finally:
        progress.close()


def _training_text(corpus: Corpus) -> Iterator[str]:
    length = 0
    for chunk in read_all(corpus, "learning merges from"):
        if length >= TRAIN_LIMIT:
            break
        length += len(chunk.text)
        yield chunk.text


def _count_characters(corpus: Corpus) -> np.ndarray:
    """How often each code point occurs."""
    counts = np.zeros(NUM_CODEPOINTS, np.int64)
    for chunk in read_all(corpus, "reading characters"):
        some = np.bincount(codepoints(chunk.text))
        counts[: len(some)] += some
    return counts


def commit(
    writer: Writer, key: str, config: TextConfig, tokenizer: dict[str, Any], source: dict[str, Any], counts: dict[str, int]
) -> Store:
    """Commit with a contiguous split, the last part for validation, and the manifest."""
    num_tokens = writer.arrays["tokens"].num_rows
    num_valid = math.ceil(round(num_tokens * config.valid, 6))
    if not 0 < num_valid < num_tokens:
        raise UserError(f"{config.text} has {num_tokens} tokens: too few for a training and a validation part")
    return writer.commit(
        splits={"train": (0, num_tokens - num_valid), "valid": (num_tokens - num_valid, num_tokens)},
        limits={"tokens": tokenizer["vocab_size"]},
        extra=[] if tokenizer["kind"] == "random" else [tokenizers.NAME],
        text={"key": key, "valid": config.valid},
        tokenizer=tokenizer,
        source=source,
        counts={"num_tokens": num_tokens, **counts},
        rebuild=_rebuild_command(config, writer.path),
    )


def _rebuild_command(config: TextConfig, path: Path) -> str:
    """The command that makes this store again, from anywhere."""
    if (config.valid, config.unknown) != (TextConfig.valid, TextConfig.unknown):
        return f"{shlex.join(['rm', '-r', str(path)])}  (the next run prepares it again)"
    words = ["seedbed", "data", "prepare", _from_anywhere(config.text)]
    words += ["--tokenizer", _from_anywhere(config.tokenizer)] if config.tokenizer != "char" else []
    words += ["--vocab", str(config.vocab)] if config.tokenizer == "bpe" else []
    return shlex.join([*words, "--out", str(path)])


def _from_anywhere(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.absolute()) if name not in NAMES and path.exists() else name
