"""Checks D: the data that the model receives: split, coverage, decoding, ranges, fingerprint, determinism, epochs."""

import contextlib
import copy
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seedbed.checks.calls import made_by, places, record
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import small_source
from seedbed.checks.subject import ROWS, Subject, source_line, take_rows
from seedbed.data.feed import Feed, Source
from seedbed.data.order import Order
from seedbed.data.text import TextData
from seedbed.data.tokenise import encode_corpus
from seedbed.report.findings import Finding
from seedbed.train.probe import Batch

# Distinct samples among those drawn, against what drawing at random would give. Measured: 0.991 and more.
MIN_DISTINCT = 0.99
# Held-out samples that are training samples too. Measured: 0.
MAX_OVERLAP = 0.001
# A generator legitimately repeats short samples: only a majority of repeats is a fault, or that they
# recur at one distance (share of all draws), or that held-out ones occur more often than fresh ones (difference).
# Measured on fourteen tasks: 0.71 to 1.0 distinct, 0.002 at one distance, a difference of 0.01.
GENERATED, MAX_ECHO, MAX_KNOWN = 0.5, 0.02, 0.05
# One token id as a share of all. Measured: 0.19 (the blank in prose).
MAX_SHARE = 0.5
# Standard deviation of undeclared floating-point inputs. Measured: 0.6 to 2; raw bytes 74, bytes divided twice 0.001.
SCALE = (0.02, 50.0)
DRAWS = 4096
NUM_PAIRED = 8  # rows among which entries of items are looked for
# Long windows of large images: fewer of them, so that a check takes seconds.
FEW_DRAWS, DRAWN_BYTES, BATCH_BYTES = 256, 1 << 27, 1 << 26
WALK = 1_000_000
FAR = 1_000_003  # a counter beyond any period that a mistake may have


@check("D2", "data split", "err", humbatova=(1, 11))
def data_split(subject: Subject) -> Finding:
    """Samples are distinct, and held-out samples do not occur in the training data."""
    train, valid = subject.real_data.train, subject.real_data.valid
    for name in set(train.arrays) & set(valid.arrays):
        if np.may_share_memory(train.arrays[name], valid.arrays[name]):
            what = f"training and validation rows of `{name}` are the same memory, in part or in whole"
            return failed(what, where=source_line(subject.recipe.function("data", "open_data")), case="D2-memory")
    seen = [_hash(row) for row in _draw(subject, train)]
    ratio, limit = len(set(seen)) / len(seen), MIN_DISTINCT * _expected_distinct(len(seen), train)
    if ratio < limit:
        where = source_line(type(train).locate) if type(train).locate is not Source.locate else subject.batch_line()
        what = f"{len(seen):,} draws hold {len(set(seen)):,} distinct samples"
        return failed(what, where=where, value=ratio, limit=limit)
    distance, times = _commonest_distance(seen)
    if not train.arrays and times > MAX_ECHO * len(seen):
        what = f"samples repeat every {distance:,} draws, {times:,} times in {len(seen):,}"
        return failed(what, where=subject.batch_line(), case="D2-repeats", value=times / len(seen), limit=MAX_ECHO)
    for name, other in (("validation", valid), ("test", subject.real_data.test)):
        if other is None:
            continue
        known, held = _all_rows(train, other)
        if not known:
            if train.num_items > len(seen):  # nothing follows from a part of the training data
                continue
            known, held = seen, [_hash(row) for row in _draw(subject, other)]
        overlap, most = (_share_known(known, held), MAX_OVERLAP) if train.arrays else _known_beyond_chance(known, held)
        if overlap > most:
            what = f"{overlap:.1%} of the {name} samples are training samples"
            where = _overlapping_split(subject) or source_line(subject.recipe.function("data", "open_data"))
            return failed(what, where=where, case="D2-overlap", value=overlap, limit=most)
    return passed(f"{len(set(seen)):,} distinct of {len(seen):,}", ratio, limit)


