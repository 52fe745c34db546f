"""The command line: verbs, their arguments, exit codes. What a verb needs is imported inside it, so listings answer at once."""

import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from seedbed.cli import completing, drilling, looking, measuring, serving, sharing, training
from seedbed.cli.words import Parser
from seedbed.errors import UserError

EXIT_BUG, EXIT_USER, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141

# Troubles of the disk that a person can mend; any other OSError is ours to explain.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}

_PARTS = (training, measuring, drilling, looking, sharing, serving, completing)
VERBS = {name: found for part in _PARTS for name, found in part.VERBS.items()}
GROUPS = {"runs": "list", "data": None}
SECTIONS = {
    "demo": "train",
    "sample": "use",
    "find-lr": "measure",
    "doctor": "examine",
    "data prepare": "data",
    "runs list": "look back",
    "top": "watch and share",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it went well, 2 when the user can mend it, 130 and 143 after a signal, 1 for our bugs."""
    # Threads that spin while they wait make a shared machine many times slower; must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = dispatch(list(sys.argv[1:] if words is None else words))
        sys.stdout.flush()
        return status
    except UserError as problem:
        return _complain(str(problem))
    except BrokenPipeError:
        # Whoever read our output has enough; a second complaint at exit would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        print("seedbed: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK:
            return _complain(f"{error.strerror}: {error.filename or 'while writing'}")
        return _explain_bug(error)


def _complain(text: str) -> int:
    print(f"seedbed: {_rank()}" + text.replace("\n", "\n  "), file=sys.stderr)
    return EXIT_USER


def _rank() -> str:
    """Which of several processes speaks. What all find wrong, the first one tells: the others are ended before they do."""
    rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"
    if rank == "0":
        return ""
    import time

    time.sleep(2.0)
    return f"rank {rank}: "


def _has_lost_a_rank(error: Exception) -> bool:
    """Whether another process is gone in the middle of talking to it."""
    words = ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "Connection refused")
    return "WORLD_SIZE" in os.environ and any(word in f"{type(error).__name__} {error}" for word in words)


def _explain_bug(error: Exception) -> int:
    if _has_lost_a_rank(error):
        return _complain("another rank has stopped, and this one cannot go on alone; its own line tells why")
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
    return EXIT_BUG


def dispatch(words: list[str]) -> int:
    """Find the verb behind the leading options, read its arguments, act."""
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
    """What every verb takes; the values come from the words before the verb unless they are given again."""
    here = Path(os.environ.get("SEEDBED_RUNS") or "runs").expanduser()
    parser.add_argument("--runs", type=Path, default=here, metavar="DIR", help="where the runs are: ./runs or $SEEDBED_RUNS")
    parser.add_argument("--json", action="store_true", help="print JSON, where there is something to list")
    parser.add_argument("--dirty", action="store_true", help="start although the git work tree has uncommitted changes")


def _help() -> str:
    parts = ["usage: seedbed [--runs DIR] VERB ...", "", "`seedbed` alone lists the recipes, their presets and the last runs."]
    for name, found in VERBS.items():
        if name in SECTIONS:
            parts += ["", SECTIONS[name]]
        parts.append(f"  {f'{name} {found.usage}':<44} {found.about}")
    parts += ["", "every verb takes --help, --runs DIR and --dirty; what lists something takes --json; seedbed --version"]
    codes = "0 done, 2 something you can mend; ready to resume: 130, 138 and 143 after a signal, 75 after a standstill"
    return "\n".join([*parts, f"exit codes: {codes}"])


def _group_help(group: str) -> int:
    for name, found in VERBS.items():
        if name.startswith(f"{group} "):
            print(f"  seedbed {name} {found.usage}\n      {found.about}")
    return 0


def _overview(root: Path, as_json: bool) -> int:
    """What there is to train, and what was trained last."""
    from seedbed import recipes
    from seedbed.track import listing
    from seedbed.track.text import clip, width

    known = {name: recipes.describe(name) for name in recipes.names()}
    found = listing.look(root)
    if as_json:
        return listing.print_json({"recipes": known, "runs": found})
    print("seedbed: raise generative models from scratch\n\nrecipes")
    longest = max((len(f"{n}/{p}") for n, presets in known.items() for p in presets), default=0)
    for name, presets in known.items():
        for preset, text in presets.items():
            print(clip(f"  {f'{name}/{preset}':<{longest}}  {text}", width()))
    print("  or a file of your own: seedbed train path/to/recipe.py")
    if found:
        print(f"\nlast runs ({len(found)} in {root})\n" + listing.runs_table(listing.folded(found)[:5]))
    print("\ntry: seedbed demo · seedbed train RECIPE/PRESET steps=240 -m why · seedbed --help")
    return 0
