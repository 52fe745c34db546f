"""Configs: frozen dataclasses, dotted key=value overrides, ranges, hash, diff and JSON. Knows nothing of torch."""

import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from seedbed.errors import UserError


def number(default: Any, low: float = -math.inf, high: float = math.inf) -> Any:
    """A numeric field with its legal range, checked whenever a config is made."""
    return field(default=default, metadata={"low": low, "high": high})


def seconds(default: float | None) -> Any:
    """A length of time; on the command line also `90s`, `5m` or `2h`."""
    return field(default=default, metadata={"duration": True, "low": 0.001, "high": math.inf})


@dataclass(frozen=True)
class Optim:
    """AdamW for everything, or Muon for hidden matrices with AdamW for the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = number(1e-3, low=0.0, high=10.0)
    muon_lr: float = number(1e-3, low=0.0, high=10.0)
    beta1: float = number(0.9, low=0.0, high=0.9999)
    beta2: float = number(0.95, low=0.0, high=0.99999)
    eps: float = number(1e-8, low=0.0, high=1.0)
    weight_decay: float = number(0.1, low=0.0, high=100.0)
    muon_weight_decay: float = number(0.1, low=0.0, high=100.0)
    momentum: float = number(0.95, low=0.0, high=0.9999)
    clip: float = number(1.0, low=0.0)


@dataclass(frozen=True)
class Schedule:
    """The learning rate's multiplier over the run, evaluated at every step."""

    kind: Literal["constant", "gpt3", "one_cycle", "wsd", "linear"] = "gpt3"
    warmup: float = number(0.02, low=0.0, high=1.0)
    decay: float = number(0.5, low=0.0, high=1.0)
    floor: float = number(0.1, low=0.0, high=1.0)


@dataclass(frozen=True)
class Every:
    """How often each instrument acts, in steps; 0 means only at the end."""

    log: int = number(10, low=1)
    eval: int = number(250, low=0)
    sample: int = number(0, low=0)
    save: int = number(250, low=0)


@dataclass(frozen=True)
class Guard:
    """What happens when a step is not finite or the loss spikes."""

    policy: Literal["rollback", "skip", "stop"] = "rollback"
    max_skips: int = number(3, low=0)
    max_rollbacks: int = number(3, low=0)
    window: int = number(128, low=8)
    sigmas: float = number(6.0, low=1.0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on. A recipe supplies its own dataclasses for `model` and `data`."""

    model: Any
    data: Any
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    every: Every = Every()
    guard: Guard = Guard()
    steps: int = number(1000, low=1)
    budget: float | None = seconds(None)
    batch: int = number(32, low=1)
    accum: int = number(1, low=1)
    seed: int = number(1, low=0, high=2**31)
    ema: float = number(0.0, low=0.0, high=0.99999)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    compile: Literal["off", "blocks", "whole"] = "off"
    capture: Literal["auto", "off"] = "auto"
    keep: int = number(3, low=1)

    def __post_init__(self) -> None:
        validate(self)
        if self.batch % self.accum:
            raise UserError(f"batch={self.batch} does not divide into accum={self.accum} equal parts; choose a multiple")


def validate(config: Any) -> None:
    """Check the declared range of every numeric field; a recipe's dataclass may add `check()` of its own."""
    for key, value, info in _leaves(config):
        if "low" not in info.metadata or value is None:
            continue
        low, high = info.metadata["low"], info.metadata["high"]
        if isinstance(value, bool) or not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise UserError(f"{key}={value} is out of range: it must be {limits}")
    for part in (getattr(config, "model", None), getattr(config, "data", None)):
        if hasattr(part, "check"):
            part.check()


def override(config: Any, assignments: typing.Sequence[str]) -> Any:
    """A new config with each `key=value` applied; keys are dotted, values take the type of the field they name."""
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"`{text}` is not key=value; for example: steps=500")
        config = _replace(config, key.split("."), value, key)
    return config


def flatten(config: Any) -> dict[str, Any]:
    """Dotted key to value, in the order of the fields."""
    return {key: value for key, value, _ in _leaves(config)}


