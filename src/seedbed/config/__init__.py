"""Configs: frozen dataclasses, dotted key=value overrides, ranges, hash, diff and JSON. Does not import torch."""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import math
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from seedbed.errors import UserError

# Items are counted in 64 bits.
MAX_ITEMS = 2**62


def number(default: Any, low: float = -math.inf, high: float = math.inf) -> Any:
    """A numeric field with its valid range, checked whenever a config is created."""
    return field(default=default, metadata={"low": low, "high": high})


def seconds(default: float | None) -> Any:
    """A duration; on the command line also `90s`, `5m` or `2h`."""
    return field(default=default, metadata={"duration": True, "low": 0.001, "high": math.inf})


def registered(default: str, registry: str) -> Any:
    """A field whose values are the keys of a registry, `package.module:NAME`: what is added there can be chosen at once."""
    return field(default=default, metadata={"registry": registry})


@dataclass(frozen=True)
class Optim:
    """AdamW for everything, or Muon for hidden matrices with AdamW for the rest."""

    kind: str = registered("adamw", "seedbed.train.optim:OPTIMIZERS")
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
    """The learning rate's multiplier over the run, evaluated at every step.

    `warmup` and `decay` are shares of the run, `floor` a share of the base learning rate. `one_cycle` starts at 1 / div and
    ends at 1 / (div x final_div) of it.
    """

    kind: str = registered("cosine", "seedbed.train.optim:SCHEDULES")
    warmup: float = number(0.02, low=0.0, high=1.0)
    decay: float = number(0.5, low=0.0, high=1.0)
    floor: float = number(0.1, low=0.0, high=1.0)
    div: float = number(25.0, low=1.0)
    final_div: float = number(1e4, low=1.0)


@dataclass(frozen=True)
class Every:
    """The interval of each action, in steps; 0 means only at the end."""

    log: int = number(10, low=1)
    eval: int = number(250, low=0)
    sample: int = number(0, low=0)
    save: int = number(250, low=0)


@dataclass(frozen=True)
class Guard:
    """What happens when a step is not finite or the loss spikes, and the seconds after which a stalled run is ended."""

    policy: Literal["rollback", "skip", "stop"] = "rollback"
    max_skips: int = number(3, low=0)
    max_rollbacks: int = number(3, low=0)
    window: int = number(128, low=8)
    sigmas: float = number(6.0, low=1.0)
    stall: float | None = seconds(600.0)


@dataclass(frozen=True)
class Limit:
    """Train or evaluate only on the first items of the data; 0 means all."""

    train: int = number(0, low=0)
    valid: int = number(0, low=0)
    test: int = number(0, low=0)


