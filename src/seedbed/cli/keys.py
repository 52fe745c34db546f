"""`seedbed keys`: name, value, type, range and one sentence of every config key; for `train --help` and docs/reference.py too."""

import argparse
import dataclasses
import functools
import math
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from seedbed import config as configs
from seedbed.cli.parser import Parser, argument, verb
from seedbed.config.refusals import described, unknown_key
from seedbed.errors import UserError
from seedbed.track.text import format_value


class Key(NamedTuple):
    """A config key as it is shown; `default` is the preset's value as it is typed."""

    name: str
    type: str
    default: str
    range: str
    about: str


@verb("keys", "RECIPE/PRESET [PATTERN]", "config keys of a preset: type, default, range and what they do")
@argument("name", metavar="RECIPE/PRESET")
@argument("pattern", nargs="?", default="", metavar="PATTERN", help="a part of the key, such as optim, or with *: *.lr")
def _keys(given: argparse.Namespace) -> int:
    from seedbed import recipes
    from seedbed.track import jsonl

    recipe, preset = recipes.find(given.name)
    config = recipe.preset(preset)
    found = [key for key in keys_of(config) if _fits(given.pattern, key.name)]
    if not found:
        raise UserError(str(unknown_key(config, given.pattern)).replace("unknown key", "no key fits"))
    if given.json:
        return jsonl.print_json([key._asdict() for key in found])
    print("\n".join(key_lines(found)))
    return 0


def _fits(pattern: str, name: str) -> bool:
    return fnmatch(name, pattern) if "*" in pattern else pattern in name


def keys_of(config: Any) -> list[Key]:
    """All keys of a config, and the settings of Slurm jobs."""
    from seedbed.launch.slurm_script import Resources

    found = []
    for part, prefix in ((config, ""), (Resources(), "slurm.")):
        for name, value, info, hint in configs.leaves(part, prefix):
            about = sentence(part, prefix, name, info)
            found.append(Key(name, _type(configs.type_of(info, hint), info), format_value(value), _range(info), about))
    return found


def key_lines(keys: list[Key]) -> Iterator[str]:
    """Two lines or more per key: as it is typed with type and range, and the sentence beneath."""
    from seedbed.track.text import width

    room = min(width(), 120)
    for key in keys:
        about = f"{key.name}={key.default}".ljust(32) + "  " + ", ".join(filter(None, (key.type, key.range)))
        yield from textwrap.wrap(about, room, subsequent_indent=" " * 34, break_on_hyphens=False)
        yield from textwrap.wrap(key.about.replace("`", ""), room, initial_indent="    ", subsequent_indent="    ")


@functools.cache
def sentences() -> dict[str, dict[str, str]]:
    """Sentences on keys by the name of their dataclass, and on checks by id under `checks`."""
    return tomllib.loads((Path(configs.__file__).parent / "keys.toml").read_text())


def sentence(config: Any, prefix: str, key: str, info: dataclasses.Field) -> str:
    """The sentence on a key: that of a recipe's dataclass is filed under its module's path; a user's own has it as `help`."""
    for name in key.removeprefix(prefix).split(".")[:-1]:
        config = getattr(config, name)
    full = f"{type(config).__module__.removeprefix('seedbed.')}.{type(config).__name__}"
    filed = sentences().get(full) or (sentences().get(type(config).__name__, {}) if full.count(".") < 3 else {})
    return filed.get(info.name) or info.metadata.get("help", "")


def _type(kind: Any, info: dataclasses.Field) -> str:
    if info.metadata.get("code"):
        return "a function, as package.module:name"
    return described("duration" if info.metadata.get("duration") else kind)


def _range(info: dataclasses.Field) -> str:
    low, high = info.metadata.get("low", -math.inf), info.metadata.get("high", math.inf)
    return "" if low == -math.inf else f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"


def extend(parser: Parser, words: Sequence[str]) -> None:
    """Add examples from examples.toml, and the keys of the preset among the words."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    examples = tomllib.loads(Path(__file__).with_name("examples.toml").read_text())
    parts = ["examples:", *(f"  {line}" for line in examples.get(parser.prog.removeprefix("seedbed "), ()))]
    if "RECIPE/PRESET" in (parser.usage or ""):
        named = next((word for word in words if "/" in word and "=" not in word and word[0] != "-" and ".py" not in word), "")
        parts += ["", *_keys_of(named)]
    parser.epilog = "\n".join(parts).replace("%", "%%")


def _keys_of(named: str) -> list[str]:
    """The keys of a preset; help never executes a user's file."""
    if not named:
        return ["keys: seedbed keys RECIPE/PRESET [PATTERN]"]
    from seedbed import recipes

    try:
        recipe, preset = recipes.find(named)
        return [f"keys of {named} (seedbed keys {named} PATTERN finds some):", *key_lines(keys_of(recipe.preset(preset)))]
    except UserError as problem:
        return [str(problem)]
