"""`seedbed data prepare | inspect | verify | bench`: each prints text or JSON, and returns an exit code."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seedbed.config import validate
from seedbed.data.corpus import TextConfig
from seedbed.data.image_store import prepare_images
from seedbed.data.images import ImageConfig
from seedbed.data.order import draw
from seedbed.data.prepare import load_tokenizer, prepare_text
from seedbed.data.store import DamagedStore, Progress, Store, is_store
from seedbed.data.tokenizers import Tokenizer
from seedbed.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError

BENCH_BLOCK, BENCH_BATCH = 1024, 64
NUM_SAMPLES, NUM_FREQUENT, WIDTH = 4, 12, 74
# Statistics of a larger store are computed on its first tokens.
COUNT_LIMIT = 64 << 20
_CONSOLE = Console(highlight=False, markup=False, emoji=False)
_MARKS = {" ": "·", "\n": "↵", "\t": "→", "\r": "␍"}


def prepare(
    path: str, *, tokenizer: str = "char", vocab: int = TextConfig.vocab, out: str | Path | None = None, json: bool = False
) -> int:
    """Create or find the store of a text; a damaged one is rebuilt."""
    config, start = TextConfig(text=str(path), tokenizer=str(tokenizer), vocab=vocab), time.monotonic()
    store = _prepared(prepare_text, config, out)
    if store is None:
        return EXIT_INTERRUPTED
    is_named = out or is_store(Path(path))
    words = ["seedbed", "train", "gpt/demo", f"data.text={store.path if is_named else config.text}"]
    if not is_named and config.tokenizer != TextConfig.tokenizer:
        words.append(f"data.tokenizer={config.tokenizer}")
        words += [f"data.vocab={config.vocab}"] if config.tokenizer == "bpe" else []
    result = {
        "store": str(store.path),
        "fingerprint": store.fingerprint,
        "tokenizer": store.manifest["tokenizer"],
        "counts": store.manifest["counts"],
        "splits": store.manifest["splits"],
        "seconds": round(time.monotonic() - start, 2),
        "train": shlex.join(words),
    }
    sizes = " + ".join(f"{end - begin:,} {name}" for name, (begin, end) in result["splits"].items())
    made, counts = result["tokenizer"], result["counts"]
    shown = {
        "store": result["store"],
        "tokens": f"{counts['num_tokens']:,} = {sizes}",
        "tokenizer": f"{made['kind']}, {made['vocab_size']:,} ids, fingerprint {made['fingerprint']}",
        **({"unknown": f"{counts['num_unknown']:,} characters"} if counts["num_unknown"] else {}),
        "fingerprint": result["fingerprint"],
        "train on it": result["train"],
    }
    return _print_result(result, shown, json)


def prepare_image_store(path: str, *, size: int, width: int = 0, out: str | Path | None = None, json: bool = False) -> int:
    """Create or find the store of a folder, file or dataset of images; a damaged one is rebuilt."""
    start = time.monotonic()
    store = _prepared(prepare_images, ImageConfig(images=str(path), size=size, width=width), out)
    if store is None:
        return EXIT_INTERRUPTED
    words = ["seedbed", "train", "flow/cifar10", f"data.images={store.path if out else path}", f"data.size={size}"]
    words += [f"data.width={width}"] if width else []
    result = {**image_facts(store), "seconds": round(time.monotonic() - start, 2), "train on it": shlex.join(words)}
    return _print_result(result, result, json)


def _prepared(make: Callable[..., Store], config: TextConfig | ImageConfig, out: str | Path | None) -> Store | None:
    validate(config)
    config.check()
    try:
        return make(config, out=Path(out) if out else None, rebuild=True, say=_say)
    except KeyboardInterrupt:
        _say("interrupted; the same command continues")
        return None


def inspect(path: str, *, json: bool = False, open_recipe: Callable[[str], Any] | None = None) -> int:
    """Show the content of a store, a text, or (through `open_recipe`) the data of RECIPE/PRESET."""
    is_preset = "/" in path and not path.startswith("hf:") and not Path(path).expanduser().exists()
    data = open_recipe(path) if open_recipe and is_preset else None
    if plain := _without_tokens(path, data):
        return _print_result(plain, plain, json)
    found = facts(*((data.store, data.train.block) if data else _find(path)))
    _print_result(found, _facts_in_words(found), json)
    for sample in () if json else found["samples"]:
        _CONSOLE.print(Text(f"\n{sample['split']} from token {sample['start']:,}", style="dim"))
        for name in ("x", "y"):
            _CONSOLE.print(Text(f"  {name} {sample[name]}"), no_wrap=True, overflow="crop", crop=False)
    return EXIT_OK


def _without_tokens(path: str, data: Any) -> dict[str, Any] | None:
    """The facts of images or generated data; None for tokens."""
    if data:
        return None if hasattr(data, "store") else data.facts
    place = Path(path).expanduser()
    store = Store.open(place) if is_store(place) else None
    return image_facts(store) if store and "image" in store.arrays else None


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def verify(path: str, *, json: bool = False) -> int:
    """Hash everything again and check splits and values; 1 when something is wrong."""
    problems, size = [], 0
    start = time.monotonic()
    progress = Progress("verifying")
    try:
        store = Store.open(Path(path), check=False)  # report all problems, not only the first
        size = sum(array.nbytes for array in store.arrays.values())
        problems = store.verify(progress)
        if "tokenizer" in store.manifest:
            load_tokenizer(store)
    except DamagedStore as error:
        problems.append(str(error))
    finally:
        progress.close()
    if json:
        print(dumps({"store": str(path), "sound": not problems, "problems": problems, "bytes": size}))
    elif problems:
        print("\n".join(problems))
    else:
        print(f"{path} is sound: {size:,} bytes hashed in {time.monotonic() - start:.1f} s, splits and values as recorded")
    return EXIT_FAILED if problems else EXIT_OK


def bench(path: str, *, json: bool = False) -> int:
    """Throughput of the feed on this store, against plain copies of as many bytes in the same process."""
    from seedbed.data.text import TextSource
    from seedbed.report.data_bench import compare

    store, _ = _find(path)
    tokens = store.split("train", "tokens")
    block = max(1, min(BENCH_BLOCK, len(tokens) // 2))
    source = TextSource(tokens, block, "phase", 1)
    result = {"store": str(store.path), "block": block, **compare(source, batch=BENCH_BATCH)}
    if json:
        print(dumps(result))
        return EXIT_OK
    table = Table("", "ms per batch", "GB/s", "feed against it", box=None, pad_edge=False)
    ratios = {"feed": "", "copy": f"{result['ratio']:.2f}", "memcpy": f"{result['ratio_memcpy']:.2f}"}
    for (name, ratio), title in zip(ratios.items(), ("feed", "plain copy (tensor)", "plain copy (memcpy)"), strict=True):
        table.add_row(title, f"{result[name]['ms']:.3f}", f"{result[name]['gb_per_s']:.2f}", ratio)
    size = f"{result['bytes_per_batch']:,} bytes a batch"
    _CONSOLE.print(f"{BENCH_BATCH} blocks of {block} + 1 tokens, {size}, on the CPU")
    _CONSOLE.print(table)
    return EXIT_OK


def _find(path: str) -> tuple[Store, int]:
    """The store that a path or text name means, and its block length."""
    place = Path(path).expanduser()
    if is_store(place) or (place.is_dir() and (place / "tokens.bin").exists()):
        store = Store.open(place)
        if "tokens" not in store.arrays:
            held = f"store {path} holds {', '.join(store.arrays)}, no tokens"
            raise UserError(f"{held}; look at it with: seedbed data inspect {path}")
        return store, TextConfig.block
    return prepare_text(TextConfig(text=path), say=_say), TextConfig.block


def _facts_in_words(found: dict[str, Any]) -> dict[str, str]:
    made, ids = found["tokenizer"], f"ids {found['min_id']} to {found['max_id']}, {found['num_used_ids']:,} in use"
    unknown = f", {found['num_unknown']:,} unknown characters" if found["num_unknown"] else ""
    parts = {}
    for name, s in found["splits"].items():
        blocks = f"{s['num_blocks']:,} blocks of {found['block']}, tail of {s['num_dropped']} dropped"
        parts[name] = f"{s['end'] - s['start']:,} tokens from {s['start']:,}: {blocks}"
    return {
        "store": found["store"],
        "source": found["source"]["name"],
        "fingerprint": found["fingerprint"],
        "tokenizer": f"{made['kind']}, {made['vocab_size']:,} ids, fingerprint {made['fingerprint']}",
        "tokens": f"{found['num_tokens']:,} as {found['dtype']}, {ids}",
        "text": f"{found['num_bytes']:,} bytes, {found['bytes_per_token']:.3f} per token{unknown}",
        "guessing": f"{found['unigram_nats']:.3f} nats per token when only frequencies are known",
        **parts,
        "frequent": "  ".join(f"{f['text']} {f['share']:.1%}" for f in found["frequent"]),
    }


def _print_result(result: dict[str, Any], shown: dict[str, Any], json: bool) -> int:
    if json:
        print(dumps(result))
        return EXIT_OK
    width = max(map(len, shown))
    for name, value in shown.items():
        _CONSOLE.print(Text(f"{name:<{width}}  ", style="bold").append(Text(_shown(value), style="not bold")), soft_wrap=True)
    return EXIT_OK


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def visible(text: str) -> str:
    """The text on one line: whitespace shown as marks, unprintable characters as the replacement character."""
    return "".join(_MARKS.get(c, c if c.isprintable() else "\ufffd") for c in text)


def facts(store: Store, block: int) -> dict[str, Any]:
    """Statistics and samples of a store, as plain values."""
    manifest, info = store.manifest, store.manifest["arrays"]["tokens"]
    tokenizer = load_tokenizer(store)
    counts, splits = manifest["counts"], {}
    for name, (start, end) in manifest["splits"].items():
        num_blocks, dropped = divmod(max(0, end - start - 1), block)
        splits[name] = {"start": start, "end": end, "num_blocks": num_blocks, "num_dropped": dropped}
    # The beginning of each split, and fixed random positions in the first one.
    start, end = manifest["splits"]["train"]
    drawn = draw(1, np.arange(NUM_SAMPLES - 2)) % np.uint64(max(1, end - start - WIDTH))
    places = [("train", start + offset) for offset in (0, *map(int, drawn))] + [("valid", manifest["splits"]["valid"][0])]
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
        "samples": [_sample(store, tokenizer, *place) for place in places],
    }


def image_facts(store: Store) -> dict[str, Any]:
    """What a store of images holds, as plain values."""
    manifest = store.manifest
    counts = np.bincount(store.arrays["class"], minlength=len(manifest["class_names"])).tolist()
    return {
        "store": str(store.path),
        "source": manifest["source"]["name"],
        "fingerprint": store.fingerprint,
        "shape": "x".join(map(str, store.arrays["image"].shape[1:])),
        "images": {name: end - start for name, (start, end) in manifest["splits"].items()},
        "classes": dict(zip(manifest["class_names"], counts, strict=True)),
        "bad": manifest["counts"]["num_bad"],
        "changed": manifest["counts"]["changed"],
        "listed": {entry["image"]: entry["why"] for entry in manifest["bad"]},
    }


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
