"""`seedbed explain`: a sentence on any name that is printed, from one registry of metrics, columns, events, checks and codes."""

import argparse
import difflib
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from seedbed.cli.keys import sentences
from seedbed.cli.parser import argument, verb
from seedbed.errors import UserError

# What a name is, to its sentence by name; a * in a name stands for a number.
Registry = dict[str, dict[str, str]]


@verb("explain", "NAME", "what a metric, column, event, check, exit code or verdict means")
@argument("name", metavar="NAME")
def _explain(given: argparse.Namespace) -> int:
    from seedbed.track import jsonl

    found = explained(given.name, registry()) or explained(given.name, late := checks_and_alarms())
    if not found:
        names = {name for known in (registry(), late) for about in known.values() for name in about}
        near = ", ".join(difflib.get_close_matches(given.name, sorted(names), 4, 0.5)) or "none"
        raise UserError(f"no {given.name} is known here; nearest: {near}. A name of your own recipe is explained in its file")
    if given.json:
        return jsonl.print_json([{"name": given.name, "what": what, "about": about} for what, about in found.items()])
    print("\n".join([given.name, *(f"  {what}: {about}" for what, about in found.items())]))
    return 0


def explained(name: str, known: Registry) -> dict[str, str]:
    """Every meaning of a name; an exact entry is preferred to one with a *."""
    found = {}
    for what, about in known.items():
        one = name if name in about else next((one for one in about if "*" in one and fnmatch(name, one)), None)
        if one is not None:
            found[what] = about[one]
    return found


def registry() -> Registry:
    """All names that need no torch."""
    from seedbed import recipes
    from seedbed.track.events import KINDS

    found: Registry = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
    for path in sorted(Path(recipes.__file__).parent.glob("*/metrics.toml")):
        found[f"metric of {path.parent.name}"] = tomllib.loads(path.read_text())
    found["event"] = {kind: f"{about.about} ({about.severity})" for kind, about in KINDS.items()}
    for group, keys in sentences().items():
        if group != "checks":
            found[f"config key of {group.rpartition('.')[2]}"] = keys
    return found


def checks_and_alarms() -> Registry:
    """Checks by id, and the events, with those of recipes."""
    from seedbed import recipes
    from seedbed.checks.registry import all_checks
    from seedbed.track.events import KINDS
    from seedbed.train.alarm_tables import read_alarms

    for path in Path(recipes.__file__).parent.glob("*/alarms.toml"):
        read_alarms(path)
    about = {check.id: f"{check.title}: {check.run.__doc__ or sentences()['checks'].get(check.id, '')}" for check in all_checks()}
    checks = {id: " ".join(text.split()) for id, text in about.items()}
    return {"check": checks, "event": {kind: f"{one.about} ({one.severity})" for kind, one in KINDS.items()}}
