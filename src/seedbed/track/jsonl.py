"""Strict JSON Lines: one object per line, no NaN; a half-written last line is skipped."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files

# Our files are nested a few levels deep; functions over values may recurse.
MAX_DEPTH = 64


def _plain(value: Any) -> Any:
    """Values that JSON lacks: 0-d arrays and tensors become numbers, paths and others become text."""
    return value.item() if hasattr(value, "item") else str(value)


# Made once: json.dumps with options builds an encoder per call, which is most of the cost of a row.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain)


def finite(value: Any) -> Any:
    """The same values, with null for NaN and infinities."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if not isinstance(value, str | int | float | None):
        value = _plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encode(values: dict[str, Any]) -> bytes:
    """One line of JSON; NaN and infinity become null."""
    try:
        text = _ENCODER.encode(values)
    except ValueError:
        text = _ENCODER.encode(finite(values))
    return text.encode() + b"\n"


def pretty(values: dict[str, Any]) -> bytes:
    """A whole file of indented JSON; lone surrogates, as in odd file names, are escaped."""
    text = json.dumps(finite(values), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace")


def decode(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The objects among these lines; truncated lines are skipped."""
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and not (may_be_deep(line) and is_deep(value)):
            found.append(value)
    return found


def may_be_deep(text: bytes) -> bool:
    """Whether JSON may be nested too deeply: a quick upper bound that also counts brackets inside strings."""
    return text.count(b"{") + text.count(b"[") > MAX_DEPTH


def is_deep(value: Any) -> bool:
    """Whether values are nested more deeply than anything we write."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner for one in level if isinstance(one, dict | list) for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


def read(path: Path) -> list[dict[str, Any]]:
    """All objects of a file of lines; none when there is no such file."""
    return decode(read_bytes(path).split(b"\n"))


def read_bytes(path: Path) -> bytes:
    """The content of a file; nothing when there is no such file."""
    try:
        with open(files.open_regular(path), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object, or a UserError that names it."""
    try:
        value = files.read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict) or is_deep(value):
        raise UserError(f"{path} is damaged: it holds no JSON object of ours")
    return value


def print_json(values: Any) -> int:
    print(json.dumps(finite(values), indent=1))
    return 0
