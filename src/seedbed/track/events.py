"""The kinds of events in events.jsonl: severity, meaning and how each is shown.

Report, journal, pages, plots, console and mirrors read this table. A recipe, or a user's file, adds kinds by `register`.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

Severity = Literal["info", "notice", "warning", "error"]
LEVELS: tuple[Severity, ...] = get_args(Severity)


class Kind(NamedTuple):
    """What a kind means; `section`: it has its own section on the run page; `colour`: of its line in plots."""

    severity: Severity
    about: str
    section: bool = False
    colour: str = ""


KINDS: dict[str, Kind] = {
    "start": Kind("info", "the first step follows, on this device and this data", section=True),
    "model": Kind("info", "table of the model's modules", section=True),
    "preflight": Kind("info", "outcome of the checks before the first step"),
    "compile": Kind("info", "what compile=auto decided"),
    "budget": Kind("info", "number of steps that the time budget allows"),
    "pack": Kind("info", "the run trains as one trial of a packed sweep"),
    "eval": Kind("info", "numbers on held-out data; the first one decides `best`", section=True),
    "test": Kind("info", "numbers on the test split, once, at the end", section=True),
    "sample": Kind("info", "what the model generated", section=True),
    "checkpoint": Kind("info", "a checkpoint was written", section=True),
    "end": Kind("info", "how the run ended, and its wall time"),
    "early_stop": Kind("notice", "evaluations have stopped improving"),
    "spike": Kind("warning", "the loss left its band", colour="tab:red"),
    "rollback": Kind("warning", "the best checkpoint was restored", colour="tab:purple"),
    "nonfinite": Kind("error", "loss or gradient is not finite", colour="black"),
    "save_failed": Kind("error", "a checkpoint could not be written"),
    "spoiled": Kind("error", "the state is not finite, so it was not saved"),
    "stall": Kind("error", "a step did not end in time"),
    "out_of_memory": Kind("error", "the device's memory did not suffice"),
    "resume": Kind("notice", "the run was continued from a checkpoint", colour="tab:green"),
    "edited": Kind("warning", "an edited config or checkpoint was accepted"),
    "moved": Kind("warning", "the run's folder was renamed or removed while it trained"),
    "data_wait": Kind("warning", "steps wait for data"),
    "host_leak": Kind("warning", "the process's memory grows"),
    "device_leak": Kind("warning", "the device's memory grows"),
    "unused": Kind("warning", "parameters get no gradient"),
    "dead": Kind("warning", "a layer's output is constant"),
    "exploding": Kind("warning", "a layer's output grows fast"),
    "schedule": Kind("warning", "the learning rate used differs from the schedule's"),
    "stuck_eval": Kind("warning", "evaluations are equal to the last bit"),
    "floor": Kind("warning", "the loss is above that of a trivial predictor"),
    "anomaly": Kind("warning", "a backward pass produced NaN"),
}


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


def details(event: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of an event without the keys that every event has."""
    return {key: value for key, value in event.items() if key not in ("step", "kind", "severity", "time")}
