"""The kinds of events in events.jsonl, from events.toml: severity, meaning and how each is shown.

Report, journal, pages, plots, console and mirrors read this table. A recipe, or a user's file, adds kinds by `register`.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Severity = Literal["info", "notice", "warning", "error"]
LEVELS: tuple[Severity, ...] = get_args(Severity)


class Kind(NamedTuple):
    """What a kind means; `section`: it has its own section on the run page; `colour`: of its line in plots."""

    severity: Severity
    about: str
    section: bool = False
    colour: str = ""


KINDS = {kind: Kind(**about) for kind, about in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()}


def register(severity: Severity, **about: str) -> None:
    """Add kinds: `register("warning", drift="frames lose sharpness")`. Events carry the severity: readers need no recipe."""
    KINDS.update({kind: Kind(severity, sentence) for kind, sentence in about.items()})


def severity_of(event: Mapping[str, Any]) -> Severity:
    """The event's own severity, else that of its kind; an unregistered kind with a `fix` counts as a warning."""
    if event.get("severity") in LEVELS:
        return event["severity"]
    known = KINDS.get(str(event.get("kind")))
    return known.severity if known else "warning" if "fix" in event else "info"


def is_at_least(least: Severity, event: Mapping[str, Any]) -> bool:
    return LEVELS.index(severity_of(event)) >= LEVELS.index(least)


def has_section(event: Mapping[str, Any]) -> bool:
    """Whether the run page shows this event in a section of its own instead of the time line."""
    known = KINDS.get(str(event.get("kind")))
    return known is not None and known.section


def is_score(metric: str) -> bool:
    """Whether more of a metric of this name is better, whatever its recipe says."""
    return not {"accuracy", "psnr", "exact"}.isdisjoint(metric.split("_"))


def details(event: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of an event without the keys that every event has."""
    return {key: value for key, value in event.items() if key not in ("step", "kind", "severity", "time")}
