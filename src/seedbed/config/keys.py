"""Single keys of a config: the type of one, the value that a text would give it, and keys that name functions."""

from dataclasses import field
from typing import Any

from seedbed.config import leaves, parsed, type_of


def kind_of(config: Any, key: str) -> Any:
    """The type of the field that a dotted key names."""
    kinds = {name: type_of(info, kind) for name, _, info, kind in leaves(config)}
    if key not in kinds:
        parsed(config, key, "")  # says what is wrong with the key
    return kinds[key]


def function_keys(config: Any) -> list[str]:
    """The dotted keys of fields that name functions."""
    return [key for key, _, info, _ in leaves(config) if info.metadata.get("code")]


def function_name(default: str = "") -> Any:
    """A field that names a function as `package.module:name`; only functions that the user names here are called."""
    return field(default=default, metadata={"code": True})
