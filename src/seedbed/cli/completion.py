"""Shell completion: candidates for the word at the cursor, and the scripts for bash, zsh and fish."""

import argparse
import itertools
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_origin

from seedbed.cli.parser import Parser, argument, verb
from seedbed.errors import UserError

# The line up to the cursor is passed in an environment variable, so that it is not parsed as arguments.
LINE = "SEEDBED_COMPLETE"

SCRIPTS = {file.suffix[1:]: file for file in sorted(Path(__file__).parent.glob("completion.*")) if file.suffix != ".py"}


@verb("completion", "bash|zsh|fish", "shell code for completion of verbs, runs, presets and keys")
@argument("shell")
def _completion(given: argparse.Namespace) -> int:
    if given.shell == "words":
        print("\n".join(candidates(os.environ.get(LINE, ""))))
        return 0
    if given.shell not in SCRIPTS:
        raise UserError(f"there is no completion for {given.shell}; there is for: {', '.join(SCRIPTS)}")
    print(SCRIPTS[given.shell].read_text(encoding="utf-8"), end="")
    return 0


def candidates(line: str) -> list[str]:
    """Candidates for the last word; none where the shell completes, as with files."""
    *before, word = _split(line)[1:] or [""]
    try:
        found = _after(before, word)
    except (UserError, OSError):
        found = []
    return sorted({one for one in found if one.startswith(word)})


def _split(line: str) -> list[str]:
    """Words of an incomplete line: a quote may be open, the last word may be empty."""
    for closing in ("", '"', "'"):
        try:
            words = shlex.split(line + closing)
            return [*words, ""] if line[-1:].isspace() and not closing else words
        except ValueError:
            continue
    return []


def _after(before: list[str], word: str) -> Iterable[str]:
    from seedbed.cli import GROUPS, place_of_verb
    from seedbed.cli import VERBS as KNOWN

    root, rest = _runs_folder(before), before[place_of_verb(before) :]
    if not rest:
        return ["--runs", "--help", "--version"] if word.startswith("-") else [name.partition(" ")[0] for name in KNOWN]
    if rest[0] in GROUPS and len(rest) == 1:
        return [name.partition(" ")[2] for name in KNOWN if name.startswith(f"{rest[0]} ")]
    two = " ".join(rest[:2])
    name = two if two in KNOWN else rest[0]
    return _of_verb(name, rest[1 + (name == two) :], word, root) if name in KNOWN else []


def _runs_folder(before: list[str]) -> Path:
    given = [after for word, after in itertools.pairwise(before) if word == "--runs"]
    return Path((given or [os.environ.get("SEEDBED_RUNS") or "runs"])[-1]).expanduser()


def _of_verb(name: str, typed: list[str], word: str, root: Path) -> Iterable[str]:
    from seedbed.cli import parser_of

    parser = parser_of(name)
    options = parser._option_string_actions
    if word.startswith("-"):
        return options
    last = options.get(typed[-1]) if typed else None
    places = _places(parser, typed)
    if last is not None and last.nargs != 0:
        return _values(last, word, places, root)
    actions = parser._get_positional_actions()
    if not actions:
        return []
    return _values(actions[min(len(places), len(actions) - 1)], word, places, root)


def _places(parser: Parser, typed: list[str]) -> list[str]:
    out, skip = [], False
    for word in typed:
        action = parser._option_string_actions.get(word)
        if not skip and action is None and not word.startswith("-"):
            out.append(word)
        skip = action is not None and action.nargs != 0
    return out


def _values(action: argparse.Action, word: str, places: list[str], root: Path) -> Iterable[str]:
    """Candidates for an argument, by its name in the help."""
    from seedbed.recipes import names
    from seedbed.recipes.catalogue import describe
    from seedbed.track.run_names import run_names

    if action.choices:
        return map(str, action.choices)
    metavar = str(action.metavar or action.dest)
    if metavar == "key=value":
        return _settings(places[0], word, root)
    if action.dest == "shell":
        return SCRIPTS
    if action.dest in ("mirror", "to"):
        from seedbed.report.mirrors.services import SINKS

        given, comma, _ = word.rpartition(",")
        return [f"{given}{comma}{name}" for name in SINKS]
    if action.dest == "checkpoint" and places:
        from seedbed.track.folders import step_names

        return step_names(root / places[0] / "checkpoints")
    found: list[str] = []
    if "RECIPE/PRESET" in metavar:
        found += [f"{name}/{preset}" for name in names() for preset in describe(name)]
        found += [str(path) for path in Path(".").glob("*.py")]
    if metavar.startswith("RUN") or "SWEEP" in metavar:
        found += run_names(root)
    if "SWEEP" in metavar or action.dest in ("show", "join"):
        found += run_names(root.absolute().parent / "sweeps")
    return found


def _settings(name: str, word: str, root: Path) -> list[str]:
    """Config keys of a preset or a run, or the values of a key."""
    from seedbed import config as configs
    from seedbed import recipes
    from seedbed.config import keys

    run = root / name / "config.json"
    if run.is_file():
        from seedbed.track import jsonl
        from seedbed.track.run import full_name

        facts = jsonl.read_object(run)
        name = full_name(str(facts["recipe"]), facts["preset"])
    if not name.endswith(".py") and ".py:" not in name:
        recipe, preset = recipes.find(name)
        config = recipe.preset(preset)
        key, equals, _ = word.partition("=")
        if not equals:
            return [f"{known}=" for known in configs.flatten(config)]
        return [f"{key}={value}" for value in _choices(keys.kind_of(config, key))]
    return []  # completion never executes a user's file


def _choices(kind: Any) -> list[str]:
    from typing import Literal

    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return ["true", "false"] if kind is bool else []
