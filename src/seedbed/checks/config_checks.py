"""Checks A: config keys, unused settings, mistakes visible in the source, and the size of the model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

from seedbed import config as configs
from seedbed.checks.lint import lint
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import small_source
from seedbed.checks.subject import CPU, Subject, short, source_line
from seedbed.config import Config
from seedbed.config.saved import from_json
from seedbed.errors import UserError
from seedbed.nn.shapes_only import shapes_only
from seedbed.report.findings import Finding
from seedbed.train.engine import Engine
from seedbed.train.system import Request, describe

# The real number of parameters against the one that the preset's docstring promises. Measured: at most 1.42.
SIZE = 3.0
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}


@check("A1", "config keys", "err", humbatova=(2, 8), quick=True)
def config_keys(subject: Subject) -> Finding:
    """Every preset can be built, and the config survives a round trip through JSON."""
    for name, make in subject.recipe.presets.items():
        try:
            config = make()
        except (UserError, TypeError, AttributeError) as error:
            return failed(f"preset {name} cannot be made: {error}", where=source_line(make), case="A1-made")
        if configs.digest(from_json(config, configs.to_json(config))) != configs.digest(config):
            what = f"preset {name} is another one after it was saved and read"
            return failed(what, where=source_line(make), case="A1-saved")
    return passed(f"{len(subject.recipe.presets)} presets, {len(configs.flatten(subject.config))} keys")


@check("A2", "unused settings", "warn", humbatova=(2, 8), quick=True)
def unused_settings(subject: Subject) -> Finding:
    """Every model and data field that differs from its default is read."""
    record = _Record()
    config = record.of(subject.small)
    engine = Engine(subject.recipe.build(config, subject.data), config, CPU)
    feed = subject.feed(subject.data.train, 8)
    for step in range(2):
        feed.load(8 * step)
        engine.begin(step, 0.5)
        engine.system.update(feed.part(0), engine)
    describe(engine.system)
    asked = _asked(subject)
    if unread := sorted(_still_unread(subject, record, engine), key=lambda key: key not in asked):
        value = configs.flatten(subject.config).get(unread[0], "...")  # a group has no value of its own
        # A field of the preset may become unused because another was changed on purpose: a note only.
        severity = "note" if asked and unread[0] not in asked else "warn"
        return failed(f"{unread[0]}={value} is read by nothing", where=subject.preset_line(), severity=severity)
    return passed(f"{len(_set_fields(subject.config))} fields are set, and all are read")


def _asked(subject: Subject) -> list[str]:
    """The keys that differ from those of the preset."""
    return list(configs.diff(configs.flatten(subject.recipe.preset(subject.preset)), configs.flatten(subject.config)))


def _set_fields(config: Config) -> list[str]:
    """Keys of model and data that differ from their defaults; a field without a default counts as set."""
    found = []
    for group in ("model", "data"):
        part = getattr(config, group)
        for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            if getattr(part, field.name) != field.default:
                found.append(f"{group}.{field.name}")
    return found


def _still_unread(subject: Subject, record: _Record, engine: Engine) -> list[str]:
    """Fields read neither by steps, nor while opening data, nor at the end of a run, tried in this order."""
    unread = _unread(subject, record)
    if subject.quick:
        # Data is open, and the end of a run is far: fields that the source names may be read there.
        source = "".join(path.read_text(encoding="utf-8") for path in subject.recipe.files())
        return [key for key in unread if key.startswith("model.") and not re.search(rf"\.{key[6:]}\b", source)]
    if any(key.startswith("data.") for key in unread):
        subject.recipe.open_data(record.of(subject.config))  # the run's own data, already prepared
        unread = _unread(subject, record)
    if unread:
        # What a run does at its end, since some fields matter only there. Errors are left to other checks.
        record.wanted = set(unread)
        with contextlib.suppress(_AllRead):
            engine.begin(2, 1.0)
            with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(Exception), engine.evaluating():
                engine.system.sample(Request(Path(scratch)), engine)
                engine.system.evaluate(small_source(subject.data.valid), engine)
    return _unread(subject, record)


def _unread(subject: Subject, record: _Record) -> list[str]:
    return sorted(key for key in _set_fields(subject.config) if key not in record.seen)


class _AllRead(BaseException):
    """Raised once every wanted field has been read; not an Exception, so that no recipe catches it."""


class _Record:
    """Records which fields of a config are read, and stops once all `wanted` ones are."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.wanted: set[str] = set()

    def note(self, key: str) -> None:
        self.seen.add(key)
        if key in self.wanted and self.wanted <= self.seen:
            raise _AllRead

    def of(self, config: Any, prefix: str = "") -> Any:
        """A config of the same types that records reads of its fields."""
        names, note = {field.name for field in dataclasses.fields(config)}, self.note

        def read(self: Any, name: str) -> Any:
            if name in names:
                note(prefix + name)
            return object.__getattribute__(self, name)

        kind = type(config)
        copy = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__}))
        for name in names:
            value = getattr(config, name)
            inner = dataclasses.is_dataclass(value) and not isinstance(value, type)
            object.__setattr__(copy, name, self.of(value, f"{prefix}{name}.") if inner else value)
        return copy