def _all_rows(train: Source, other: Source) -> tuple[list[bytes], list[bytes]]:
    """The hashes of all stored items of both, where an item is one row and there are not too many; else nothing."""
    total = sum(array.nbytes for source in (train, other) for array in source.arrays.values())
    if not train.arrays or train.arrays.keys() != other.arrays.keys() or total > DRAWN_BYTES or any(train.spans.values()):
        return [], []
    return tuple(  # type: ignore[return-value]
        [_hash(b"".join(array[n].tobytes() for array in source.arrays.values())) for n in range(source.num_items)]
        for source in (train, other)
    )


def _overlapping_split(subject: Subject) -> str:
    """The first function called while data is opened that gives two lists of rows with members in common."""
    calls = record(subject, lambda: subject.recipe.open_data(subject.config), values=True, shared="data")
    splits = (c for c in sorted(calls, key=lambda c: c.end) if len(c.gave) == 2 and all(p.dtype.kind in "iu" for p in c.gave))
    return next((places((call.code, *call.around)) for call in splits if np.intersect1d(call.gave[0], call.gave[1]).size), "")


def _commonest_distance(seen: list[bytes]) -> tuple[int, int]:
    """The distance at which samples repeat most often, and how often. Chance favours no distance."""
    last: dict[bytes, int] = {}
    distances: Counter[int] = Counter()
    for number, sample in enumerate(seen):
        if sample in last:
            distances[number - last[sample]] += 1
        last[sample] = number
    return distances.most_common(1)[0] if distances else (0, 0)


def _share_known(seen: list[bytes], held: list[bytes]) -> float:
    """The share of held-out samples that are training samples."""
    known = set(seen)
    return sum(h in known for h in held) / max(len(held), 1)


def _known_beyond_chance(seen: list[bytes], held: list[bytes]) -> tuple[float, float]:
    """The same against half of the training samples, and its limit: as many as occur in the other half are allowed."""
    half, rest = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    return _share_known(half, held), _share_known(half, rest) + MAX_KNOWN


@check("D3", "id coverage", "warn", humbatova=(1,), needs=("inputs",))
def id_coverage(subject: Subject) -> Finding:
    """No single token id makes up most of the data."""
    probe = subject.declared
    if probe.batch[probe.inputs].is_floating_point():
        return skipped("the inputs are not ids")
    ids = subject.batch(size=512)
    if probe.mask:
        flat = ids[probe.targets or probe.inputs][ids[probe.mask] != 0]  # the rest is padding
    else:
        flat = torch.cat([v.flatten() for v in ids.values() if not v.is_floating_point() and v.ndim > 1])
    values, counts = flat.unique(return_counts=True)
    share, top = counts.max().item() / len(flat), int(values[counts.argmax()])
    shown = f" ({probe.decode(torch.tensor([top]))!r})" if probe.decode else ""
    limit = max(MAX_SHARE, 1.3 / len(values))  # of two ids one is always half of all
    if share > limit:
        what = f"{share:.0%} of all tokens are id {top}{shown}"
        return failed(what, where=subject.batch_line(), value=share, limit=limit)
    return passed(f"{len(values)} ids seen, the commonest{shown} is {share:.0%}", share, limit)


@check("D4", "decoding", "err", humbatova=(1, 10), quick=True, needs=("decode", "holds", "inputs"))
def decoding(subject: Subject) -> Finding:
    """A decoded batch occurs verbatim in the source."""
    probe = subject.declared
    texts = [probe.decode(row) for row in probe.batch[probe.inputs]]
    for number, text in enumerate(texts):
        if not probe.holds(text):
            what = f"row {number} of a batch reads {text[:40]!r} and is not in the source"
            return failed(what, where=_wrong_ids(subject, probe, len(text)) or subject.batch_line())
    return passed(f"{len(texts)} rows found in the source, the first reads {texts[0][:24]!r}")


