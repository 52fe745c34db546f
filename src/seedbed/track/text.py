"""Formatting of numbers, durations and tables as plain text that is safe to print on a terminal."""

import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

# What a terminal could take for a command, newline and tab apart: controls, bidirectional overrides, halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def safe(text: str) -> str:
    """The text without control characters, which a model or an untrusted file may contain."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    return " ".join(safe(text).split())


def clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def number(value: Any, digits: int = 4) -> str:
    """A number with about four decimals, or in scientific notation."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-" if value is None else one_line(str(value))
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{max(digits - 2, 0)}e}"
    return f"{value:.{digits}f}"


def scaled(value: float) -> str:
    """About three digits and k, M, G or T."""
    if not math.isfinite(value):
        return str(value)
    for suffix in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{suffix}" if abs(value) < 99.95 else f"{value:.0f}{suffix}"
        value /= 1000
    return f"{value:.3g}T"


def size(num_bytes: float) -> str:
    """Bytes as kB, MB, GB or TB."""
    for unit, scale, digits in (("kB", 1e3, 0), ("MB", 1e6, 0), ("GB", 1e9, 1)):
        if num_bytes < 999.5 * scale:
            return f"{num_bytes / scale:.{digits}f} {unit}"
    return f"{num_bytes / 1e12:.1f} TB"


def duration(seconds: float) -> str:
    """0:07, 12:34, 1:02:03, 3d 04h."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def width() -> int:
    """Width of the terminal; 120 where there is none or it is unknown."""
    try:
        return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(sys.stdout.fileno()).columns or 120
    except (ValueError, OSError):
        return 120


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    max_width: int | None = None,
    paint: dict[int, Callable[[str], str]] | None = None,
) -> str:
    """Aligned columns; those numbered in `right` are right-aligned, and the last one is clipped to the width.

    `paint` colours columns by their number, after everything has found its place: colours have no width.
    """
    paint = paint or {}
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    out = []
    for row in (header, *rows):
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        line = clip("  ".join(cells).rstrip(), max_width or width())
        for column in sorted(paint, reverse=True) if row is not header else ():
            start = sum(widths[:column]) + 2 * column
            end = start + widths[column]
            line = line[:start] + paint[column](line[start:end]) + line[end:]
        out.append(line)
    return "\n".join(out)


def wrapped(words: Sequence[str], max_width: int, gap: str = "  ") -> list[str]:
    """Words joined to lines of at most this width; no word is split."""
    out: list[str] = []
    for word in map(one_line, words):
        if out and len(out[-1]) + len(gap) + len(word) <= max_width:
            out[-1] += gap + word
        else:
            out.append(word)
    return out


def format_value(value: Any) -> str:
    """A config value as it is written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return " ".join(f"{key}={format_value(one)}" for key, one in value.items())
    return ",".join(map(format_value, value)) if isinstance(value, list | tuple) else str(value)