@dataclass(frozen=True)
class Dist:
    """Degrees of parallelism: the number of replicas, and the number of shards of each replica; and the dtype of averages."""

    replicate: int = number(1, low=1, high=65536)
    shard: int = number(1, low=1, high=65536)
    reduce: Literal["fp32", "bf16"] = "fp32"
    single: Literal["plain", "replicate", "shard"] = "plain"

    @property
    def world(self) -> int:
        return self.replicate * self.shard

    @property
    def is_distributed(self) -> bool:
        """Whether steps go through process groups: with several ranks, or with one where `single` asks for it."""
        return self.world > 1 or self.single != "plain"

    @property
    def is_sharded(self) -> bool:
        return self.shard > 1 or (self.world == 1 and self.single == "shard")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on. A recipe supplies its own dataclasses for `model` and `data`."""

    model: Any
    data: Any
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    every: Every = Every()
    guard: Guard = Guard()
    limit: Limit = Limit()
    dist: Dist = Dist()
    steps: int = number(1000, low=1)
    budget: float | None = seconds(None)
    batch: int = number(32, low=1)
    accum: int = number(1, low=1)
    seed: int = number(1, low=0, high=2**31)
    ema: float = number(0.0, low=0.0, high=0.99999)
    ema2: float = number(0.0, low=0.0, high=0.999999)
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    compile: Literal["auto", "off", "blocks", "whole"] = "off"
    compile_autograd: bool = False
    compile_optimizer: bool = False
    capture: Literal["auto", "off"] = "auto"
    remat: Literal["none", "selective", "full"] = "none"
    float8: bool = False
    attention: Literal["auto", "cudnn", "flash", "efficient", "math", "narrow"] = "auto"
    keep: int = number(3, low=1)

    def __post_init__(self) -> None:
        validate(self)
        if self.steps * self.batch > MAX_ITEMS:
            raise UserError(f"steps={self.steps} x batch={self.batch} is out of range: a run sees at most {MAX_ITEMS:.2g} items")
        if self.batch % self.accum:
            raise UserError(f"batch={self.batch} does not divide into accum={self.accum} equal parts; choose a multiple")
        if self.batch % (self.accum * self.dist.world):
            ranks = f"{self.dist.world} ranks" + (f" of accum={self.accum} parts each" if self.accum > 1 else "")
            raise UserError(f"batch={self.batch} is the total over all ranks and does not divide into {ranks}; choose a multiple")
        if self.float8 and self.precision != "bf16":
            raise UserError(f"float8=true needs precision=bf16, not precision={self.precision}")

    @property
    def micro_batch(self) -> int:
        """Items per device and micro-batch; `batch` is the total over all ranks and micro-batches."""
        return self.batch // (self.accum * self.dist.world)


class Units(typing.NamedTuple):
    """What people count and read in a recipe, from `units(config)` of its presets: an item of data is `per_item` of `items`.

    `loss` is the unit of the loss, `data` says in words what a run trains on, as a format of the facts of its data.
    """

    items: str = "items"
    per_item: float = 1.0
    loss: str = ""
    data: str = ""

    def describe(self, facts: dict[str, Any]) -> str:
        """The data in words; without any, its facts."""
        limits = [f"{part} {num:,}" for part, num in facts.get("limit", {}).items() if num]
        words = self.data.format(**facts) if self.data else ", ".join(f"{name} {value}" for name, value in facts.items())
        return words + (f", limited to {', '.join(limits)}" if limits else "")


# Settings for an eager step: nothing compiled or captured; then also no checkpointing, float8, forced kernel or sharding.
UNCOMPILED = ("compile=off", "compile_autograd=false", "compile_optimizer=false", "capture=off")
SINGLE_PROCESS = ("dist.replicate=1", "dist.shard=1", "dist.single=plain")
PLAIN = (*UNCOMPILED, "remat=none", "float8=false", "attention=auto", *SINGLE_PROCESS)


def validate(config: Any) -> None:
    """Check the type and the declared range of every field; a recipe's dataclass may add `check()` of its own.

    Registries that are not loaded yet are not: they need torch. Building a system validates again, and what a user types is
    looked up at once.
    """
    for key, value, info, kind in leaves(config):
        if info.metadata.get("registry", "").partition(":")[0] in sys.modules:
            kind = type_of(info, kind)
        if not _is_plain(value):
            raise UserError(f"{key}={value!r}: a config holds numbers, strings, true or false, none, and tuples of these")
        if not _fits(kind, value):
            raise _not_valid(kind, repr(value), key)
        if "low" not in info.metadata or value is None:
            continue
        low, high = info.metadata["low"], info.metadata["high"]
        if not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise UserError(f"{key}={value} is out of range: it must be {limits}")
    for part in (getattr(config, "model", None), getattr(config, "data", None)):
        check = getattr(part, "check", None)
        if check is not None:
            check()


def override(config: Any, assignments: typing.Sequence[str]) -> Any:
    """A new config with each `key=value` applied; keys are dotted, values take the type of the field they name."""
    changes: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"`{text}` is not key=value; for example: steps=500")
        changes[key] = parsed(config, key, value)
    return replaced(config, changes)


def require_distinct(assignments: typing.Sequence[str]) -> None:
    """Refuse assignments that contradict each other: a key given twice, or both steps and budget."""
    given: dict[str, str] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if equals and key in given:
            raise UserError(f"{key} is given twice, as {given[key]} and as {value}; give it once")
        given[key] = value
    if "steps" in given and given.get("budget", "none").lower() not in ("none", "null", ""):
        raise UserError(f"steps={given['steps']} and budget={given['budget']} both say how long to train; give one of them")


def require_one_length(config: Any, assignments: typing.Sequence[str]) -> None:
    """Refuse a number of steps where a budget of the preset or of the run would silently override it."""
    keys = {text.partition("=")[0] for text in assignments}
    if config.budget and "steps" in keys and "budget" not in keys:
        raise UserError(f"budget={config.budget:g}s says how long to train, not steps; to count steps add budget=none")


def flatten(config: Any) -> dict[str, Any]:
    """Dotted key to value, in the order of the fields."""
    return {key: value for key, value, *_ in leaves(config)}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key to value of nested plain values."""
    found = {}
    for key, value in values.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return found


