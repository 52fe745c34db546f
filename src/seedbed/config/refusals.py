"""Errors for keys that a config does not have and values that do not fit, with the nearest ones."""

import dataclasses
import difflib
import re
import types
import typing
from typing import Any, Literal, get_args, get_origin

from seedbed.config import flatten, saved
from seedbed.errors import UserError


def unknown_key(config: Any, key: str) -> UserError:
    """The error for a key that the config does not have, with its new name or the nearest ones, or that names a group."""
    if saved.current_key(key) != key:
        return UserError(f"`{key}` is now called `{saved.current_key(key)}`")
    prefix, last = "", key.rpartition(".")[2]
    for name in key.split("."):
        if not dataclasses.is_dataclass(getattr(config, name, None)):
            break
        config, prefix = getattr(config, name), f"{prefix}{name}."
    if prefix == f"{key}.":
        options = ", ".join(prefix + field.name for field in dataclasses.fields(config))
        return UserError(f"`{key}` is a group; set one of: {options}")
    names = [prefix + k for k in flatten(config)]
    tails = {n.rpartition(".")[2]: n for n in reversed(names)}
    near = difflib.get_close_matches(key, names, 3, 0.5)
    near += [tails[t] for t in difflib.get_close_matches(last, tails, 3, 0.6)]
    near += [n for n in names if last in re.split(r"[._]", n) or n.rpartition(".")[2] in last.split("_")]
    shown = list(dict.fromkeys(near))[:3] or names[:6]
    return UserError(f"unknown key `{key}`; nearest: {', '.join(shown)}")


def not_valid(kind: Any, text: str, key: str) -> UserError:
    """The error for a text that is no value of a type: what was expected, and the nearest choice."""
    if text in saved.RENAMED_VALUES.get(key, {}):
        return UserError(f"{key}={text} is now called {key}={saved.RENAMED_VALUES[key][text]}")
    near = difflib.get_close_matches(text, map(str, get_args(kind)), 1) if get_origin(kind) is Literal else []
    return UserError(f"{key}={text} is not {described(kind)}" + (f"; did you mean {near[0]}?" if near else ""))


def described(kind: Any) -> str:
    """Describes the values of a type, for error messages."""
    if kind == "duration":
        return "a duration such as 90s, 5m or 2h"
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(described(k) for k in inner)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        return (
            f"values separated by commas, each {described(inner[0])}"
            if Ellipsis in inner
            else f"{len(inner)} values separated by commas"
        )
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "none"}
    return words.get(kind, str(kind))
