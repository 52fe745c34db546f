"""A config as text, with marks on what differs."""

from collections.abc import Container
from typing import Any

from seedbed.track.text import format_value, wrapped


def config_lines(config: dict[str, Any], marks: dict[str, Container[str]], max_width: int) -> list[str]:
    """A flat config as a compact table, one group per line; marks follow the keys they apply to."""
    groups: dict[str, list[str]] = {"run": []}
    for key, value in config.items():
        group, _, name = key.rpartition(".")
        own = "".join(mark for mark, keys in marks.items() if key in keys)
        groups.setdefault(group or "run", []).append(f"{name}={format_value(value)}{own}")
    indent = 2 + max(map(len, groups)) + 2
    out = []
    for group, words in groups.items():
        for index, text in enumerate(wrapped(words, max_width - indent)):
            out.append(("" if index else f"  {group}").ljust(indent) + text)
    return out
