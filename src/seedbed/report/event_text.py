"""Facts of an event as people read them, for every page and listing: durations, sizes, old -> new."""

import math
from collections.abc import Mapping
from typing import Any

from seedbed.config import flat
from seedbed.report.facts import is_number
from seedbed.track import clocks
from seedbed.track.events import details
from seedbed.track.text import clip, duration, format_value, number, one_line, size


def event_text(event: Mapping[str, Any]) -> str:
    known = flat({key: value for key, value in details(event).items() if key not in ("layers", "data", "wall")})
    words = [_fact(key, value) for key, value in known.items() if value not in (None, "", [])]
    wall = event["wall"] if isinstance(event.get("wall"), dict) else {}
    split = {clocks.PARTS.get(key, key): value for key, value in wall.items() if is_number(value)}
    total, parts = math.fsum(split.values()), sorted(split, key=lambda key: -split[key])
    spent = ", ".join(f"{key} {_value('seconds', split[key])}" for key in parts if split[key] >= 0.01 * total)
    words += [f"wall time {_value('seconds', total)} ({spent})"] if split else []
    return clip(one_line(", ".join(words)), 400)


def _fact(key: str, value: Any) -> str:
    group, _, name = key.partition(".")
    if group in ("changed", "code") and isinstance(value, list):
        return f"{name} {' -> '.join(map(format_value, value))}"
    text = ", ".join(_value(key, one) for one in (value if isinstance(value, list) else [value]))
    return text if key in ("status", "outcome", "what") else f"{key.replace('_', ' ')} {text}"


def _value(key: str, value: Any) -> str:
    if is_number(value):
        if "seconds" in key:
            return duration(value) if value >= 60 else f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
        return size(value) if key.endswith(("bytes", "memory")) else number(value)
    return {"true": "yes", "false": "no"}.get(text := format_value(value), text)
