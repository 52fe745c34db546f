"""Content of a token store: decoded samples with visible whitespace, and statistics."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len

from seedbed.data.order import draw
from seedbed.data.prepare import load_tokenizer
from seedbed.data.store import Store
from seedbed.data.tokenizers import Tokenizer

NUM_SAMPLES, NUM_FREQUENT, WIDTH = 4, 12, 74
# Statistics of a larger store are computed on its first tokens.
COUNT_LIMIT = 64 << 20
_MARKS = {" ": "·", "\n": "↵", "\t": "→", "\r": "␍"}


def visible(text: str) -> str:
    """The text on one line: whitespace shown as marks, unprintable characters as the replacement character."""
    return "".join(_MARKS.get(c, c if c.isprintable() else "\ufffd") for c in text)


def facts(store: Store, block: int) -> dict[str, Any]:
    """Statistics and samples of a store, as plain values."""
    manifest, info = store.manifest, store.manifest["arrays"]["tokens"]
    tokenizer = load_tokenizer(store)
    counts = manifest["counts"]
    splits = {name: _split(start, end, block) for name, (start, end) in manifest["splits"].items()}
    return {
        "store": str(store.path),
        "fingerprint": store.fingerprint,
        "source": manifest["source"],
        "tokenizer": manifest["tokenizer"],
        "dtype": np.dtype(info["dtype"]).name,
        "num_tokens": counts["num_tokens"],
        "num_bytes": counts["num_bytes"],
        "num_unknown": counts["num_unknown"],
        "bytes_per_token": round(counts["num_bytes"] / counts["num_tokens"], 4),
        "min_id": info["min"],
        "max_id": info["max"],
        "block": block,
        "splits": splits,
        **_statistics(store.arrays["tokens"], manifest["tokenizer"]["vocab_size"], tokenizer),
        "samples": [_sample(store, tokenizer, *place) for place in _places(store)],
    }


def _split(start: int, end: int, block: int) -> dict[str, int]:
    num_blocks = max(0, end - start - 1) // block
    return {"start": start, "end": end, "num_blocks": num_blocks, "num_dropped": end - start - 1 - num_blocks * block}


def _statistics(tokens: np.ndarray, vocab_size: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    seen = tokens[:COUNT_LIMIT]
    counts = np.bincount(seen, minlength=vocab_size)
    share = counts[counts > 0] / len(seen)
    order = np.argsort(-counts, kind="stable")[:NUM_FREQUENT]
    frequent = [
        {"id": i, "text": visible(tokenizer.decode([i])) if tokenizer else str(i), "share": round(int(counts[i]) / len(seen), 5)}
        for i in order.tolist()
        if counts[i]
    ]
    entropy = float(-(share * np.log(share)).sum())
    return {"num_used_ids": len(share), "unigram_nats": round(entropy, 4), "counted": len(seen), "frequent": frequent}


def _places(store: Store) -> list[tuple[str, int]]:
    """The beginning of each split, and fixed random positions in the first one."""
    (start, end) = store.manifest["splits"]["train"]
    drawn = draw(1, np.arange(NUM_SAMPLES - 2)) % np.uint64(max(1, end - start - WIDTH))
    return [
        ("train", start),
        *(("train", start + int(place)) for place in drawn),
        ("valid", store.manifest["splits"]["valid"][0]),
    ]


def _sample(store: Store, tokenizer: Tokenizer | None, split: str, place: int) -> dict[str, Any]:
    """Inputs above targets: each column is a token and its target."""
    ids = store.arrays["tokens"][place : min(place + WIDTH + 1, store.manifest["splits"][split][1])].tolist()
    cells = [visible(tokenizer.decode([i])) if tokenizer else str(i) for i in ids]
    x, y = _columns(cells[:-1], cells[1:], "" if tokenizer and tokenizer.kind == "char" else "│")
    return {"split": split, "start": place, "x": x, "y": y}


def _columns(first: Sequence[str], second: Sequence[str], between: str) -> tuple[str, str]:
    lines, length = ["", ""], 0
    for cells in zip(first, second, strict=True):
        width = max(map(cell_len, cells))
        length += width + len(between)
        if length > WIDTH:
            break
        for n, cell in enumerate(cells):
            lines[n] += cell + " " * (width - cell_len(cell)) + between
    return lines[0], lines[1]
