"""Readers that follow a run while it is written: each look costs what was added since the last, and a half line waits."""

import array
import functools
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from seedbed.track import lines

_CHUNK = 1 << 22
# Whole lines read for a thumbnail come from pieces of this size; rows are a few hundred bytes.
_PIECE = 2048


class Tail:
    """The whole lines that a file gains. A file that was replaced or cut short is read from its start again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._at = 0

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether everything read before is void, and the lines since then; a file that is gone has none."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                again = found.st_ino != self._inode or found.st_size < self._at
                self._inode, self._at = found.st_ino, 0 if again else self._at
                return again, self._rest(file)
        except OSError:
            void, self._inode, self._at = self._at > 0, 0, 0
            return void, []

    def _rest(self, file: Any) -> list[bytes]:
        out: list[bytes] = []
        file.seek(self._at)
        piece = b""
        while chunk := file.read(_CHUNK):
            *whole, piece = (piece + chunk).split(b"\n")
            out += whole
        self._at = file.tell() - len(piece)
        return out


class Objects:
    """The JSON objects of a file of lines, kept and followed: events, mostly."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.found: list[dict[str, Any]] = []

    def refresh(self) -> list[dict[str, Any]]:
        again, new = self._tail.read()
        self.found = _decode(new) if again else [*self.found, *_decode(new)] if new else self.found
        return self.found


class Columns:
    """The numbers of a file of rows, a column of doubles per name; nested ones are dotted, and NaN means none."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.num_rows = 0
        self._columns: dict[str, array.array] = {}

    def refresh(self) -> "Columns":
        again, new = self._tail.read()
        if again:
            self.num_rows, self._columns = 0, {}
        if new:
            self._add(_decode(new))
        return self

    def names(self) -> list[str]:
        return list(self._columns)

    def column(self, name: str) -> array.array:
        """One column, to be left as it is; NaN where no row has it."""
        found = self._columns.get(name)
        return found if found is not None else _nothing(self.num_rows)

    @property
    def num_bytes(self) -> int:
        return 8 * self.num_rows * len(self._columns)

    def _add(self, found: list[dict[str, Any]]) -> None:
        new = _columns(found)
        names = dict.fromkeys((*self._columns, *new))
        # New arrays in place of longer ones: a shallow copy that somebody reads meanwhile stays as it was.
        self._columns = {n: self.column(n) + (new.get(n) or _nothing(len(found))) for n in names}
        self.num_rows += len(found)


def _decode(found: list[bytes]) -> list[dict[str, Any]]:
    """The objects of many lines, as one JSON list: half the time of one by one, which is left for broken lines."""
    try:
        return [value for value in json.loads(b"[" + b",".join(filter(None, found)) + b"]") if isinstance(value, dict)]
    except (ValueError, RecursionError):
        return lines.decode(found)


def _nothing(num: int) -> array.array:
    return array.array("d", [math.nan]) * num


def _columns(found: list[dict[str, Any]], prefix: str = "") -> dict[str, array.array]:
    """Rows turned into columns, a key at a time: most keys hold a number in every row, and that is the quick way."""
    out = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(found)):
        values = [row.get(key) for row in found]
        try:
            out[prefix + key] = array.array("d", values)  # type: ignore[arg-type]
            continue
        except (TypeError, OverflowError):
            numbers = [_number(value) for value in values]
        if any(not math.isnan(value) for value in numbers) or all(value is None for value in values):
            out[prefix + key] = array.array("d", numbers)
        if any(isinstance(value, dict) for value in values):
            out |= _columns([value if isinstance(value, dict) else {} for value in values], f"{prefix}{key}.")
    return out


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.inf


def glimpse(path: Path, key: str, num: int) -> list[float]:
    """About `num` values of one key, evenly spread over a file of rows, without reading the rest of it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= num * _PIECE:
                found = file.read().split(b"\n")[:-1]
                stride = max(1, -(-len(found) // num))
                picked = found[:-1:stride] + found[-1:]
            else:
                picked = [line for place in range(num) if (line := _line_at(file.fileno(), size, place / (num - 1)))]
    except OSError:
        return []
    values = (_value(line, key) for line in picked)
    return [value for value in values if math.isfinite(value)]


def _line_at(fd: int, size: int, share: float) -> bytes:
    """The first whole line of a piece of the file."""
    parts = os.pread(fd, _PIECE, int(share * (size - _PIECE))).split(b"\n")
    return parts[1] if len(parts) > 2 else b""


@functools.cache
def _beginning(key: str) -> re.Pattern[bytes]:
    """A row as the loop writes it, up to a number right behind its step."""
    return re.compile(rb'\{"step":\s*\d+,\s*"%b":\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)[,}]' % re.escape(key).encode())


def _value(line: bytes, key: str) -> float:
    # The loss stands at the beginning of a row: there is no need to read the rest of it.
    if found := _beginning(key).match(line):
        return float(found[1])
    try:
        return _number(json.loads(line.decode()).get(key))
    except (ValueError, AttributeError, RecursionError):
        return math.nan