def _wrong_ids(subject: Subject, probe: Any, num: int) -> str:
    """Where ids are made, if those of the store do not decode to the source either; empty when it is the batch that is wrong."""
    stored, ids = next(iter(subject.data.train.arrays.values()), np.zeros(0))[:num], list[Any]()
    if probe.reencode is None or probe.holds(probe.decode(torch.from_numpy(stored.astype(np.int64)))):
        return ""
    return made_by(subject, lambda: ids.extend(probe.reencode()), lambda: ids[1][:64], shared="data")


@check("D5", "value range", "err", humbatova=(3, 10), quick=True)
def value_range(subject: Subject) -> Finding:
    """Values are finite, not constant, and fill the declared range."""
    batch = subject.batch(size=min(subject.data.train.num_items or 512, 512))
    ranges, may_be_constant = subject.declared.ranges or {}, subject.declared.constant
    for name, value in batch.items():
        # A mask may be constant; counters are positions, not content.
        if name == "index" or (value.dtype == torch.bool and value.any()):
            continue
        if name in may_be_constant and value.min() == value.max():
            continue
        numbers, declared, floating = value.double(), ranges.get(name), value.is_floating_point()
        low, high, std = float(numbers.min()), float(numbers.max()), float(numbers.std())
        what, case, span = "", "", declared[1] - declared[0] if declared else 0.0
        if not torch.isfinite(numbers).all():
            what, case = f"`{name}` holds {int((~torch.isfinite(numbers)).sum())} numbers that are not finite", "D5-finite"
        elif numbers.numel() > 1 and low == high and declared != (low, high):
            what, case = f"`{name}` is {low:g} everywhere", "D5-constant"
        elif declared and (low < declared[0] - 1e-6 * span or high > declared[1] + 1e-6 * span):
            what, case = f"`{name}` spans {low:.4g}..{high:.4g}, declared {declared[0]:g}..{declared[1]:g}", "D5-outside"
        elif declared and floating and high - low < span / 2:
            what = f"`{name}` spans only {low:.4g}..{high:.4g} of the declared {declared[0]:g}..{declared[1]:g}"
            case = "D5-faint"
        elif not declared and floating and not SCALE[0] <= std <= SCALE[1]:
            what = f"`{name}` has a standard deviation of {std:.3g} (expected {SCALE[0]:g} to {SCALE[1]:g})"
            case = "D5-scale"
        if case:
            severity = (subject.unsure or "warn") if case == "D5-scale" else ""
            return failed(what, where=subject.batch_line(), case=case, severity=severity)
    shown = (f"{n} {v.double().min():.3g}..{v.double().max():.3g}" for n, v in batch.items() if v.numel() and n != "index")
    return passed(", ".join(shown))


@check("D6", "fingerprint", "err", humbatova=(3,), quick=True, needs=("reencode",))
def fingerprint(subject: Subject) -> Finding:
    """Re-encoded items equal what is stored, and the storage dtype holds every id."""
    stored, fresh = subject.declared.reencode()
    size = min(len(stored), len(fresh))
    same = float(np.mean(np.asarray(stored[:size]) == np.asarray(fresh[:size]))) if size else 0.0
    if same < 1.0:
        first = int(np.argmax(np.asarray(stored[:size]) != np.asarray(fresh[:size]))) if size else 0
        what = f"{1 - same:.1%} of {size:,} stored ids differ from the re-encoded source, the first at {first}"
        where = places((subject.batch_line(), *([source_line(encode_corpus)] if isinstance(subject.data, TextData) else ())))
        return failed(what, where=where, value=1 - same, limit=0.0)
    return passed(f"{size:,} re-encoded ids equal the stored ones")


