"""Alarms that follow from a table: measurements outside their normal range, described in a recipe's alarms.toml."""

import math
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seedbed.track import events

if TYPE_CHECKING:
    from seedbed.train.watch import Alarm

Table = dict[str, dict[str, Any]]


def read_alarms(path: Path) -> Table:
    """The alarms of a table by kind, registered as events: a metric, its range from `low` to `high`, and the words."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    events.register("warning", **{kind: alarm["about"] for kind, alarm in table.items()})
    return table


def raised(table: Table, measured: dict[str, float], progress: float, **ranges: tuple[float, float]) -> "list[Alarm]":
    """The alarms of these measurements after this share of the run; `ranges` are those that a run decides, by kind."""
    from seedbed.train.watch import Alarm

    found = []
    for kind, alarm in table.items():
        value = measured.get(alarm["metric"], math.nan)
        low, high = ranges.get(kind, (alarm.get("low", -math.inf), alarm.get("high", math.inf)))
        if progress > alarm.get("after", 0.0) and (value < low or value > high):  # nan raises no alarm
            what = alarm["what"].format(**{**measured, "value": value, "limit": high if value > high else low})
            facts = {name: measured[name] for name in alarm.get("facts", [alarm["metric"]])}
            found.append(Alarm(kind, what, alarm["where"], alarm["why"], alarm["fix"], facts))
    return found
