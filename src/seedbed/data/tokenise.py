"""Tokenises a text into a store: streamed in bounded memory, resumed after an interruption."""

import math
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.data import tokenizers
from seedbed.data.corpus import Chunk, Corpus, TextConfig
from seedbed.data.prepare import NAMES, TextPlan
from seedbed.data.store import Progress, Store, Writer
from seedbed.data.tokenizers import NUM_CODEPOINTS, TABLE_75, CharTokenizer, Tokenizer, codepoints
from seedbed.errors import UserError

# A killed preparation loses at most this much text, or time.
SAVE_EVERY, SAVE_SECONDS = 32 << 20, 5.0
BATCH_CHARACTERS = 1 << 20


def build_text(plan: TextPlan, writer: Writer) -> Store:
    if "tokenizer" in writer.state:
        tokenizer = tokenizers.load(writer.aside)
    else:
        tokenizer, num_unknown = _make_tokenizer(plan)
        tokenizer.save(writer.aside)
        writer.save(tokenizer=tokenizer.fingerprint, document=0, offset=0, num_bytes=0, num_unknown=num_unknown)
    writer.array("tokens", tokenizer.dtype)
    _write(plan, writer, tokenizer)
    _require(plan, writer, plan.corpus.identity() == plan.identity)
    facts = {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    source = {"name": plan.config.text, "identity": plan.identity, **plan.corpus.describe()}
    counts = {name: writer.state[name] for name in ("num_bytes", "num_unknown")}
    return commit(writer, plan.key, plan.config, facts, source, counts)


def _write(plan: TextPlan, writer: Writer, tokenizer: Tokenizer) -> None:
    progress = Progress("tokenising", plan.corpus.unit)
    state, unsaved, saved_at = dict(writer.state), 0, time.monotonic()
    for chunks, tokens in encode_corpus(plan.corpus, tokenizer, state["document"], state["offset"]):
        writer.append("tokens", tokens)
        last, size = chunks[-1], sum(len(p.text.encode()) for p in chunks)
        state["document"], state["offset"] = (last.document + 1, 0) if last.ends else (last.document, last.offset)
        state["num_bytes"] += size
        unsaved += size
        if unsaved >= SAVE_EVERY or time.monotonic() - saved_at > SAVE_SECONDS:
            _require(plan, writer, not plan.corpus.changed())
            writer.save(**state)
            unsaved, saved_at = 0, time.monotonic()
        progress(last.done, plan.corpus.total)
    progress.close()
    writer.save(**state)


def encode_corpus(
    corpus: Corpus, tokenizer: Tokenizer, document: int = 0, offset: int = 0
) -> Iterator[tuple[list[Chunk], np.ndarray]]:
    """Some chunks at a time with their tokens, and separators between documents."""
    for chunks in _batched(corpus.chunks(document, offset)):
        tokens = []
        for chunk, ids in zip(chunks, tokenizer.encode_all([p.text for p in chunks]), strict=True):
            between = chunk.ends and chunk.offset > 0 and chunk.document + 1 < corpus.num_documents
            tokens += [ids, tokenizer.separator] if between else [ids]
        yield chunks, np.concatenate(tokens)


def _require(plan: TextPlan, writer: Writer, unchanged: bool) -> None:
    """A text that changes while it is read may mix two versions: nothing is kept."""
    if not unchanged:
        writer.discard()
        raise UserError(f"{plan.config.text} changed while it was read; run again when nothing writes to it")


def _make_tokenizer(plan: TextPlan) -> tuple[Tokenizer, int]:
    """The tokenizer, and how many characters of the text it does not know."""
    name, unknown = plan.config.tokenizer, plan.config.unknown
    if name == "bpe":
        from seedbed.data.bpe import train_bpe, training_text

        return train_bpe(training_text(plan.corpus), plan.config.vocab), 0
    fixed = CharTokenizer(TABLE_75, unk=True, unknown=unknown) if name == "char75" else plan.given
    if fixed is None:
        counts = _count_characters(plan.corpus)
        # The line end separates documents.
        counts[ord("\n")] += plan.corpus.num_documents > 1
        return CharTokenizer(char_table(counts), unk=unknown == "unk", unknown=unknown), 0
    from seedbed.data.unknown_characters import count_unknown

    return fixed, count_unknown(plan.corpus, fixed) if isinstance(fixed, CharTokenizer) else 0


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


def char_table(counts: np.ndarray) -> list[str]:
    """The table of a text, from the count of every code point: sorted, so that it is the same in every process."""
    return [chr(p) for p in np.flatnonzero(counts).tolist()]


def _count_characters(corpus: Corpus) -> np.ndarray:
    counts = np.zeros(NUM_CODEPOINTS, np.int64)
    progress = Progress("reading characters", corpus.unit)
    for chunk in corpus.chunks():
        some = np.bincount(codepoints(chunk.text))
        counts[: len(some)] += some
        progress(chunk.done, corpus.total)
    progress.close()
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
        rebuild=rebuild_command(config, writer.path),
    )


def rebuild_command(config: TextConfig, path: Path) -> str:
    if (config.valid, config.unknown) != (TextConfig.valid, TextConfig.unknown):
        return f"{shlex.join(['rm', '-r', str(path)])}  (the next run prepares it again)"
    words = ["seedbed", "data", "prepare", _from_anywhere(config.text)]
    words += ["--tokenizer", _from_anywhere(config.tokenizer)] if config.tokenizer != "char" else []
    words += ["--vocab", str(config.vocab)] if config.tokenizer == "bpe" else []
    return shlex.join([*words, "--out", str(path)])


def _from_anywhere(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.absolute()) if name not in NAMES and path.exists() else name
