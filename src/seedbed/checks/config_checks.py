"""A: configuration and source: keys that exist, values that are read, mistakes that can be read off the code, sizes as meant."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from seedbed import config as configs
from seedbed.checks.case import CPU, Case, place, short
from seedbed.checks.lint import lint
from seedbed.checks.registry import Result, check, failed, passed, skipped
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.train.engine import Engine

# The real number of parameters against the one that the preset's docstring promises. Measured: at most 1.42.
SIZE = 3.0
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}


@check("A1", "keys", "err", humbatova=(2, 8), quick=True)
def keys(case: Case) -> Result:
    """Every preset of the recipe can be made, and the config survives being saved."""
    for name, make in case.recipe.presets.items():
        try:
            config = make()
        except (UserError, TypeError, AttributeError) as error:
            what = f"preset {name} cannot be made: {error}"
            why = "a key that does not exist would be ignored, or stop the run later"
            return failed(what, where=place(make), why=why, fix="correct the key or its value in the preset")
        if configs.digest(configs.from_json(config, configs.to_json(config))) != configs.digest(config):
            what = f"preset {name} is another one after it was saved and read"
            why = "a resumed run would be another run"
            return failed(what, where=place(make), why=why, fix="use numbers, texts, tuples, true or false, and none only")
    return passed(f"{len(case.recipe.presets)} presets, {len(configs.flatten(case.config))} keys")


@check("A2", "reads", "warn", humbatova=(2, 8), quick=True)
def reads(case: Case) -> Result:
    """Every model and data field that differs from its default is read by somebody."""
    seen: set[str] = set()
    config = _recorded(case.small, seen)
    data = case.recipe.open_data(config)
    engine = Engine(case.recipe.build(config, data), config, CPU)
    feed = case.feed(data.train, 8)
    for step in range(2):
        feed.load(8 * step)
        engine.begin(step, 0.5)
        engine.system.update(feed.part(0), engine)
    engine.system.describe()
    assert case.preset is not None
    asked = configs.diff(configs.flatten(case.recipe.preset(case.preset)), configs.flatten(case.config))
    unread = sorted((key for key in _set_fields(case.config) if key not in seen), key=lambda key: key not in asked)
    if unread:
        value = configs.flatten(case.config).get(unread[0], "...")  # a group has no value of its own
        # A field of the preset's may fall idle because another was changed on purpose: worth a note, not an alarm.
        severity = "note" if asked and unread[0] not in asked else "warn"
        return failed(
            f"{unread[0]}={value} is read by nothing",
            where=place(case.recipe.presets[case.preset]),
            why="you are not testing what you think: the run is the same without it",
            fix="wire it to the code that should obey it, or drop it",
            severity=severity,
        )
    return passed(f"{len(_set_fields(case.config))} fields are set, and all are read")


def _set_fields(config: Config) -> list[str]:
    """Keys of model and data that differ from their defaults; a field without a default counts as set."""
    found = []
    for group in ("model", "data"):
        part = getattr(config, group)
        for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            if getattr(part, field.name) != field.default:
                found.append(f"{group}.{field.name}")
    return found


def _recorded(config: Any, seen: set[str], prefix: str = "") -> Any:
    """A config of the same types that notes which of its fields are read."""
    names = {field.name for field in dataclasses.fields(config)}

    def read(self: Any, name: str) -> Any:
        if name in names:
            seen.add(prefix + name)
        return object.__getattribute__(self, name)

    kind = type(config)
    copy = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__}))
    for name in names:
        value = getattr(config, name)
        inner = dataclasses.is_dataclass(value) and not isinstance(value, type)
        object.__setattr__(copy, name, _recorded(value, seen, f"{prefix}{name}.") if inner else value)
    return copy


@check("A3", "lint", "err", humbatova=(8,), quick=True)
def source(case: Case) -> Result:
    """No known mistake can be read off the recipe's files."""
    hits = [hit for path in case.recipe.files() for hit in lint(path)]
    if hits:
        hit = min(hits, key=lambda h: h.severity)
        more = f" (and {len(hits) - 1} more)" if len(hits) > 1 else ""
        where = f"{short(hit.path)}:{hit.line}"
        fix = f"{hit.fix}; if it is meant, write `# check: allow` behind the line"
        return failed(f"{hit.what}{more}", where=where, why=hit.why, fix=fix, severity="err" if hit.severity == "err" else "warn")
    return passed(f"{len(case.recipe.files())} files read")


@check("A4", "echo", "warn", humbatova=(2,), quick=True)
def echo(case: Case) -> Result:
    """The model has the size that the preset's docstring promises."""
    assert case.preset is not None
    make = case.recipe.presets[case.preset]
    promised = re.search(r"([\d.]+) ?([kMGB]) (?:of )?param", make.__doc__ or "")
    items = case.config.steps * case.config.batch
    epochs = f"{items / case.real_data.train.num_items:.3g} epochs" if case.real_data.train.num_items else "no epochs"
    if not promised:
        return passed(f"{items:,} items, {epochs}; the preset promises no size")
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to load

    with FakeTensorMode():
        try:
            system = case.recipe.build(case.config, case.real_data)
        except Exception as error:  # anything that needs real numbers while it is built
            return skipped(f"the system cannot be built without memory: {type(error).__name__}")
    number = sum(p.numel() for p in system.parameters())
    wanted = float(promised[1]) * _UNITS[promised[2]]
    ratio = max(number / wanted, wanted / max(number, 1))
    if ratio > SIZE:
        what = f"{number / 1e6:.3g} M parameters, the preset promises {wanted / 1e6:.3g} M"
        why = "you are about to train another model than you think"
        fix = "undo the change of width or depth, or take the preset that fits"
        return failed(what, where=place(make), why=why, fix=fix, value=ratio, limit=SIZE)
    return passed(f"{number / 1e6:.3g} M parameters as promised, {items:,} items, {epochs}", ratio, SIZE)
