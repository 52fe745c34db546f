"""JSON that any reader accepts: one object per line, no NaN, and a half-written last line does no harm."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seedbed.errors import UserError

# The largest file that is read as one object: parsing takes many times its size in memory.
MAX_OBJECT = 64 << 20


def _plain(value: Any) -> Any:
    """What JSON has no word for: 0-d arrays and tensors become numbers, paths and the rest text."""
    return value.item() if hasattr(value, "item") else str(value)


# Made once: json.dumps with options builds an encoder per call, which is most of the cost of a row.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain)


def finite(value: Any) -> Any:
    """The same values with null for what JSON cannot say."""
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
    """A whole file of JSON, for a person's eyes too; half of a surrogate pair, as in odd file names, is escaped."""
    text = json.dumps(finite(values), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace")


def decode(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The objects among these lines; a line that a crash or a full disk cut short is passed over."""
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """All objects of a file of lines; none when there is no such file."""
    try:
        return decode(path.read_bytes().split(b"\n"))
    except FileNotFoundError:
        return []


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object, or a UserError that names it."""
    try:
        too_large = path.stat().st_size > MAX_OBJECT
        value = None if too_large else json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON") from None
    if too_large:
        raise UserError(f"{path} is larger than {MAX_OBJECT >> 20} MiB; it is none of ours")
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    return value