@check("D7", "data determinism", "err", humbatova=(3, 6))
def data_determinism(subject: Subject) -> Finding:
    """An item depends on its index alone: not on its batch, the random state, the tier, or writes into an earlier batch."""
    feed, again = (subject.feed(subject.data.train, ROWS) for _ in range(2))
    mapped = Feed(subject.data.train, batch=ROWS, parts=1, seed=subject.config.seed, device=torch.device("cpu"), limit_bytes=0)
    with contextlib.closing(mapped):
        for problem, where in _impurities(subject, feed, again, mapped):
            return failed(problem, where=where)
    return passed("alone, in another batch, with another seed, memory-mapped, and after an in-place write: the same bytes")


def _impurities(subject: Subject, feed: Feed, again: Feed, mapped: Feed) -> Iterator[tuple[str, str]]:
    """What differs although it must not, and where to look."""
    batch = subject.batch_line()
    feed.load(0)
    held = feed.part(0)
    copy = {k: v.clone() for k, v in held.items()}
    feed.load(ROWS)
    if not _equal(held, copy):
        yield "a batch changed while the next one was loaded", source_line(Feed.load)
    torch.manual_seed(99)
    again.load(0)
    if not _equal(again.part(0), copy):
        yield "the same items differ after the random generators moved on", batch
    mapped.load(0)
    if not _equal(mapped.part(0), copy):
        yield "the same items differ when they are read through the memory map", source_line(Feed.load)
    again.load(FAR)
    is_counter = "index" in copy and torch.equal(copy["index"], torch.arange(ROWS)) and not subject.config.limit.train
    if is_counter and not torch.equal(again.part(0)["index"], FAR + torch.arange(ROWS)):
        yield "`index` is not the counter of the items: what follows from it, such as noise, comes again", batch
    one = subject.feed(subject.data.train, 1)
    one.load(2)
    if not _equal(one.part(0), take_rows(copy, slice(2, 3))):
        yield "item 2 alone differs from item 2 in a batch", batch
    for source in (subject.data.train, subject.data.valid):
        if name := _unpaired_lookup(source):
            what = f"{name}() gives other values for the same rows in another order: its parts belong to different items"
            yield what, source_line(getattr(type(source), name))
    few = small_source(subject.data.train)
    is_small = sum(array.nbytes for array in few.arrays.values()) < BATCH_BYTES
    if is_small and len({*few.spans.values()}) == 1 and (apart := unpaired(few, _rows_fed)):
        yield apart, batch
    for value in held.values():
        value.fill_(1)
    fresh = subject.feed(subject.data.train, ROWS)
    fresh.load(0)
    if not _equal(fresh.part(0), copy):
        yield "writing into a batch changed the data that the next one is made from", source_line(Feed.load)


def unpaired(source: Source, rows_of: Callable[[Source], list[bytes]]) -> str:
    """Which entries of an item are in different rows of what is made of a source; empty when items stay whole.

    One entry of one item is changed at a time, and the rows that change are compared.
    """
    base, found = rows_of(source) if len(source.arrays) > 1 else [], {}
    for name, array in source.arrays.items() if base else ():
        other = next((n for n in range(1, len(array)) if not np.array_equal(array[n], array[0])), 0)
        changed, one = array.copy(), copy.copy(source)
        changed[0] = array[other]
        vars(one).update({key: changed for key, value in vars(source).items() if value is array})
        one.arrays = {**source.arrays, name: changed}
        if moved := {n for n, (x, y) in enumerate(zip(base, rows_of(one), strict=False)) if x != y}:
            found[name] = moved
    if len({frozenset(moved) for moved in found.values()}) < 2:
        return ""
    rows = ", ".join(f"`{name}` rows {sorted(moved)[:4]}" for name, moved in found.items())
    return f"the entries of one item are in different rows: {rows}"


def _rows_fed(source: Source) -> list[bytes]:
    """The rows of a batch of the first items, all entries joined."""
    feed = Feed(source, batch=NUM_PAIRED, parts=1, seed=1, device=torch.device("cpu"), shuffle=False)
    feed.load(0)
    entries = [value.contiguous().numpy() for name, value in feed.part(0).items() if name != "index"]
    return [b"".join(entry[n].tobytes() for entry in entries) for n in range(NUM_PAIRED)]


