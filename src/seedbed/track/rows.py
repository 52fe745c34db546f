"""Incremental readers of a run's files while they grow: a refresh reads only what was added; a partial line waits."""

import array
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from seedbed.track import files, jsonl

_CHUNK = 1 << 22
# Size of the chunks in which a thumbnail looks for whole lines; rows are a few hundred bytes.
_PIECE = 2048


class Tail:
    """The new whole lines of a growing file. A file that was replaced or truncated is read again from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._at = 0

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether everything read before is invalid, and the lines since then; none for a missing file."""
        try:
            with open(files.open_regular(self.path), "rb") as file:
                found = os.fstat(file.fileno())
                again = found.st_ino != self._inode or found.st_size < self._at
                self._inode, self._at = found.st_ino, 0 if again else self._at
                file.seek(self._at)
                out, piece = [], b""
                while chunk := file.read(_CHUNK):
                    *whole, piece = (piece + chunk).split(b"\n")
                    out += whole
                self._at = file.tell() - len(piece)
                return again, out
        except OSError:
            void, self._inode, self._at = self._at > 0, 0, 0
            return void, []


class Objects:
    """The JSON objects of a growing file of lines, such as events."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.found: list[dict[str, Any]] = []

    def refresh(self) -> list[dict[str, Any]]:
        again, new = self._tail.read()
        self.found = _decode(new) if again else [*self.found, *_decode(new)] if new else self.found
        return self.found


class Columns:
    """The numbers of a growing file of rows, one column of doubles per name; nested keys are dotted, missing values are NaN."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.num_rows = 0
        self._columns: dict[str, array.array] = {}

    def refresh(self) -> "Columns":
        again, new = self._tail.read()
        if again:
            self.num_rows, self._columns = 0, {}
        if new:
            found = _decode(new)
            columns = _columns(found)
            names = dict.fromkeys((*self._columns, *columns))
            # New arrays instead of extended ones: shallow copies that other threads read stay unchanged.
            self._columns = {n: self.column(n) + (columns.get(n) or _nothing(len(found))) for n in names}
            self.num_rows += len(found)
        return self

    def names(self) -> list[str]:
        return list(self._columns)

    def column(self, name: str) -> array.array:
        """One column, read-only; NaN where a row lacks it."""
        found = self._columns.get(name)
        return found if found is not None else _nothing(self.num_rows)

    @property
    def num_bytes(self) -> int:
        return 8 * self.num_rows * len(self._columns)


def _decode(found: list[bytes]) -> list[dict[str, Any]]:
    """Parse many lines as one JSON list, in half the time; falls back to single lines when one is broken."""
    whole = [line for line in found if line]
    # Otherwise two broken lines could combine into a valid one.
    if all(line[:1] == b"{" and line[-1:] == b"}" and not jsonl.may_be_deep(line) for line in whole):
        try:
            values = json.loads(b"[" + b",".join(whole) + b"]")
            if len(values) == len(whole):
                return values
        except (ValueError, RecursionError):
            pass
    return jsonl.decode(found)


def _nothing(num: int) -> array.array:
    return array.array("d", [math.nan]) * num


def _columns(found: list[dict[str, Any]], prefix: str = "") -> dict[str, array.array]:
    """Transpose rows to columns, with a fast path for keys that hold a number in every row."""
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


def thumbnail(path: Path, key: str, num: int) -> list[float]:
    """About `num` values of one key, evenly spaced over a file of rows, without reading all of it."""
    try:
        with open(files.open_regular(path), "rb") as file:
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
    """The first whole line of a chunk of the file."""
    parts = os.pread(fd, _PIECE, int(share * (size - _PIECE))).split(b"\n")
    return parts[1] if len(parts) > 2 else b""


# A row up to a number directly after its step.
_BEGINNING = rb'\{"step":\s*\d+,\s*"%b":\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)[,}]'


def _value(line: bytes, key: str) -> float:
    # The loss is at the beginning of a row: the rest need not be parsed.
    if found := re.match(_BEGINNING % re.escape(key).encode(), line):
        return float(found[1])
    try:
        return _number(json.loads(line.decode()).get(key))
    except (ValueError, AttributeError, RecursionError):
        return math.nan


def tail_lines(path: Path, num_bytes: int = 1 << 15) -> list[bytes]:
    """The whole lines among the last `num_bytes` of a file; none when it cannot be read."""
    try:
        with open(files.open_regular(path), "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            lines = file.read(num_bytes).split(b"\n")
    except OSError:
        return []
    # The first part may lack its beginning, the last one is empty or still being written.
    return lines[1 if start else 0 : -1]
