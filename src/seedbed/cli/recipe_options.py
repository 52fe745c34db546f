"""Options of `sample` and `inference-curve` that a recipe declares, which is known only when the run is opened."""

import argparse
from collections.abc import Sequence
from typing import Any

from seedbed.cli.failures import RENAMED_OPTIONS
from seedbed.cli.parser import Parser, number


def split(parser: Parser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of this verb, and the options of the recipe, which is known later; each of these takes a value.

    With a RUN, `--help` is the recipe's too.
    """
    own, extra, left = [], [], list(words)
    asks_recipe = any(not word.startswith("-") for word in words)
    while left:
        word = left.pop(0)
        name = word.partition("=")[0]
        if word in ("-h", "--help") and asks_recipe:
            extra.insert(0, word)
            continue
        if not name.startswith("--") or name in parser.known_options:
            own.append(word)
            continue
        if name in RENAMED_OPTIONS:
            parser.error(f"{name} is now {RENAMED_OPTIONS[name]}")
        extra.append(word)
        if "=" not in word and left and not left[0].startswith("--"):
            extra.append(left.pop(0))
    return own, extra


def recipe_options(given: argparse.Namespace, verb: str, kind: type) -> dict[str, Any]:
    """The options of a recipe as they were typed, by its dataclass of options; `--help` lists them."""
    from seedbed.train.options import options_of, refuse

    parser = Parser(prog=f"seedbed {verb} {given.name}", description=kind.__doc__, allow_abbrev=False)
    for one in options_of(kind).values():
        read = str if one.kind is str else number(one.kind, one.low, one.high)
        shown = f" (default: {one.default})" if one.default not in (None, ()) else ""
        more: dict[str, Any] = {"action": "append"} if one.many else {}
        about = one.help + shown.replace("%", "%%")
        parser.add_argument(one.flag, dest=one.name, type=read, default=argparse.SUPPRESS, metavar="X", help=about, **more)
    for word in given.recipe_options:
        if word.startswith("--") and word.partition("=")[0] not in parser.known_options:
            refuse(word.partition("=")[0], kind)
    return vars(parser.parse_args(given.recipe_options))