def _unpaired_lookup(source: Source) -> str:
    """The name of a method that takes row numbers and whose results do not follow their order; empty when there is none."""
    rows = np.array([7, 2, 11, 5, 3]) % max(source.num_items, 1)
    for name, method in inspect.getmembers(type(source), inspect.isfunction):
        wanted = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty][1:]
        if name.startswith("_") or len(wanted) != 1 or "ndarray" not in str(wanted[0].annotation) or not source.arrays:
            continue
        with contextlib.suppress(IndexError, KeyError, TypeError, ValueError):
            orders = [getattr(source, name)(r) for r in (rows, rows[::-1].copy())]
            one, other = (value if isinstance(value, tuple) else (value,) for value in orders)
            for a, b in zip(one, other, strict=True):
                if isinstance(a, Tensor) and a.ndim and len(a) == len(rows) and not torch.equal(a.flip(0), b):
                    return name
    return ""


@check("D8", "epoch order", "err", humbatova=(1, 6))
def epoch_order(subject: Subject) -> Finding:
    """Each index occurs once per epoch, epochs differ in order, and every row is reachable."""
    source = subject.real_data.train
    if not source.arrays:
        return skipped("the data is generated without end")
    num = min(source.num_items, WALK)
    first, second = _item_order(source, 1, 0, num), _item_order(source, 1, source.num_items, num)
    if problem := _order_problem(source, first, second, _item_order(source, 2, 0, num)):
        # An order that is correct by itself was broken by the feed.
        alone = Order(source.num_items, 1).at(0, num)[1]
        return failed(problem, where=source_line(Order.at if np.array_equal(alone, first) else Feed.load))
    if wrong := _parts_problem(subject):
        return failed(wrong, where=source_line(Feed.part), case="D8-parts")
    if crossing := _crossing(source):
        made = record(subject, lambda: subject.recipe.check_data(subject.small, subject.real_data))
        inside = (call.code for call in made if type(source).__init__.__code__ in call.around)
        return failed(crossing, where=places((source_line(type(source).locate), *inside)), case="D8-ends")
    lost, limit = _lost_rows(source), max(1, *source.spans.values())
    if lost > limit:
        what = f"{lost:,} rows at the ends are out of reach of any item (at most {limit:,} can be left over)"
        return failed(what, where=source_line(type(source).locate), case="D8-lost", value=lost, limit=limit)
    return passed(f"{num:,} indices, each once, in three orders; {lost:,} rows left over", lost, limit)


def _crossing(source: Source) -> str:
    """How many items of a source with marked ends (`ends_N`, one mark per row) go on after one; empty when none does."""
    ends = getattr(source, "ends_N", None)
    if ends is None:
        return ""
    items = np.arange(min(source.num_items, WALK))
    first = source.locate(np.zeros(len(items), np.int64), items)
    until = np.concatenate(([0], np.cumsum(ends)))
    broken = int((until[first + max(source.spans.values()) - 1] > until[first]).sum())
    return f"{broken:,} of {len(items):,} windows go on after the end of a sequence" if broken else ""


def _parts_problem(subject: Subject) -> str:
    """What is wrong with the micro-batches of a step, in memory and through the memory map; empty when nothing is."""
    num = max(subject.config.accum, 3)
    for limit in (None, 0):
        feed = Feed(_Numbers(8 * num), batch=4 * num, parts=num, seed=1, device=torch.device("cpu"), limit_bytes=limit)
        with contextlib.closing(feed):
            feed.load(0)
            rows = torch.cat([feed.part(k)["row"] for k in range(num)])
            if len(rows.unique()) < len(rows) or len(rows) != 4 * num:
                return f"a step of {4 * num} items in {num} micro-batches holds {len(rows.unique())} different ones"
    return ""


