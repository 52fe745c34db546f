"""Configs as runs of this and of earlier versions have saved them."""

import tomllib
import typing
from pathlib import Path
from typing import Any

from seedbed.config import PLAIN, flat, flatten, replaced
from seedbed.errors import UserError

# Old keys, or groups of keys, with their new names; by new key, old values; and what runs did before a key existed.
RENAMED, RENAMED_VALUES, BEFORE = tomllib.loads(Path(__file__).with_name("renamed.toml").read_text()).values()

# Settings that may be changed when a run is resumed.
FREE_KEYS = {"batch", "accum", "device", "precision", "keep", "steps", "budget", *(word.partition("=")[0] for word in PLAIN)}
FREE_GROUPS = ("every.", "guard.", "dist.")


def is_free(key: str) -> bool:
    """Whether a run may be resumed with another value of this key."""
    return key in FREE_KEYS or key.startswith(FREE_GROUPS)


def translated(values: dict[str, Any], known: typing.Container[str] = ()) -> dict[str, Any]:
    """A flattened config of an earlier version with the present keys and values; keys in `known` are not translated."""
    if values.get("schedule.kind") == "one_cycle" and "schedule.floor" in values and "schedule.div" not in values:
        values = {**values, "schedule.kind": "cosine"}  # without `div` it was an alias of it
    found = {}
    for key, value in values.items():
        key = key if key in known else current_key(key)
        options = RENAMED_VALUES.get(key, {})
        found[key] = options.get(value, value) if options and isinstance(value, str) else value
    return found


def current_key(key: str) -> str:
    """The present name of a dotted key, which it or its group may have been renamed to."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def from_json(like: Any, values: dict[str, Any]) -> Any:
    """The config that `to_json` wrote, with the types of `like`; an unknown key is an error."""
    known = flatten(like)
    found = {key: value for key, value in BEFORE.items() if key in known} | translated(flat(values), known)
    for key in (key for key in found if key not in known):
        if any(name.startswith(f"{key}.") for name in known):
            raise UserError(f"the saved config is damaged: `{key}` should hold a group of values")
        raise UserError(f"the saved config has `{key}`, which this version does not know; another version wrote it")
    return replaced(like, {key: _tuples(value) for key, value in found.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
