"""What verbs are made of: a parser with our manners, ranges for numbers, settings, and a register."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from seedbed.errors import UserError

Act = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse with our manners: one line on what is wrong, and settings told apart from options."""

    takes_settings = False

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: {self.prog} --help")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Options may stand before, between and after the positional words."""
        found, rest = self.parse_known_intermixed_args(list(words))
        if rest:
            self._refuse(rest[0])
        return found

    def _refuse(self, word: str) -> NoReturn:
        import difflib

        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, 1, 0.75)
        if near:
            self.error(f"unknown option {name}, did you mean {near[0]}?")
        if self.takes_settings and name.startswith("--"):
            self.error(f"unknown option {name}; settings are written {name.lstrip('-').replace('-', '_')}=VALUE")
        self.error(f"unknown argument {word}")


class Verb(NamedTuple):
    """A word on the command line: how its arguments read, and what it does with them."""

    usage: str
    about: str
    arguments: Callable[[Parser], object]
    act: Act


def registrar(verbs: dict[str, Verb]) -> Callable[..., Callable[[Act], Act]]:
    """A decorator that puts verbs into this register, in the order of the file."""

    def verb(name: str, usage: str, about: str, arguments: Callable[[Parser], object] = lambda parser: None):
        def register(act: Act) -> Act:
            verbs[name] = Verb(usage, about, arguments, act)
            return act

        return register

    return verb


def number(kind: type, low: float, high: float = float("inf")) -> Callable[[str], Any]:
    """An argparse type that checks a range."""

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


def settings(parser: Parser, what: str = "RECIPE/PRESET", needed: bool = True) -> None:
    parser.takes_settings = True
    parser.add_argument("name", nargs=None if needed else "?", metavar=what)
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help="any config value, by its dotted name")
