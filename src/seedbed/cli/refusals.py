"""Errors for verbs and options that there are not, with the nearest ones."""

import difflib
from typing import NoReturn

from seedbed.cli import GROUPS, VERBS
from seedbed.cli.parser import Parser
from seedbed.errors import UserError

# Verbs and options that have another name now.
RENAMED_VERBS = {"think": "inference-curve"}
RENAMED_OPTIONS = {"--think": "--optimize-steps"}


def refuse_verb(name: str) -> NoReturn:
    """The error for a word that is no verb, with the nearest one."""
    if name in RENAMED_VERBS:
        raise UserError(f"`{name}` is now: seedbed {RENAMED_VERBS[name]}")
    if "/" in name or name.endswith(".py"):
        raise UserError(f"there is no verb `{name}`; to train that recipe: seedbed train {name}")
    near = difflib.get_close_matches(name, [*VERBS, *GROUPS], 1, 0.5)
    hint = f"did you mean: seedbed {near[0]}" if near else "seedbed --help lists them"
    raise UserError(f"there is no verb `{name}`; {hint}")


def refuse_option(parser: Parser, word: str) -> NoReturn:
    """The error for an option that the verb does not have, with the nearest one."""
    name = word.partition("=")[0]
    if RENAMED_OPTIONS.get(name) in parser.known_options:
        parser.error(f"{name} is now {RENAMED_OPTIONS[name]}")
    near = difflib.get_close_matches(name, parser.known_options, 1, 0.75)
    if near:
        parser.error(f"unknown option {name}, did you mean {near[0]}?")
    if parser.takes_settings and name.startswith("--"):
        parser.error(f"unknown option {name}; settings are written {name.lstrip('-').replace('-', '_')}=VALUE")
    parser.error(f"unknown argument {word}")
