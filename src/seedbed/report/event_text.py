"""Facts of an event as people read them, for every page and listing: durations, sizes, old -> new."""

from collections.abc import Mapping
from typing import Any

from seedbed.config import flat
from seedbed.report.facts import is_number
from seedbed.track import clocks
from seedbed.track.events import details
from seedbed.track.text import clip, duration, format_value, number, one_line, size


def event_text(event: Mapping[str, Any]) -> str:
    known = flat({key: value for key, value in details(event).items() if key not in ("layers", "data", "wall")})
    words = [_fact(key.removeprefix("changed.").removeprefix("code."), value) for key, value in known.items()]
    wall = clocks.split_in_words(event)
    return clip(one_line(", ".join([*filter(None, words), *([f"wall time {wall}"] if wall else [])])), 400)


def _fact(key: str, value: Any) -> str:
    if value in (None, "", []):
        return ""
    is_change = isinstance(value, list) and len(value) == 2
    text = " -> ".join(_value(key, one) for one in value) if is_change else _value(key, value)
    return text if key in ("status", "outcome", "what") else f"{key.replace('_', ' ')} {text}"


def _value(key: str, value: Any) -> str:
    if is_number(value):
        if "seconds" in key:
            return duration(value) if value >= 60 else f"{value:.3g} s"
        return size(value) if key.endswith(("bytes", "memory")) else number(value)
    return {"true": "yes", "false": "no"}.get(text := format_value(value), text)
