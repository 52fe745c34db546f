"""Argument parsing of verbs: parser, number ranges, settings, common options, and the registry of verbs."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from seedbed.errors import UserError

Act = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and `key=value` settings."""

    takes_settings = False
    takes_recipe_options = False  # unknown options, each with a value, are kept as `recipe_options`

    @property
    def known_options(self) -> dict[str, argparse.Action]:
        return self._option_string_actions

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: {self.prog} --help")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse; options may stand before, between and after positional words."""
        for word in words:
            name, equals, value = word.partition("=")
            if name.startswith("-") and equals and value == "--":
                self.error(f"{name} needs a value; -- is not one")  # argparse would drop the dashes and return a list
        own, extra = list(words), []
        if self.takes_recipe_options:
            from seedbed.cli.using import split_recipe_options

            own, extra = split_recipe_options(self, words)
        found, rest = self.parse_known_intermixed_args(own)
        if rest:
            from seedbed.cli.failures import refuse_option

            refuse_option(self, rest[0])
        found.recipe_options = extra
        if self.takes_settings and len(found.settings) > 1:
            from seedbed.config import require_distinct

            require_distinct(found.settings)
        return found


class Verb(NamedTuple):
    """A command: usage, help text, what adds its arguments, and action."""

    usage: str
    about: str
    arguments: Sequence[Callable[[Parser], object]]
    act: Act


REGISTERED: dict[str, Verb] = {}  # verbs of the modules that are imported
_ARGUMENTS: dict[Act, list[Callable[[Parser], object]]] = {}


def verb(name: str, usage: str, about: str) -> Callable[[Act], Act]:
    """Decorate the action of a verb; its arguments are declared by decorators below this one."""

    def register(act: Act) -> Act:
        REGISTERED[name] = Verb(usage, about, _ARGUMENTS.get(act, ()), act)
        return act

    return register


def declares(add: Callable[[Parser], object]) -> Callable[[Act], Act]:
    """A decorator of actions whose arguments this function adds."""

    def declare(act: Act) -> Act:
        _ARGUMENTS.setdefault(act, []).insert(0, add)  # the last decorator comes first
        return act

    return declare


def argument(*names: str, **options: Any) -> Callable[[Act], Act]:
    """Declare an argument of a verb, in the words of `add_argument`."""
    return declares(lambda parser: parser.add_argument(*names, **options))


def number(kind: type, low: float, high: float = float("inf")) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a {'whole ' if kind is int else ''}number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{text} is not {f'between {low:g} and {high:g}' if high < float('inf') else f'at least {low:g}'}"
            )
        return value

    return read


def settings(what: str = "RECIPE/PRESET", needed: bool = True) -> Callable[[Act], Act]:
    def add(parser: Parser) -> None:
        parser.takes_settings = True
        parser.add_argument("name", nargs=None if needed else "?", metavar=what)
        parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help="config settings by their dotted names")

    return declares(add)


on_argument = argument("--on", choices=("slurm",), help="run it as a Slurm job; settings: slurm.time=4h, slurm.partition=...")


def runs_here(given: argparse.Namespace) -> bool:
    """Whether the command runs on this machine; settings that only a cluster has are refused then."""
    if given.on:
        return False
    stray = next((word for word in given.settings if word.startswith("slurm.")), None)
    if stray:
        raise UserError(f"{stray} is for Slurm jobs; add --on slurm")
    return True
