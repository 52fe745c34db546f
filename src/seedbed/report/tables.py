"""The evaluations of a run as a table."""

from collections.abc import Sequence
from typing import Any

from seedbed.report import facts
from seedbed.track.text import number, table

_COMMON = ("step", "seconds", "best", "time")


def evaluation_table(events: Sequence[dict[str, Any]], columns: int) -> str:
    """The table; empty where nothing was evaluated."""
    found = [event for event in events if event.get("kind") == "eval"]
    if not found:
        return ""
    best = [event for event in found if event.get("best")][-1:]
    shown = {event["step"]: event for event in (found[0], *best, found[-1])}
    names = [name for name, value in found[-1].items() if facts.is_number(value) and name not in _COMMON]
    header = ["evaluation", *(f"step {step}" + (" (best)" if [event] == best else "") for step, event in shown.items())]
    rows = [[name, *(number(event.get(name)) for event in shown.values())] for name in names]
    return table(header, rows, range(1, len(header)), columns) + "\nseedbed explain NAME says what a name means"
