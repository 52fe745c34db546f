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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from seedbed.cli.parser import Parser, Verb
from seedbed.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_USER, UserError
from seedbed.track import clocks

# Disk errors that the user can fix; any other OSError is a bug.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}

# The verbs of each module, in the order of `seedbed --help`.
_MODULES = {
    "training": ("demo", "train", "resume", "cancel"),
    "using": ("sample", "inference-curve", "play", "export"),
    "measuring": ("find-lr", "find-batch", "profile", "plan", "sweep", "ablate", "doctor", "check", "replay", "overfit"),
    "drilling": ("drill",),
    "data_and_runs": (
        *("data prepare", "data record", "data inspect", "data verify", "data bench", "data show", "runs list", "runs show"),
        *("runs checkpoints", "runs diff", "runs rm", "note", "journal"),
    ),
    "reporting": ("top", "watch", "report", "runs export", "runs mirror"),
    "serving": ("serve",),
    "completion": ("completion",),
}


class _Verbs(Mapping[str, Verb]):
    """All verbs by name. The module of a verb is imported on first access, so that a command loads only its own."""

    def __init__(self) -> None:
        self._modules = {name: module for module, names in _MODULES.items() for name in names}

    def __getitem__(self, name: str) -> Verb:
        return importlib.import_module(f"seedbed.cli.{self._modules[name]}").VERBS[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


VERBS = _Verbs()
GROUPS = {"runs": "list", "data": None}
RENAMED = {"think": "inference-curve"}
SECTIONS = {
    "demo": "train",
    "sample": "use",
    "find-lr": "measure",
    "doctor": "examine",
    "data prepare": "data",
    "runs list": "inspect runs",
    "top": "watch and share",
}


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
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
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
        return _print_error(str(problem))
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
        if isinstance(error, OSError) and error.errno in _DISK:
            return _print_error(f"{error.strerror}: {error.filename or 'while writing'}")
        return _explain_bug(error)


def _flush() -> None:
    """Flush standard output; a closed terminal is no error of the command."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(text: str) -> int:
    print(f"seedbed: {_rank()}" + text.replace("\n", "\n  "), file=sys.stderr)
    return EXIT_USER


def _rank() -> str:
    """Prefix with the rank; other ranks wait, since the primary one reports common errors first and ends them."""
    rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"
    if rank == "0":
        return ""
    import time

    time.sleep(2.0)
    return f"rank {rank}: "


def _has_lost_a_rank(error: Exception) -> bool:
    """Whether the connection to another rank was lost."""
    words = ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "Connection refused")
    return "WORLD_SIZE" in os.environ and any(word in f"{type(error).__name__} {error}" for word in words)


def _explain_bug(error: Exception) -> int:
    if _has_lost_a_rank(error):
        return _print_error("another rank has stopped, so this one stops too; see the error of that rank")
    import traceback

    from seedbed import recipes
    from seedbed.track.code import version

    traceback.print_exception(error)
    place = recipes.place_in_user_file(error)
    if place:
        print(f"seedbed: the error above was raised by your recipe, {place}", file=sys.stderr)
    else:
        text = f"seedbed: this is a bug in seedbed {version()}; please report it with the command and the lines above"
        print(text, file=sys.stderr)
    return EXIT_FAILED


def dispatch(words: list[str]) -> int:
    """Find the verb after the leading options, parse its arguments and run it."""
    lead = Parser(prog="seedbed", add_help=False, allow_abbrev=False)
    lead.add_argument("-h", "--help", action="store_true")
    lead.add_argument("--version", action="store_true")
    _common(lead)
    first = next((i for i, word in enumerate(words) if _is_verb_word(words, i)), len(words))
    options = lead.read(words[:first])
    if options.version:
        from seedbed.track.code import version

        print(f"seedbed {version()}")
        return 0
    if options.help:
        print(_help())
        return 0
    if first == len(words):
        return _overview(options.runs, options.json)
    name, rest = _verb_name(words[first:])
    if name not in VERBS:
        return _group_help(name)
    parser = parser_of(name)
    parser.set_defaults(runs=options.runs, json=options.json)
    return VERBS[name].act(parser.read(rest))


def _is_verb_word(words: list[str], index: int) -> bool:
    return not words[index].startswith("-") and (index == 0 or words[index - 1] != "--runs")


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
    if name in VERBS:
        return name
    if name in RENAMED:
        raise UserError(f"`{name}` is now: seedbed {RENAMED[name]}")
    if "/" in name or name.endswith(".py"):
        raise UserError(f"there is no verb `{name}`; to train that recipe: seedbed train {name}")
    import difflib

    near = difflib.get_close_matches(name, [*VERBS, *GROUPS], 1, 0.5)
    hint = f"did you mean: seedbed {near[0]}" if near else "seedbed --help lists them"
    raise UserError(f"there is no verb `{name}`; {hint}")


def parser_of(name: str) -> Parser:
    """The parser of one verb."""
    found = VERBS[name]
    parser = Parser(prog=f"seedbed {name}", usage=f"seedbed {name} {found.usage}", description=found.about, allow_abbrev=False)
    found.arguments(parser)
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


def _help() -> str:
    parts = ["usage: seedbed [--runs DIR] VERB ...", "", "`seedbed` alone lists the recipes, their presets and the last runs."]
    for name, found in VERBS.items():
        if name in SECTIONS:
            parts += ["", SECTIONS[name]]
        parts.append(f"  {f'{name} {found.usage}':<44} {found.about}")
    parts += [
        "",
        "every verb takes --help, --runs DIR and --dirty; verbs that list something take --json; see also seedbed --version",
    ]
    codes = "0 done, 1 failed, 2 wrong input; resumable: 129, 130, 138, 143 after a signal, 75 when stalled"
    return "\n".join([*parts, f"exit codes: {codes}"])


def _group_help(group: str) -> int:
    for name, found in VERBS.items():
        if name.startswith(f"{group} "):
            print(f"  seedbed {name} {found.usage}\n      {found.about}")
    return 0


def _overview(root: Path, as_json: bool) -> int:
    """List recipes, presets and the last runs."""
    from seedbed import recipes
    from seedbed.report import listing
    from seedbed.track import jsonl
    from seedbed.track.text import clip, width

    known = {name: recipes.describe(name) for name in recipes.names()}
    found = listing.summaries(root)
    if as_json:
        return jsonl.print_json({"recipes": known, "runs": found})
    print("seedbed: train generative models from scratch\n\nrecipes")
    longest = max((len(f"{n}/{p}") for n, presets in known.items() for p in presets), default=0)
    for name, presets in known.items():
        for preset, text in presets.items():
            print(clip(f"  {f'{name}/{preset}':<{longest}}  {text}", width()))
    print("  or your own file: seedbed train path/to/recipe.py")
    if found:
        print(f"\nlast runs ({len(found)} in {root})\n" + listing.runs_table(listing.folded(found)[:5]))
    print("\ntry: seedbed demo · seedbed train RECIPE/PRESET steps=240 -m why · seedbed --help")
    return 0