@check("A3", "lint", "err", humbatova=(8,), quick=True)
def source(subject: Subject) -> Finding:
    """Lints the recipe's files."""
    if hits := [hit for path in subject.recipe.files() for hit in lint(path)]:
        hit = min(hits, key=lambda h: h.severity)
        more = f" (and {len(hits) - 1} more)" if len(hits) > 1 else ""
        where = f"{short(hit.path)}:{hit.line}"
        fix = f"{hit.fix}; if it is meant, write `# check: allow` behind the line"
        severity = subject.unsure or ("err" if hit.severity == "err" else "warn")
        return failed(f"{hit.what}{more}", where=where, why=hit.why, fix=fix, severity=severity)
    return passed(f"{len(subject.recipe.files())} files read")


@check("A4", "config summary", "warn", humbatova=(2,), quick=True)
def config_summary(subject: Subject) -> Finding:
    """The model has the size that the preset's docstring promises, unless a setting of the model or of the data was changed."""
    about = subject.recipe.presets[subject.preset or ""].__doc__ or ""
    promised = re.search(r"([\d.]+) ?([kMGB]) (?:of )?param", about)
    items = subject.config.steps * subject.config.batch
    epochs = f"{items / subject.real_data.train.num_items:.3g} epochs" if subject.real_data.train.num_items else "no epochs"
    if not promised:
        return passed(f"{items:,} items, {epochs}; the preset promises no size")
    with shapes_only():
        try:
            # A copy: a system may leave a function with its source, as a curriculum does.
            data = dataclasses.replace(subject.real_data, train=copy.copy(subject.real_data.train))
            system = subject.recipe.build(subject.config, data)
        except Exception as error:  # anything that needs real numbers while it is built
            return skipped(f"the system cannot be built without memory: {type(error).__name__}")
    number = sum(p.numel() for p in system.parameters())
    wanted = float(promised[1]) * _UNITS[promised[2]]
    ratio = max(number / wanted, wanted / max(number, 1))
    asked = [key for key in _asked(subject) if key.startswith(("model.", "data."))]
    if ratio > SIZE and asked:  # what somebody has set is what they want
        return passed(f"{number / 1e6:.3g} M parameters with {asked[0]} set, {items:,} items, {epochs}")
    if ratio > SIZE:
        what = f"{number / 1e6:.3g} M parameters, the preset promises {wanted / 1e6:.3g} M"
        return failed(what, where=subject.preset_line(), value=ratio, limit=SIZE)
    return passed(f"{number / 1e6:.3g} M parameters as promised, {items:,} items, {epochs}", ratio, SIZE)