def diff(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ between two flattened configs; a missing key reads as None, a list as a tuple."""
    # Another recipe's, or saved by another version.
    if old.keys() != new.keys() or old.get("schedule.kind") != new.get("schedule.kind"):
        from seedbed.config.saved import translated

        old, new = translated(old), translated(new)
    return {k: (old.get(k), new.get(k)) for k in {**old, **new} if _plain(old.get(k)) != _plain(new.get(k))}


def digest(config: Any) -> str:
    """A content hash of every value: equal configs, equal hash, on any machine."""
    return digest_values(flatten(config))


def digest_values(values: dict[str, Any]) -> str:
    """The hash of a flattened config, live or saved."""
    # 300 and 300.0 are equal, so their hashes must be.
    whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in values.items()}
    return hashlib.sha256(json.dumps(_plain(whole), sort_keys=True).encode()).hexdigest()[:16]


def to_json(config: Any) -> dict[str, Any]:
    """Nested plain values, ready for `json.dumps`."""
    return {f.name: to_json(v) if dataclasses.is_dataclass(v) else _plain(v) for f, v in _items(config)}


def replaced(config: Any, changes: dict[str, Any], prefix: str = "") -> Any:
    """A copy with other values by dotted key, every group built once: two changes may be valid together and not one by one."""
    new = {}
    for info, value in _items(config):
        key = prefix + info.name
        if dataclasses.is_dataclass(value) and any(changed.startswith(f"{key}.") for changed in changes):
            new[info.name] = replaced(value, changes, f"{key}.")
        elif key in changes:
            new[info.name] = changes[key]
    return dataclasses.replace(config, **new)


def _items(config: Any) -> list[tuple[dataclasses.Field, Any]]:
    return [(f, getattr(config, f.name)) for f in dataclasses.fields(config)]


def leaves(config: Any, prefix: str = "") -> typing.Iterator[tuple[str, Any, dataclasses.Field, Any]]:
    """Dotted key, value, field and type of every field that is not a group."""
    hints = typing.get_type_hints(type(config))
    for info, value in _items(config):
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{info.name}.")
        else:
            yield prefix + info.name, value, info, hints[info.name]


def type_of(info: dataclasses.Field, hint: Any) -> Any:
    """The type of a field: its hint, or the names in its registry, which is loaded for it."""
    if "registry" not in info.metadata:
        return hint
    module, _, name = info.metadata["registry"].partition(":")
    return Literal[tuple(getattr(importlib.import_module(module), name))]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, bool | int | float | str | None)


def parsed(config: Any, key: str, text: str) -> Any:
    """The value that `key=text` would set, not checked against ranges and other keys: those may change with it."""
    found = {name: (info, kind) for name, _, info, kind in leaves(config)}
    if key not in found:
        from seedbed.config.refusals import unknown_key

        raise unknown_key(config, key)
    info, kind = found[key]
    return parse(type_of(info, kind), text, key, bool(info.metadata.get("duration")))


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value fits the type of a field; unknown types always fit."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(k, value) for k in inner)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in inner)
    if origin is tuple:
        kinds = inner[:1] * len(value) if isinstance(value, tuple) and Ellipsis in inner else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, kinds, value))
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (bool, str, type(None)) else True


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TRUTH = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}


def parse(kind: Any, text: str, key: str, duration: bool = False) -> Any:
    """Read `text` as a value of type `kind`; the error says what was expected."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if text.lower() in ("none", "null", "") and type(None) in inner:
            return None
        return parse(next(k for k in inner if k is not type(None)), text, key, duration)
    if kind is str:
        return text
    if origin is tuple:
        parts = text.split(",") if text else []
        kinds = inner[:1] * len(parts) if Ellipsis in inner else inner
        if len(parts) == len(kinds):
            return tuple(parse(k, part, key) for k, part in zip(kinds, parts, strict=True))
    elif origin is Literal or kind in (bool, int, float):
        with contextlib.suppress(KeyError, ValueError):
            if origin is Literal:
                return {str(option): option for option in inner}[text]
            return _TRUTH[text.lower()] if kind is bool else _number(kind, text, duration)
    else:
        raise UserError(f"{key} cannot be set from the command line; change it in the preset")
    raise _not_valid("duration" if duration else kind, text, key)


def _number(kind: Any, text: str, duration: bool) -> int | float:
    """A finite number, with a unit of time where it is a duration; else a ValueError."""
    unit = _UNITS.get(text[-1:]) if duration else None
    digits = text[:-1] if unit else text
    if kind is int and re.fullmatch(r"[+-]?\d[\d_]*", digits):
        return int(digits)
    value = float(digits)
    if not math.isfinite(value) or (kind is int and value != int(value)):
        raise ValueError
    return int(value) if kind is int else value * (unit or 1.0)


def _not_valid(kind: Any, text: str, key: str) -> UserError:
    from seedbed.config.refusals import not_valid

    return not_valid(kind, text, key)
