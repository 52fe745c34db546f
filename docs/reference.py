"""Writes the reference pages docs/reference/*.md from the code: `python docs/reference.py`, which `make docs` runs first.

Nothing here is a list of its own: verbs, checks, events, exit codes and config keys come from their registries. The sentences on
config keys, and on checks without a docstring, are in src/seedbed/config/keys.toml.
"""

import argparse
import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import seedbed
from seedbed import recipes
from seedbed.cli.explain import registry
from seedbed.cli.keys import sentence, sentences
from seedbed.config import Config, leaves, type_of

HERE = Path(__file__).parent
CHECK_SENTENCES = sentences()["checks"]
SENTENCES = {name: found for name, found in sentences().items() if name != "checks"}
COMMON = ("--help", "--runs", "--json", "--dirty")


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)


def code(value: Any) -> str:
    return f"`{value}`" if str(value) else ""


# ---- config keys -----------------------------------------------------------------------------------------------------


def kind_name(kind: Any, info: dataclasses.Field) -> str:
    """A type as a reader of the command line knows it."""
    if info.metadata.get("duration"):
        return "duration (`90s`, `5m`, `2h`)" + (" or `none`" if type(None) in get_args(kind) else "")
    if info.metadata.get("code"):
        return "function name"
    if get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join("`none`" if part is type(None) else kind_name(part, info) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(code(option) for option in get_args(kind))
    if get_origin(kind) is tuple:
        return f"{kind_name(get_args(kind)[0], info)}s, separated by commas"
    return {int: "whole number", float: "number", bool: "`true` or `false`", str: "text"}.get(kind, str(kind))


def range_name(info: dataclasses.Field) -> str:
    low, high = info.metadata.get("low", -math.inf), info.metadata.get("high", math.inf)
    if math.isinf(low) and math.isinf(high):
        return ""
    if math.isinf(high):
        return f"at least {number_name(low)}"
    return f"at most {number_name(high)}" if math.isinf(low) else f"{number_name(low)} to {number_name(high)}"


def number_name(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def typed(value: Any) -> str:
    """A value as it would be typed."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def value_name(value: Any) -> str:
    return code(typed(value)) or "empty"


def default_of(info: dataclasses.Field, value: Any) -> Any:
    return value if info.default is dataclasses.MISSING else info.default


def key_table(config: Any, prefix: str = "") -> str:
    """All keys of a group: name, type, default of its dataclass, range, sentence."""
    rows = []
    for key, value, info, hint in leaves(config, prefix):
        kind = kind_name(type_of(info, hint), info)
        about = sentence(config, prefix, key, info)
        rows.append((code(key), kind, value_name(default_of(info, value)), range_name(info), about))
    return table(("key", "type", "default", "range", "meaning"), rows)


def config_page() -> str:
    from seedbed.launch.slurm_script import Resources

    parts = ["# Config keys", "Every key can be set on the command line: `seedbed train gpt/demo steps=500 optim.lr=1e-3`."]
    parts += ["These keys belong to every recipe; a preset may change their defaults. The pages of the recipes list the keys of"]
    parts[-1] += " `model.` and `data.`, and what each preset sets."
    plain = Config(model=None, data=None)
    groups = [f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(getattr(plain, f.name))]
    rest = [f.name for f in dataclasses.fields(Config) if f.name not in (*groups, "model", "data")]
    rows = key_table(plain).splitlines()
    parts += ["## The run", "\n".join([*rows[:2], *(r for r in rows[2:] if r.split("`")[1] in rest)])]
    for name in groups:
        group = getattr(plain, name)
        parts += [f"## {name}", paragraph(inspect.getdoc(type(group)) or ""), key_table(group, f"{name}.")]
    parts += ["## slurm", paragraph(inspect.getdoc(Resources) or ""), key_table(Resources(), "slurm.")]
    return "\n\n".join(parts)


def paragraph(text: str) -> str:
    """A docstring as Markdown: its line breaks mean nothing, its blank lines do."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def recipe_page(name: str) -> str:
    """The presets of a recipe, and one table of keys for each pair of model and data that they use."""
    presets = {preset: make() for preset, make in recipes.find(name)[0].presets.items()}
    parts = [f"# Keys of {name}", "Shared keys are on the page [config keys](config.md). "]
    parts[-1] += f"Results and advice: [{name}](../{name}.md)."
    kinds: dict[tuple[type, type], list[str]] = {}
    for preset, config in presets.items():
        kinds.setdefault((type(config.model), type(config.data)), []).append(preset)
    for (model, data), members in kinds.items():
        title = "Model and data" if len(kinds) == 1 else f"Model and data of {', '.join(members)}"
        config = presets[members[0]]
        parts += [f"## {title}", paragraph(inspect.getdoc(model) or ""), key_table(config.model, "model.")]
        parts += [paragraph(inspect.getdoc(data) or ""), key_table(config.data, "data.")]
    parts += ["## Presets", "With what each sets that differs from the defaults above."]
    for preset, config in presets.items():
        about = paragraph(inspect.getdoc(recipes.find(name)[0].presets[preset]) or "")
        changed = [f"{key}={typed(value)}" for key, value, info, _ in leaves(config) if value != default_of(info, value)]
        parts += [f"### {name}/{preset}", about, "```text\n" + "\n".join(changed or ["the defaults"]) + "\n```"]
    return "\n\n".join(parts)


# ---- verbs -----------------------------------------------------------------------------------------------------------


def flag_row(action: argparse.Action) -> tuple[str, str, str]:
    names = ", ".join(code(name) for name in action.option_strings) or code(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
        names += f" {code(value)}"
    default = action.default
    shown = "" if default in (None, False, [], (), argparse.SUPPRESS, "") or action.nargs == 0 else value_name(default)
    return names, (action.help or "").replace("%%", "%"), shown


def verb_page() -> str:
    from seedbed.cli import VERBS, parser_of

    common = [a for a in actions(parser_of("note")) if set(a.option_strings) & set(COMMON)]
    parts = ["# Verbs", "`seedbed VERB --help` prints the same. Every verb also takes:"]
    parts += [table(("option", "meaning"), [(flag_row(action)[0], flag_row(action)[1]) for action in common])]
    for name in VERBS:
        parser = parser_of(name)
        own = [flag_row(action) for action in actions(parser) if not set(action.option_strings) & set(COMMON)]
        parts += [f"## {name}", VERBS[name].about, f"```text\n{f'seedbed {name} {VERBS[name].usage}'.strip()}\n```"]
        if any(default for *_, default in own):
            parts += [table(("argument", "meaning", "default"), own)]
        elif own:
            parts += [table(("argument", "meaning"), [row[:2] for row in own])]
    parts += ["## Options of recipes", "What `seedbed sample` and `seedbed inference-curve` also take, by the recipe of the run."]
    for title, kind in sample_options():
        parts += [f"### {title}", table(("option", "type", "default", "range", "meaning"), list(option_rows(kind)))]
    return "\n\n".join(parts)


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # argparse has no public list of them


def sample_options() -> list[tuple[str, type]]:
    """The dataclasses of options that the recipes' systems declare, with a title."""
    from seedbed.train.system import NoOptions, System

    found: dict[type, str] = {}
    for name, module in recipe_modules():
        for system in vars(module).values():
            if not (inspect.isclass(system) and issubclass(system, System) and system.__module__ == module.__name__):
                continue
            for verb, kind in (
                ("sample", system.sample_options),
                ("inference-curve", getattr(system, "curve_options", NoOptions)),
            ):
                if kind is not NoOptions:
                    part = module.__name__.split(".")[3:-1]
                    found.setdefault(kind, f"{verb} of {' '.join([name, *part])}")
    return [(title, kind) for kind, title in found.items()]


def option_rows(kind: type) -> Iterator[tuple[str, ...]]:
    from seedbed.train.options import options_of

    for one in options_of(kind).values():
        info = dataclasses.field(metadata={"low": one.low, "high": one.high})
        default = "" if one.default in (None, ()) else value_name(one.default)
        values = kind_name(one.kind, info) + (", repeated" if one.many else "")
        yield code(one.flag), values, default, range_name(info), one.help


def recipe_modules() -> list[tuple[str, types.ModuleType]]:
    """Every module of every recipe, so that all they register is known."""
    found = []
    for name in recipes.names():
        package = importlib.import_module(f"seedbed.recipes.{name}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not info.ispkg and "simulators" not in info.name:  # simulators need packages that are not always there
                found.append((name, importlib.import_module(info.name)))
    return found


# ---- checks, events, exit codes --------------------------------------------------------------------------------------


def check_page() -> str:
    from seedbed.checks.registry import CONSEQUENCES, all_checks

    rows = []
    for check in all_checks():
        anchor = f"../preflight.md#{check.id}-{check.title}".lower().replace(" ", "-")
        severity = {"err": "error", "warn": "warning", "note": "note"}[check.severity]
        about = paragraph(inspect.getdoc(check.run) or CHECK_SENTENCES.get(check.id, ""))
        needs = ", ".join(code(need) for need in check.needs)
        followers = CONSEQUENCES.get(check.id, "")
        rows.append((f"[{check.id}]({anchor})", check.title, about, severity, "yes" if check.quick else "", needs, followers))
    header = ("id", "title", "what must hold", "severity", "quick", "needs of the probe", "explains")
    parts = [
        "# Checks",
        "What `seedbed check` tests. The quick ones run before every training run. A check with needs runs where",
    ]
    parts[-1] += " the recipe's `Probe` declares them. Findings in the last column are listed beneath that check's own finding."
    return "\n\n".join([*parts, table(header, rows)])


def event_page() -> str:
    from seedbed.track.events import KINDS

    recipe_modules()
    rows = [(code(kind), about.severity, about.about) for kind, about in KINDS.items()]
    parts = ["# Events", "Lines of `events.jsonl`: each has `step`, `kind` and the facts of its kind."]
    parts += ["[Runs](../runs.md#fixed-words) says how to add a kind, [forensics](../forensics.md) what alarms mean."]
    return "\n\n".join([*parts, table(("kind", "severity", "meaning"), rows)])


def exit_page() -> str:
    from seedbed import errors

    said = registry()["exit code"]
    rows = [(str(number), code(name), said[str(number)]) for name, number in vars(errors).items() if name.startswith("EXIT_")]
    parts = ["# Exit codes", table(("code", "name in `seedbed.errors`", "meaning"), rows)]
    return "\n\n".join([*parts, "[Runs](../runs.md#exit-codes) lists what runs make of them, with the codes of signals."])


def name_page() -> str:
    parts = ["# Names", "What metrics, columns of rows and words mean; `seedbed explain NAME` prints the same."]
    for what, about in registry().items():
        if what.split()[0] in ("metric", "column", "word", "status"):
            parts += [f"## {what[0].upper()}{what[1:]}", table(("name", "meaning"), [(code(k), v) for k, v in about.items()])]
    return "\n\n".join(parts)


# ---- Python ----------------------------------------------------------------------------------------------------------


def annotation(kind: Any) -> str:
    """A type without the modules of its parts."""
    shown = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", shown)


def parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {annotation(one.annotation)}"
    if one.default is one.empty:
        return f"{stars}{one.name}{kind}"
    plain = dataclasses.is_dataclass(one.default) or " object at " in repr(one.default)
    default = f"{type(one.default).__name__}()" if plain else repr(one.default)
    return f"{one.name}{kind} = {default}" if kind else f"{one.name}={default}"


def signature(name: str, thing: Any) -> str:
    """A signature in the words of the source, over several lines where it is long."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"{name}(message: str)"
    found, parts = inspect.signature(thing), []
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts += [parameter(one)] if one.name != "self" else []
    has_result = not inspect.isclass(thing) and found.return_annotation is not found.empty
    result = f" -> {annotation(found.return_annotation)}" if has_result else ""
    whole = f"{name}({', '.join(parts)}){result}"
    return whole if len(whole) <= 100 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def python_entry(name: str, thing: Any, level: str = "##") -> Iterator[str]:
    yield f"{level} {name}"
    yield f"```python\n{signature(name, thing)}\n```"
    if inspect.isclass(thing):
        documented = thing.__doc__ and not thing.__doc__.startswith(f"{thing.__name__}(")
        yield paragraph(inspect.cleandoc(thing.__doc__)) if documented else ""
        methods = [(key, value) for key, value in vars(thing).items() if not key.startswith("_") and is_documented(value)]
        rows = [(code(method_name(key, value)), paragraph(inspect.getdoc(value) or "")) for key, value in methods]
        yield table(("member", "meaning"), rows) if rows else ""
    else:
        yield paragraph(inspect.getdoc(thing) or "")


def is_documented(value: Any) -> bool:
    return (inspect.isfunction(value) or isinstance(value, property)) and bool(inspect.getdoc(value))


def method_name(key: str, value: Any) -> str:
    return key if isinstance(value, property) else " ".join(signature(key, value).split())


def python_page() -> str:
    from seedbed.api import Run
    from seedbed.inference import TrainedModel

    parts = ["# Python names", "What `import seedbed` gives, by name; [From Python](../python.md) shows how to use them."]
    for name in seedbed.__all__:
        parts += python_entry(name, getattr(seedbed, name))
    parts += ["## What these return", *python_entry("Run", Run, "###"), *python_entry("TrainedModel", TrainedModel, "###")]
    return "\n\n".join(filter(None, parts))


PAGES = {
    "config": config_page,
    "verbs": verb_page,
    "checks": check_page,
    "events": event_page,
    "exit-codes": exit_page,
    "names": name_page,
    "python": python_page,
}


def pages() -> dict[str, str]:
    """All generated pages by file name."""
    own = {f"config-{name}": recipe_page(name) for name in recipes.names()}
    return {f"{name}.md": text + "\n" for name, text in ({name: make() for name, make in PAGES.items()} | own).items()}


def main() -> int:
    folder = HERE / "reference"
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)
        print(f"docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