def diff(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ between two flattened configs; a missing key reads as None."""
    return {k: (old.get(k), new.get(k)) for k in {**old, **new} if old.get(k) != new.get(k)}


def digest(config: Any) -> str:
    """A content hash of every value: equal configs, equal hash, on any machine."""
    text = json.dumps(_plain(flatten(config)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_json(config: Any) -> dict[str, Any]:
    """Nested plain values, ready for `json.dumps`."""
    return {f.name: to_json(v) if dataclasses.is_dataclass(v) else _plain(v) for f, v in _items(config)}


def from_json(like: Any, values: dict[str, Any]) -> Any:
    """The config that `to_json` wrote, typed like `like`; a key that no longer exists is an error."""
    known = {f.name for f in dataclasses.fields(like)}
    for name in values:
        if name not in known:
            raise UserError(f"the saved config has `{name}`, which this version does not know; it was written by another version")
    changes = {}
    for info, current in _items(like):
        if info.name not in values:
            continue
        value = values[info.name]
        if dataclasses.is_dataclass(current):
            changes[info.name] = from_json(current, value)
        else:
            changes[info.name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(like, **changes)


def _items(config: Any) -> list[tuple[dataclasses.Field, Any]]:
    return [(f, getattr(config, f.name)) for f in dataclasses.fields(config)]


def _leaves(config: Any, prefix: str = "") -> typing.Iterator[tuple[str, Any, dataclasses.Field]]:
    for info, value in _items(config):
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{info.name}.")
        else:
            yield prefix + info.name, value, info


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _replace(config: Any, path: list[str], value: str, key: str) -> Any:
    hints = {f.name: f for f in dataclasses.fields(config)}
    name, rest = path[0], path[1:]
    if name not in hints or (rest and not dataclasses.is_dataclass(getattr(config, name))):
        raise UserError(_unknown(config, key, path))
    current = getattr(config, name)
    if rest:
        return dataclasses.replace(config, **{name: _replace(current, rest, value, key)})
    if dataclasses.is_dataclass(current):
        options = ", ".join(f"{key}.{f.name}" for f in dataclasses.fields(current))
        raise UserError(f"`{key}` is a group; set one of: {options}")
    kind = typing.get_type_hints(type(config))[name]
    return dataclasses.replace(config, **{name: parse(kind, value, key, bool(hints[name].metadata.get("duration")))})


def _unknown(config: Any, key: str, path: list[str]) -> str:
    prefix = key[: len(key) - len(".".join(path))]
    names = [prefix + k for k in flatten(config)]
    tails = {n.rpartition(".")[2]: n for n in reversed(names)}
    near = difflib.get_close_matches(key, names, 3, 0.5)
    near += [tails[t] for t in difflib.get_close_matches(path[-1], tails, 3, 0.6)]
    near += [n for n in names if path[-1] in re.split(r"[._]", n) or n.rpartition(".")[2] in path[-1].split("_")]
    shown = list(dict.fromkeys(near))[:3] or names[:6]
    return f"unknown key `{key}`; nearest: {', '.join(shown)}"


def parse(kind: Any, text: str, key: str, duration: bool = False) -> Any:
    """Read `text` as a value of type `kind`, or say what was expected."""
    if get_origin(kind) in (types.UnionType, typing.Union):
        if text.lower() in ("none", "null", "") and type(None) in get_args(kind):
            return None
        kind = next(k for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is Literal:
        options = [str(o) for o in get_args(kind)]
        if text in options:
            return get_args(kind)[options.index(text)]
        near = difflib.get_close_matches(text, options, 1)
        raise UserError(f"{key}={text} is not one of {', '.join(options)}" + (f"; did you mean {near[0]}?" if near else ""))
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return tuple(parse(inner, part, key) for part in text.split(",") if part)
    if kind is str:
        return text
    return _parse_scalar(kind, text, key, duration)


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _parse_scalar(kind: Any, text: str, key: str, duration: bool) -> Any:
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
        if text.lower() in words:
            return words[text.lower()]
        raise UserError(f"{key}={text} is not true or false")
    wanted = "a length of time such as 90s, 5m or 2h" if duration else {int: "a whole number", float: "a number"}[kind]
    scale = 1.0
    if duration and text and text[-1] in _UNITS:
        text, scale = text[:-1], _UNITS[text[-1]]
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        raise UserError(f"{key}={text} is not {wanted}") from None
    if not math.isfinite(value) or (kind is int and value != int(value)):
        raise UserError(f"{key}={text} is not {wanted}")
    return int(value) if kind is int else value * scale