class _Numbers(Source):
    """A source like the real one whose rows hold their own index."""

    def __init__(self, num_items: int) -> None:
        self.num_items, self.arrays, self.spans = num_items, {"row": np.arange(num_items)}, {"row": 0}


def _item_order(source: Source, seed: int, start: int, count: int) -> np.ndarray:
    """The item indices of `count` samples from `start` on, through the real feed."""
    size = min(count, 65_536)
    feed = Feed(_Numbers(source.num_items), batch=size, parts=1, seed=seed, device=torch.device("cpu"))
    parts = []
    for counter in range(start, start + count, size):
        feed.load(counter)
        parts.append(feed.part(0)["row"].numpy().copy())
    return np.concatenate(parts)[:count]


def _order_problem(source: Source, first: np.ndarray, second: np.ndarray, other: np.ndarray) -> str:
    for name, order in (("an epoch", first), ("the next epoch", second), ("an epoch of another seed", other)):
        distinct = len(np.unique(order))
        if distinct < len(order):
            return f"{name} of {source.num_items:,} items draws only {distinct:,} different ones in {len(order):,} draws"
    if len(first) > 8 and np.array_equal(first, second):
        return "two epochs come in the same order"
    if len(first) > 8 and np.array_equal(first, other):
        return "two seeds give the same order"
    return ""


def _lost_rows(source: Source) -> int:
    """Rows before the first and after the last that any item of several epochs covers."""
    num_rows = min(len(a) for a in source.arrays.values())
    span = max(1, *source.spans.values())
    ends = np.array([0, source.num_items - 1])
    starts = [source.locate(np.full(2, e), ends) for e in range(2048)]
    everything = np.arange(min(source.num_items, WALK))
    for e in range(max(1, min(16, WALK // max(len(everything), 1)))):
        starts.append(source.locate(np.full(len(everything), e), everything))
    every = np.concatenate(starts)
    return int(every.min() + num_rows - (every.max() + span))


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _draw(subject: Subject, source: Source) -> Iterator[bytes]:
    """The bytes of up to DRAWS samples of one epoch as the model gets them; fewer where samples are large."""
    item = sum(a[:1].nbytes * max(1, source.spans[name]) for name, a in source.arrays.items())
    draws = max(FEW_DRAWS, min(DRAWS, DRAWN_BYTES // max(item, 1)))
    total = min(source.num_items or draws, draws)
    size = min(total, max(1, min(256, BATCH_BYTES // max(item, 1))))
    feed = subject.feed(source, size)
    for start in range(0, total - size + 1, size):
        feed.load(start)
        batch = {k: v.contiguous().numpy() for k, v in feed.part(0).items() if k != "index"}
        for row in range(size):
            yield b"".join(value[row].tobytes() for value in batch.values())


def _expected_distinct(draws: int, source: Source) -> float:
    """The expected share of distinct samples among windows drawn with replacement, since text repeats itself."""
    if not source.arrays:
        return GENERATED
    spans = {name: max(1, source.spans[name]) for name in source.arrays}
    places = min(len(a) - spans[name] + 1 for name, a in source.arrays.items())
    if places <= 1:
        return 1.0
    starts = np.random.default_rng(0).integers(0, places, draws)
    windows = (b"".join(np.asarray(a[at : at + spans[name]]).tobytes() for name, a in source.arrays.items()) for at in starts)
    return len({_hash(window) for window in windows}) / draws


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=12).digest()


def _equal(a: Batch, b: Batch) -> bool:
    """Bitwise equality, so that NaN equals NaN; the global counter may differ."""
    keys = (set(a) | set(b)) - {"index"}
    return all(
        a[k].shape == b[k].shape and a[k].contiguous().numpy().tobytes() == b[k].contiguous().numpy().tobytes() for k in keys
    )
