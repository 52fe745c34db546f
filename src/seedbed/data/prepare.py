"""Text into a store of tokens: streamed in bounded memory, cached by content, and continued where it was interrupted."""

import contextlib
import errno
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data import tokenizers
from seedbed.data.corpus import Corpus, Piece, TextConfig, open_corpus, random_size
from seedbed.data.meter import Meter
from seedbed.data.store import DamagedStore, Store, Writer, building, damaged, digest, is_store
from seedbed.data.tokenizers import (
    NUM_CODEPOINTS,
    TABLE_75,
    CharTokenizer,
    Tokenizer,
    char_table,
    codepoints,
    token_dtype,
    train_bpe,
    unknown_report,
)
from seedbed.errors import UserError

# Bump when the same text and tokenizer give other tokens than before.
FORMAT = 1
# A killed preparation loses at most this much text, or time.
SAVE_EVERY, SAVE_SECONDS = 32 << 20, 5.0
# Merges are learnt from the beginning of a text, up to this many characters.
TRAIN_LIMIT = 512 << 20
RANDOM_SHARE, TOGETHER = 1 << 22, 1 << 20
# Words that never stand for a file.
NAMES = {"reference", "stdlib", "char", "char75", "bpe"}

Say = Callable[[str], None]


def prepare_text(config: TextConfig, *, out: Path | None = None, rebuild: bool = False, say: Say = lambda line: None) -> Store:
    """The store for this text and tokenizer: the one that exists, or a new one. `rebuild` replaces a damaged one.

    An interrupted preparation goes on where it stopped, and gives the same store as one that ran through.
    """
    if is_store(Path(config.text).expanduser()):
        return _open_named(config)
    job = _RandomJob(config) if config.text.startswith("random:") else _TextJob(config)
    path = out.absolute() if out else cache_folder(config.cache) / f"{job.label}-{job.key[:12]}"
    return prepared(path, job.key, job.build, rebuild=rebuild, say=say)


def prepared(path: Path, key: str, build: Callable[[Writer], Store], *, rebuild: bool, say: Say) -> Store:
    """The store at `path`, or what `build` makes of a writer there; whoever comes second waits and finds it ready."""
    if path.exists() and not is_store(path) and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not a store; choose another --out")
    with building(path, say), _disk_errors(path):
        store = _existing(path, key, rebuild, say) if is_store(path) else None
        return store or build(Writer(path, key))


def cache_folder(named: str) -> Path:
    """Where stores are kept: data.cache, $SEEDBED_CACHE, or the user's cache folder."""
    named = named or os.environ.get("SEEDBED_CACHE", "")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named or f"{home}/seedbed").expanduser().absolute()


def load_tokenizer(store: Store) -> Tokenizer | None:
    """The tokenizer that lives with the tokens; None for random ones. It must be the one that made them."""
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


