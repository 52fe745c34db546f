"""Mutated inputs for parsers that a stranger can reach: every input follows from a seed and its number, so it can be had again.

`for case in cases(seeds, 10_000, seed=1)` gives numbered inputs; `mutate(seeds, seed=1, number=17)` gives number 17 alone.
"""

import contextlib
import json
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

# Bytes that mean something to JSON, to UTF-8, to numbers or to paths.
TOKENS = (
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u0000", b"\\ud800", b"null", b"true", b"NaN", b"Infinity", b"1e400"),
    *(b"-0", b"-1", b"0", b"1", b"9" * 25, b"9223372036854775808", b"1e308", b"0.1", b"\x00", b"\xff", b"\xc3", b"\xef\xbb\xbf"),
    *(b"\n", b"\r\n", b"\t", b"../", b"/", b".", b"[" * 2000, b'{"a":' * 2000, b"__proto__", b"step", b"x" * 300),
)
# Values that a field may hold in the hands of a stranger.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 2**31, 2**63, 2**64, 10**40, 1e308, float("nan"), float("inf"), -1e-320),
    *("", "a", "../x", "/etc/passwd", "\x00", "\ud800", "x" * 5000, "none", "step-000001", "__proto__", "1", "\x1b[31m"),
    *([], {}, [[]], [None], [1, 2, 3], {"a": 1}, {"__proto__": {}}, [0, 10**12], [-1, 1], [0.5, "a"], {"": {"": {"": []}}}),
)


class Case(NamedTuple):
    """One mutated input; `name` is what reproduces it."""

    name: str
    data: bytes


def cases(seeds: Sequence[bytes], num: int, *, seed: int, kept: Sequence[bytes] = ()) -> Iterator[Case]:
    """`kept` inputs, which broke something once, then `num` mutations of `seeds`."""
    yield from (Case(f"kept {k}", data) for k, data in enumerate(kept))
    yield from (Case(f"seed {seed} number {number}", mutate(seeds, seed=seed, number=number)) for number in range(num))


def mutate(seeds: Sequence[bytes], *, seed: int, number: int) -> bytes:
    """One of `seeds` with one to four changes, half of the time to its bytes and otherwise to its JSON values."""
    rng = random.Random(f"{seed}/{number}")
    data = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice((_flip_bit, _flip_bit, _change_bytes, _change_values, _change_values))(data, rng, seeds)
    return data


def _flip_bit(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    if not data:
        return b"\x01"
    place = rng.randrange(len(data) * 8)
    changed = bytearray(data)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def _change_bytes(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Remove, insert, repeat, zero or cut a range, or splice another seed in."""
    low, high = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    high = min(high, low + rng.choice((1, 4, 64, 1 << 30)))
    part, other = data[low:high], rng.choice(seeds)
    middle = rng.choice((b"", rng.choice(TOKENS), part + part, bytes(len(part)), rng.randbytes(len(part) % 65), other[low:high]))
    return data[:low] if rng.random() < 0.1 else data[:low] + middle + data[high:]


def _change_values(data: bytes, rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Change one value, key or place of a JSON document, or of one of its lines."""
    lines = data.split(b"\n") if data.count(b"\n{") else [data]
    where = rng.randrange(len(lines))
    try:
        value = json.loads(lines[where])
    except (ValueError, RecursionError):
        return _flip_bit(data, rng, seeds)
    lines[where] = json.dumps(_changed(value, rng), indent=rng.choice((None, 1)) if len(lines) == 1 else None).encode()
    return b"\n".join(lines)


def _changed(value: Any, rng: random.Random) -> Any:
    """The same document with one change somewhere inside."""
    if not value or not isinstance(value, dict | list) or rng.random() < 0.15:
        return _other(value, rng)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, act = rng.choice(keys), rng.random()
    items = dict(value) if isinstance(value, dict) else list(value)
    if act < 0.1:
        del items[key]  # type: ignore[arg-type]
    elif act < 0.2 and isinstance(items, dict):
        items[rng.choice(("", "a", "__proto__", f"{key}x", "\x00", rng.choice(keys)))] = items.pop(key)
    elif act < 0.25 and isinstance(items, list):
        items.insert(key, rng.choice(VALUES))
    else:
        items[key] = _changed(items[key], rng)  # type: ignore[index]
    return items


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or rng.random() < 0.4:
        return rng.choice(VALUES)
    return rng.choice((value + 1, value - 1, -value, value * 2, value * 10**9, float(value), str(value)))


class Hang(Exception):
    """An input that took too long."""


@contextlib.contextmanager
def time_limit(seconds: float, name: str) -> Iterator[None]:
    """Raise Hang when the block takes longer; in the main thread only."""

    def on_alarm(_number: int, _frame: Any) -> None:
        raise Hang(f"{name} took more than {seconds} s")

    earlier = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def try_all(found: Iterator[Case], parse: Callable[[bytes], Any], *, refused: tuple[type[Exception], ...], seconds: float) -> int:
    """Parse every case: it must be accepted or refused by one of these errors, in time. How many were accepted.

    What `parse` asserts about an accepted input counts too. The error names the case, so that it can be kept.
    """
    accepted = 0
    for case in found:
        try:
            with time_limit(seconds, case.name):
                parse(case.data)
            accepted += 1
        except refused:
            pass
        except Exception as error:
            raise AssertionError(f"{case.name}: {type(error).__name__}: {error}\n{case.data[:400]!r}") from error
    return accepted
