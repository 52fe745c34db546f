"""The last steps of a run in plain numbers, kept at no cost and written when something happens: what `replay` compares with.

A step's data follows from its sample counter and its dice from (seed, step), so a few numbers say all of a step.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from seedbed.track import files, lines

NUM_STEPS = 16


class Ring:
    """Entries of [step, counter, items before it, variant, measurements]; the oldest makes room for the newest."""

    def __init__(self, size: int = NUM_STEPS) -> None:
        self.entries: deque[list[Any]] = deque(maxlen=size)

    def take(self, step: int, counter: int, items: int, variant: Hashable) -> None:
        """A step is about to be taken."""
        self.entries.append([step, counter, items, variant, None])

    def measure(self, step: int, values: Sequence[float]) -> None:
        """The measurements of a step have arrived, one step late."""
        for entry in reversed(self.entries):
            if entry[0] == step:
                entry[4] = values
                return

    def to_json(self, names: Sequence[str], **facts: Any) -> dict[str, Any]:
        """Plain values; numbers that are not finite are spelled out."""
        return {**facts, "steps": [_entry(entry, names) for entry in self.entries]}

    def write(self, path: Path, names: Sequence[str], **facts: Any) -> None:
        files.write_atomic(path, lines.pretty(self.to_json(names, **facts)))


def _entry(entry: list[Any], names: Sequence[str]) -> dict[str, Any]:
    step, counter, items, variant, values = entry
    shown = {"step": step, "counter": counter, "items": items, "variant": None if variant is None else repr(variant)}
    return shown | {name: spelled(value) for name, value in zip(names, values or (), strict=False)}


def spelled(value: float) -> float | str:
    """A number as JSON can hold it: nan and inf as words, all others exactly."""
    return value if math.isfinite(value) else str(value)