def _existing(path: Path, key: str, rebuild: bool, say: Say) -> Store | None:
    """The store at `path` if it is sound and the one asked for; None when it is damaged and may be replaced."""
    try:
        store = Store.open(path, check=not rebuild)
        problems = store.verify(Meter("verifying")) if rebuild else []
        if problems:
            raise damaged(path, problems[0], store.manifest)
    except DamagedStore as error:
        if not rebuild:
            raise
        say(f"{str(error).splitlines()[0]}; building it again")
        return None
    made = next((store.manifest[kind] for kind in ("text", "images", "recording") if kind in store.manifest), {})
    if made.get("key") != key:
        what = "recording" if "recording" in store.manifest else "text or tokenizer"
        raise UserError(f"{path} holds a store of another {what}; remove it first, or choose another --out")
    return store


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """A full disk or a forbidden folder is the user's to mend; what was prepared so far stays."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else error.strerror or str(error)
        raise UserError(f"cannot write {path}: {what}; what was prepared is kept, so mend that and run again") from error


class _RandomJob:
    """Random tokens for speed runs."""

    def __init__(self, config: TextConfig):
        self.config = config
        self.num_tokens, self.vocab = random_size(config.text)
        self.label = f"random-{self.num_tokens}-{self.vocab}"
        self.key = digest([FORMAT, "random", self.num_tokens, self.vocab, config.valid])

    def build(self, writer: Writer) -> Store:
        dtype = token_dtype(self.vocab)
        writer.array("tokens", dtype)
        meter = Meter("drawing random tokens", "tokens")
        for done in range(0, self.num_tokens, RANDOM_SHARE):
            rng = np.random.Generator(np.random.PCG64([1, done]))
            writer.append("tokens", rng.integers(0, self.vocab, min(RANDOM_SHARE, self.num_tokens - done), dtype))
            meter(done, self.num_tokens)
        meter.close()
        tokenizer = {"kind": "random", "fingerprint": "random", "vocab_size": self.vocab}
        return _commit(writer, self.key, self.config, tokenizer, {"name": self.config.text}, {"num_bytes": 0, "num_unknown": 0})


class _TextJob:
    """A corpus on its way to tokens."""

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
        self._require(writer, self.corpus.identity() == self.identity)
        facts = {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
        source = {"name": self.config.text, "identity": self.identity, **self.corpus.describe()}
        counts = {name: writer.state[name] for name in ("num_bytes", "num_unknown")}
        return _commit(writer, self.key, self.config, facts, source, counts)

    def _write(self, writer: Writer, tokenizer: Tokenizer) -> None:
        meter = Meter("tokenising", self.corpus.unit)
        state, unsaved, saved_at = dict(writer.state), 0, time.monotonic()
        for pieces in _together(self.corpus.pieces(state["document"], state["offset"])):
            tokens = []
            for piece, ids in zip(pieces, tokenizer.encode_all([p.text for p in pieces]), strict=True):
                between = piece.ends and piece.offset > 0 and piece.document + 1 < self.corpus.num_documents
                tokens += [ids, tokenizer.separator] if between else [ids]
            writer.append("tokens", np.concatenate(tokens))
            last, size = pieces[-1], sum(len(p.text.encode()) for p in pieces)
            state["document"], state["offset"] = (last.document + 1, 0) if last.ends else (last.document, last.offset)
            state["num_bytes"] += size
            unsaved += size
            if unsaved >= SAVE_EVERY or time.monotonic() - saved_at > SAVE_SECONDS:
                self._require(writer, not self.corpus.changed())
                writer.save(**state)
                unsaved, saved_at = 0, time.monotonic()
            meter(last.done, self.corpus.total)
        meter.close()
        writer.save(**state)

    def _require(self, writer: Writer, unchanged: bool) -> None:
        """What was read from a text in motion may mix two versions of it: none of it is kept."""
        if not unchanged:
            writer.discard()
            raise UserError(f"{self.config.text} changed while it was read; run again when nothing writes to it")

    def _make_tokenizer(self) -> tuple[Tokenizer, int]:
        """The tokenizer, and how many characters of the text it does not know."""
        name, unknown = self.config.tokenizer, self.config.unknown
        if name == "bpe":
            return train_bpe(self._training_text(), self.config.vocab), 0
        fixed = CharTokenizer(TABLE_75, unk=True, unknown=unknown) if name == "char75" else self.given
        if fixed is None:
            counts = _count_characters(self.corpus)
            # The line end separates documents.
            counts[ord("\n")] += self.corpus.num_documents > 1
            return CharTokenizer(char_table(counts), unk=unknown == "unk", unknown=unknown), 0
        found = _find_unknown(self.corpus, fixed) if isinstance(fixed, CharTokenizer) else []
        if found and isinstance(fixed, CharTokenizer) and fixed.unknown == "error":
            raise UserError(unknown_report(found))
        return fixed, sum(count for _, count, _ in found)

    def _training_text(self) -> Iterator[str]:
        meter, length = Meter("learning merges from", self.corpus.unit), 0
        for piece in self.corpus.pieces():
            if length >= TRAIN_LIMIT:
                break
            length += len(piece.text)
            meter(piece.done, self.corpus.total)
            yield piece.text
        meter.close()


def _together(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Many small documents, or one piece of a large one: enough to keep every core busy."""
    some, length = [], 0
    for piece in pieces:
        some.append(piece)
        length += len(piece.text)
        if length >= TOGETHER:
            yield some
            some, length = [], 0
    if some:
        yield some


def _count_characters(corpus: Corpus) -> np.ndarray:
    """How often each code point occurs."""
    counts = np.zeros(NUM_CODEPOINTS, np.int64)
    meter = Meter("reading characters", corpus.unit)
    for piece in corpus.pieces():
        some = np.bincount(codepoints(piece.text))
        counts[: len(some)] += some
        meter(piece.done, corpus.total)
    meter.close()
    return counts


def _find_unknown(corpus: Corpus, tokenizer: CharTokenizer) -> list[tuple[int, int, str]]:
    """(code point, count, first place) of every character that the tokenizer does not know."""
    found: dict[int, tuple[int, str]] = {}
    meter, before = Meter("reading characters", corpus.unit), 0
    for piece in corpus.pieces():
        for point, count, index in tokenizer.unknown_in(piece.text):
            place = f"at character {before + index:,}" + (f" of document {piece.document}" if corpus.num_documents > 1 else "")
            total, first = found.get(point, (0, place))
            found[point] = total + count, first
        before = 0 if piece.ends else before + len(piece.text)
        meter(piece.done, corpus.total)
    meter.close()
    return [(point, count, place) for point, (count, place) in found.items()]


def _commit(
    writer: Writer, key: str, config: TextConfig, tokenizer: dict[str, Any], source: dict[str, Any], counts: dict[str, int]
) -> Store:
    """The contiguous split, the last part for validation, and everything a reader wants to know."""
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
        rebuild=rebuild_command(config, writer.path),
    )


def rebuild_command(config: TextConfig, path: Path) -> str:
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
