"""The command line: verbs, arguments, exit codes. Each verb imports what it needs, so that listings are fast."""

import atexit
import contextlib
import errno
import gc
import importlib
import io
import os
import sys
import threading
from collections import UserDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from seedbed.cli.parser import REGISTERED, Parser, Verb
from seedbed.errors import EXIT_INTERRUPTED, EXIT_PIPE, UserError
from seedbed.track import clocks

# The verbs of each module, in the order of `seedbed --help`.
_MODULES = {
    "training": ("demo", "train"),
    "keys": ("keys",),
    "explain": ("explain",),
    "resuming": ("resume", "cancel"),
    "using": ("sample", "inference-curve", "play", "export", "publish"),
    "measuring": ("find-lr", "find-batch", "profile", "plan", "sweep", "ablate", "doctor", "check", "replay", "overfit", "drill"),
    "data_and_runs": (
        *("data prepare", "data record", "data inspect", "data verify", "data bench", "data show", "runs list", "runs show"),
        *("runs checkpoints", "runs diff", "runs rm", "note", "journal"),
    ),
    "reporting": ("top", "watch", "report", "runs export", "runs mirror", "serve"),
    "completion": ("completion",),
}


class _Verbs(UserDict[str, Any]):
    """All verbs by name. The module of a verb is imported on access, so that a command loads only its own."""

    def __getitem__(self, name: str) -> Verb:
        importlib.import_module(f"seedbed.cli.{self.data[name]}")
        return REGISTERED[name]


VERBS = _Verbs({name: module for module, names in _MODULES.items() for name in names})
GROUPS = {"runs": "list", "data": None}


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see seedbed.errors)."""
    # Spinning OpenMP threads slow down shared machines; must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if words is not None:
        return _run(list(words))
    clocks.mark_command()
    gc.set_threshold(100_000, 50, 100)  # the default takes a tenth of the time of importing torch and its compiler
    status = _run(sys.argv[1:])
    gc.freeze()  # skips the last garbage collection, which takes half a second with torch loaded
    if "torch" in sys.modules:
        _exit_now(status)
    return status


def _exit_now(status: int) -> NoReturn:
    """End the process without finalising the interpreter, which with torch loaded takes up to a second.

    It is also needed on ranks: gloo's threads release the tensors of the last collective after it has returned, for which they
    need the interpreter's lock; when the interpreter has begun to end by then, the process aborts and a finished run has failed.
    """
    # What the interpreter calls: it ends idle pools of threads, such as the compiler's, and waits for all other threads.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def _run(words: list[str]) -> int:
    try:
        status = dispatch(words)
        _flush()
        return status
    except UserError as problem:
        from seedbed.cli.failures import print_error

        return print_error(str(problem))
    except BrokenPipeError:
        # The reader has closed the pipe; avoid a second error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        print("seedbed: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except Exception as error:
        from seedbed.cli.failures import explain

        return explain(error)


def _flush() -> None:
    """Flush standard output; a closed terminal is no error of the command."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(words: list[str]) -> int:
    lead = Parser(prog="seedbed", add_help=False, allow_abbrev=False)
    lead.add_argument("-h", "--help", action="store_true")
    lead.add_argument("--version", action="store_true")
    _common(lead)
    first = place_of_verb(words)
    options = lead.read(words[:first])
    if options.version:
        from seedbed.track.code import version

        print(f"seedbed {version()}")
        return 0
    if options.help:
        from seedbed.cli.overview import help_text

        print(help_text())
        return 0
    if first == len(words):
        from seedbed.cli.overview import overview

        return overview(options.runs, options.json)
    name, rest = _verb_name(words[first:])
    if name not in VERBS:
        from seedbed.cli.overview import group_help

        return group_help(name)
    parser = parser_of(name)
    parser.set_defaults(runs=options.runs, json=options.json)
    if {"-h", "--help"} & set(rest):
        from seedbed.cli.keys import extend

        extend(parser, rest)
    return VERBS[name].act(parser.read(rest))


def place_of_verb(words: list[str]) -> int:
    """The number of leading options, and of the value of --runs."""
    places = (i for i, word in enumerate(words) if not word.startswith("-") and words[max(i - 1, 0)] != "--runs")
    return next(places, len(words))


def _verb_name(words: list[str]) -> tuple[str, list[str]]:
    """`runs list` is one verb of two words; `runs` alone means `runs list`."""
    first, rest = words[0], words[1:]
    if first not in GROUPS:
        return _known(first), rest
    if rest and not rest[0].startswith("-"):
        return _known(f"{first} {rest[0]}"), rest[1:]
    if GROUPS[first] and not {"-h", "--help"} & set(rest):
        return f"{first} {GROUPS[first]}", rest
    return first, rest


def _known(name: str) -> str:
    if name not in VERBS:
        from seedbed.cli.failures import refuse_verb

        refuse_verb(name)
    return name


def parser_of(name: str) -> Parser:
    found = VERBS[name]
    parser = Parser(prog=f"seedbed {name}", usage=f"seedbed {name} {found.usage}", description=found.about, allow_abbrev=False)
    for add in found.arguments:
        add(parser)
    _common(parser)
    return parser


def _common(parser: Parser) -> None:
    """Options of every verb; given before the verb they are its defaults."""
    here = Path(os.environ.get("SEEDBED_RUNS") or "runs").expanduser()
    parser.add_argument(
        "--runs", type=Path, default=here, metavar="DIR", help="the runs folder; default: $SEEDBED_RUNS or ./runs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for verbs that list something")
    parser.add_argument("--dirty", action="store_true", help="start with uncommitted changes in the git work tree")
