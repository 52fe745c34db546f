"""Argument parsing of verbs: parser, number ranges, settings, common options, and the registry of verbs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from seedbed.errors import UserError

# Options that have another name now.
RENAMED = {"--think": "--optimize-steps"}
Act = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and `key=value` settings."""

    takes_settings = False
    takes_recipe_options = False  # unknown options, each with a value, are kept as `recipe_options`

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: {self.prog} --help")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse; options may stand before, between and after positional words."""
        for word in words:
            name, equals, value = word.partition("=")
            if name.startswith("-") and equals and value == "--":
                self.error(f"{name} needs a value; -- is not one")  # argparse would drop the dashes and return a list
        own, extra = self._split(words) if self.takes_recipe_options else (list(words), [])
        found, rest = self.parse_known_intermixed_args(own)
        if rest:
            self._refuse(rest[0])
        found.recipe_options = extra
        if self.takes_settings and len(found.settings) > 1:
            from seedbed.config import require_distinct

            require_distinct(found.settings)
        return found

    def _split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
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
            if not name.startswith("--") or name in self._option_string_actions:
                own.append(word)
                continue
            if name in RENAMED:
                self.error(f"{name} is now {RENAMED[name]}")
            extra.append(word)
            if "=" not in word and left and not left[0].startswith("--"):
                extra.append(left.pop(0))
        return own, extra

    def _refuse(self, word: str) -> NoReturn:
        import difflib

        name = word.partition("=")[0]
        if RENAMED.get(name) in self._option_string_actions:
            self.error(f"{name} is now {RENAMED[name]}")
        near = difflib.get_close_matches(name, self._option_string_actions, 1, 0.75)
        if near:
            self.error(f"unknown option {name}, did you mean {near[0]}?")
        if self.takes_settings and name.startswith("--"):
            self.error(f"unknown option {name}; settings are written {name.lstrip('-').replace('-', '_')}=VALUE")
        self.error(f"unknown argument {word}")


class Verb(NamedTuple):
    """A command: usage, help text, arguments and action."""

    usage: str
    about: str
    arguments: Callable[[Parser], object]
    act: Act


def registrar(verbs: dict[str, Verb]) -> Callable[..., Callable[[Act], Act]]:
    """A decorator that adds verbs to this registry."""

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
        if word.startswith("--") and word.partition("=")[0] not in parser._option_string_actions:
            refuse(word.partition("=")[0], kind)
    return vars(parser.parse_args(given.recipe_options))


def trust_argument(parser: Parser) -> None:
    parser.add_argument("--trust", action="store_true", help="trust and execute the recipe file that it names; read it first")


def confirm(given: argparse.Namespace) -> None:
    """With --trust: record that the user trusts the code of a run or a sweep, and print what it is."""
    if not given.trust:
        return
    from seedbed.recipes.saved import confirm_saved
    from seedbed.track.run import Run

    if getattr(given, "join", None):
        from seedbed.tune.sweep import verbs

        found = verbs.confirm(given.runs, given.join)
    else:
        found = confirm_saved(Run.open(given.runs, given.name).config_json())
    for code in found:
        print(f"trusted: {code}", file=sys.stderr)
    if not found:
        print("--trust: nothing to confirm, the recipe is an installed one", file=sys.stderr)


def settings(parser: Parser, what: str = "RECIPE/PRESET", needed: bool = True) -> None:
    parser.takes_settings = True
    parser.add_argument("name", nargs=None if needed else "?", metavar=what)
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help="config settings by their dotted names")


def on_argument(parser: Parser) -> None:
    parser.add_argument("--on", choices=("slurm",), help="run it as a Slurm job; settings: slurm.time=4h, slurm.partition=...")


def dry_argument(parser: Parser) -> None:
    parser.add_argument("--dry", action="store_true", help="with --on slurm: print script and command, submit nothing")


def runs_here(given: argparse.Namespace) -> bool:
    """Whether the command runs on this machine; settings that only a cluster has are refused then."""
    if given.on:
        return False
    stray = next((word for word in given.settings if word.startswith("slurm.")), None)
    if stray:
        raise UserError(f"{stray} is for Slurm jobs; add --on slurm")
    return True


def refuse_dry(given: argparse.Namespace) -> None:
    if given.dry:
        raise UserError("--dry needs --on slurm here; on this machine: seedbed train RECIPE/PRESET --dry")
