"""Ends of commands that fail: errors of the user in a line, with the nearest verb or option; bugs with their traceback."""

import difflib
import errno
import os
import sys
import time
import traceback
from typing import NoReturn

from seedbed.cli import GROUPS, VERBS
from seedbed.cli.parser import Parser
from seedbed.errors import EXIT_FAILED, EXIT_USER, UserError

# Disk errors that the user can fix; any other OSError is a bug.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def print_error(text: str) -> int:
    print(f"seedbed: {_rank()}" + text.replace("\n", "\n  "), file=sys.stderr)
    return EXIT_USER


def _rank() -> str:
    """Prefix with the rank; other ranks wait, since the primary one reports common errors first and ends them."""
    rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"
    if rank == "0":
        return ""
    time.sleep(2.0)
    return f"rank {rank}: "


def explain(error: Exception) -> int:
    """Print what an unexpected error means: a disk, another rank, the user's recipe, or a bug of ours."""
    if isinstance(error, OSError) and error.errno in _DISK:
        return print_error(f"{error.strerror}: {error.filename or 'while writing'}")
    # What errors say when the connection to another rank was lost.
    words = ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "Connection refused")
    if "WORLD_SIZE" in os.environ and any(word in f"{type(error).__name__} {error}" for word in words):
        return print_error("another rank has stopped, so this one stops too; see the error of that rank")
    from seedbed.recipes import user_files
    from seedbed.track.code import version

    place = user_files.place_of(error)
    traceback.print_exception(user_files.without_our_frames(error))
    if place:
        text = f"the error above was raised {place}"
    elif mine := user_files.at_work(error):
        text = (
            f"the error above was raised while seedbed used your recipe {mine}: look at what its functions return;\n"
            "if that is right, report it with the command and the lines above"
        )
    else:
        text = f"this is a bug in seedbed {version()}; please report it with the command and the lines above"
    print_error(text)
    return EXIT_FAILED


# Verbs and options that have another name now.
RENAMED_VERBS = {"think": "inference-curve"}
RENAMED_OPTIONS = {"--think": "--optimize-steps"}


# Last words of verbs that end or delete something: a typo never leads to them.
DESTRUCTIVE = {"rm", "cancel", "delete", "remove", "prune"}


def refuse_verb(name: str) -> NoReturn:
    if name in RENAMED_VERBS:
        raise UserError(f"`{name}` is now: seedbed {RENAMED_VERBS[name]}")
    if "/" in name or name.endswith(".py"):
        raise UserError(f"there is no verb `{name}`; to train that recipe: seedbed train {name}")
    harmless = [verb for verb in (*VERBS, *GROUPS) if verb.split()[-1] not in DESTRUCTIVE]
    near = difflib.get_close_matches(name, harmless, 1, 0.5)
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
