"""The command line: verbs, their arguments, exit codes. What a verb needs is imported inside it, so listings answer at once."""

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from seedbed.errors import UserError

EXIT_BUG, EXIT_USER, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141

# Troubles of the disk that a person can mend; any other OSError is ours to explain.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


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
    act: Callable[[argparse.Namespace], int]


VERBS: dict[str, Verb] = {}
GROUPS = {"runs": "list", "data": None}
SECTIONS = {
    "demo": "train",
    "sample": "use",
    "find-lr": "measure",
    "doctor": "examine",
    "data prepare": "data",
    "runs list": "look back",
}


def verb(name: str, usage: str, about: str, arguments: Callable[[Parser], object] = lambda parser: None):
    def register(act: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
        VERBS[name] = Verb(usage, about, arguments, act)
        return act

    return register


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
    print("seedbed: " + text.replace("\n", "\n  "), file=sys.stderr)
    return EXIT_USER


def _explain_bug(error: Exception) -> int:
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
    parser = _parser(name)
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


def _parser(name: str) -> Parser:
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
    return "\n".join([*parts, "exit codes: 0 done, 2 something you can mend, 130 and 143 stopped by a signal, ready to resume"])


def _group_help(group: str) -> int:
    for name, found in VERBS.items():
        if name.startswith(f"{group} "):
            print(f"  seedbed {name} {found.usage}\n      {found.about}")
    return 0


def _overview(root: Path, as_json: bool) -> int:
    """What there is to train, and what was trained last."""
    from seedbed import recipes
    from seedbed.track import facts, listing
    from seedbed.track.text import clip, width

    known = {name: recipes.describe(name) for name in recipes.names()}
    found = facts.summaries(root)
    if as_json:
        return listing.print_json({"recipes": known, "runs": found})
    print("seedbed: raise generative models from scratch\n\nrecipes")
    longest = max((len(f"{n}/{p}") for n, presets in known.items() for p in presets), default=0)
    for name, presets in known.items():
        for preset, text in presets.items():
            print(clip(f"  {f'{name}/{preset}':<{longest}}  {text}", width()))
    print("  or a file of your own: seedbed train path/to/recipe.py")
    if found:
        print(f"\nlast runs ({len(found)} in {root})\n" + listing.runs_table(found[:5]))
    print("\ntry: seedbed demo · seedbed train RECIPE/PRESET steps=240 -m why · seedbed --help")
    return 0


def _number(kind: type, low: float, high: float = float("inf")) -> Callable[[str], Any]:
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


def _settings(parser: Parser, what: str = "RECIPE/PRESET", needed: bool = True) -> None:
    parser.takes_settings = True
    parser.add_argument("name", nargs=None if needed else "?", metavar=what)
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help="any config value, by its dotted name")


# ---- training --------------------------------------------------------------------------------------------------------


@verb("demo", "", "train a small GPT on this machine and show what it writes")
def _demo(given: argparse.Namespace) -> int:
    from seedbed.launch import local

    return local.demo(given.runs)


def _train_arguments(parser: Parser) -> None:
    _settings(parser, "RECIPE/PRESET")
    parser.add_argument("-m", "--why", default="", metavar="WHY", help="why this run: the journal will tell")
    parser.add_argument("--run", metavar="NAME", help="the run's name; otherwise date, recipe and two words")
    parser.add_argument("--parent", metavar="RUN", help="the run to compare with")
    parser.add_argument("--no-check", action="store_true", help="start without the quick checks; the journal will tell")
    parser.add_argument("--force", action="store_true", help="start although a check failed; the journal will tell")
    parser.add_argument("--anomaly", action="store_true", help="stop at the first NaN of a backward pass and name its line; slow")


@verb("train", "RECIPE/PRESET [key=value ...]", "start a run; -m says why, --run names it", _train_arguments)
def _train(given: argparse.Namespace) -> int:
    from seedbed.launch import local

    facts = {"run_name": given.run, "why": given.why, "dirty": given.dirty, "parent": given.parent}
    facts["check"] = "skip" if given.no_check else "force" if given.force else "quick"
    return local.train(given.name, given.settings, root=given.runs, anomaly=given.anomaly, **facts)


def _resume_arguments(parser: Parser) -> None:
    _settings(parser, "RUN")
    parser.add_argument("--force", action="store_true", help="also when the run says it is finished")


@verb("resume", "RUN [key=value ...]", "go on with a run, bit for bit", _resume_arguments)
def _resume(given: argparse.Namespace) -> int:
    from seedbed.launch import local

    return local.resume(given.runs, given.name, given.settings, force=given.force)


# ---- what a trained run can do ---------------------------------------------------------------------------------------

_SAMPLE_OPTIONS = ("prompt", "num", "tokens", "temperature", "top_k", "top_p", "seed")


def _sample_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("--prompt", metavar="TEXT", help="what the samples begin with")
    parser.add_argument("--num", type=_number(int, 1), metavar="N", help="how many samples")
    parser.add_argument("--tokens", type=_number(int, 1), metavar="N", help="how long each is")
    parser.add_argument("--temperature", type=_number(float, 0), metavar="T", help="0 always takes the likeliest")
    parser.add_argument("--top-k", type=_number(int, 1), metavar="K", help="choose among the K likeliest")
    parser.add_argument("--top-p", type=_number(float, 0, 1), metavar="P", help="choose among the likeliest that make up P")
    parser.add_argument("--seed", type=_number(int, 0), metavar="N", help="the same seed gives the same samples")
    parser.add_argument("--checkpoint", default="", metavar="STEP", help="such as step-000240; otherwise the best")
    parser.add_argument("--no-stream", action="store_true", help="print when all is done, not as it comes")


@verb("sample", "RUN [--prompt TEXT] [options]", "show what a run has learned", _sample_arguments)
def _sample(given: argparse.Namespace) -> int:
    from seedbed.launch import local

    options = {name: getattr(given, name) for name in _SAMPLE_OPTIONS if getattr(given, name) is not None}
    write = None if given.no_stream else _stream
    return local.sample(given.runs, given.name, options, checkpoint_name=given.checkpoint, write=write)


def _stream(text: str) -> None:
    from seedbed.track.text import safe

    print(safe(text), end="", flush=True)


def _export_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder; otherwise RUN-export")
    parser.add_argument("--checkpoint", default="", metavar="STEP", help="such as step-000240; otherwise the best")


@verb("export", "RUN [--out DIR] [--checkpoint STEP]", "write weights and config to use elsewhere", _export_arguments)
def _export(given: argparse.Namespace) -> int:
    from seedbed.launch import local

    out = given.out or Path(f"{Path(given.name).name}-export")
    return local.export(given.runs, given.name, out, given.checkpoint)


# ---- instruments -----------------------------------------------------------------------------------------------------


def _find_lr_arguments(parser: Parser) -> None:
    _settings(parser)
    parser.add_argument("--steps", type=_number(int, 10), metavar="N", help="steps of each ramp")
    parser.add_argument("--repeats", type=_number(int, 1), default=3, metavar="N", help="ramps on different data")
    parser.add_argument("--low", type=_number(float, 0), metavar="LR", help="where the ramps begin")
    parser.add_argument("--high", type=_number(float, 0), metavar="LR", help="where they end at the latest")


@verb("find-lr", "RECIPE/PRESET [key=value ...]", "suggest a learning rate", _find_lr_arguments)
def _find_lr(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    options = {"steps": given.steps, "repeats": given.repeats, "low": given.low, "high": given.high}
    return verbs.find_lr(given.name, given.settings, root=given.runs, json=given.json, **options)


def _find_batch_arguments(parser: Parser) -> None:
    _settings(parser)
    parser.add_argument("--limit", type=_number(float, 0), metavar="GIB", help="memory to stay below")
    parser.add_argument("--max", type=_number(int, 1), dest="most", metavar="N", help="the largest batch to try")


@verb("find-batch", "RECIPE/PRESET [key=value ...]", "find the largest batch that fits", _find_batch_arguments)
def _find_batch(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    return verbs.find_batch(given.name, given.settings, root=given.runs, json=given.json, limit=given.limit, most=given.most)


def _profile_arguments(parser: Parser) -> None:
    _settings(parser)
    parser.add_argument("--steps", type=_number(int, 1), default=20, metavar="N", help="steps to look at")


@verb("profile", "RECIPE/PRESET [key=value ...]", "where the time of a step goes", _profile_arguments)
def _profile(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    return verbs.profile(given.name, given.settings, root=given.runs, json=given.json, steps=given.steps)


def _plan_arguments(parser: Parser) -> None:
    _settings(parser)
    parser.add_argument("--run", metavar="RUN", help="take the speed that this run measured")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="your prices per GPU-hour, dated, as JSON")


@verb("plan", "RECIPE/PRESET [key=value ...]", "parameters, memory, hours and money", _plan_arguments)
def _plan(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    return verbs.plan(given.name, given.settings, root=given.runs, json=given.json, run=given.run, prices=given.prices)


@verb(
    "doctor",
    "[RECIPE/PRESET [key=value ...]]",
    "examine this machine: what would spoil a run",
    lambda p: _settings(p, needed=False),
)
def _doctor(given: argparse.Namespace) -> int:
    from seedbed.checks.doctor import doctor

    return doctor(given.name, given.settings, runs=given.runs, as_json=given.json, dirty=given.dirty)


# ---- why it is not learning ------------------------------------------------------------------------------------------


def _check_arguments(parser: Parser) -> None:
    _settings(parser, "RECIPE/PRESET")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="this check, or a letter for its group")
    parser.add_argument("--skip", action="append", default=[], metavar="ID", help="not this check, or group")
    parser.add_argument("--full", action="store_true", help="at full depth, width and length")


@verb("check", "RECIPE/PRESET [key=value ...]", "test data, model, loss and loop of a run before it is started", _check_arguments)
def _check(given: argparse.Namespace) -> int:
    from seedbed.checks import preflight

    chosen = {"only": given.only, "skip": given.skip, "full": given.full, "as_json": given.json}
    return preflight.check(given.name, given.settings, root=given.runs, **chosen)


def _replay_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("step", nargs="?", type=_number(int, 1), metavar="STEP", help="otherwise the last one that went wrong")


@verb("replay", "RUN [STEP]", "take a bad step again, bit for bit, and name its fault", _replay_arguments)
def _replay(given: argparse.Namespace) -> int:
    from seedbed.checks import replay_show

    return replay_show.replay(given.runs, given.name, given.step, given.json)


def _overfit_arguments(parser: Parser) -> None:
    _settings(parser, "RECIPE/PRESET")
    parser.add_argument("--batches", type=_number(int, 1), default=1, metavar="N", help="how many batches to learn by heart")
    parser.add_argument("--steps", type=_number(int, 1), default=200, metavar="N", help="how many steps it may take")


@verb("overfit", "RECIPE/PRESET [key=value ...]", "learn a few fixed batches by heart, or say that it cannot", _overfit_arguments)
def _overfit(given: argparse.Namespace) -> int:
    from seedbed.checks import overfit

    size = {"num_batches": given.batches, "steps": given.steps}
    return overfit.overfit(given.name, given.settings, as_json=given.json, **size)


# ---- data ------------------------------------------------------------------------------------------------------------


def _prepare_arguments(parser: Parser) -> None:
    parser.add_argument("path", metavar="TEXT", help="a file, a folder, reference, stdlib or hf:NAME")
    parser.add_argument("--tokenizer", default="char", metavar="KIND", help="char, char75, bpe or the path of a tokenizer.json")
    parser.add_argument("--vocab", type=_number(int, 257), default=4096, metavar="N", help="how many ids bpe learns")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the store goes; otherwise the cache")


@verb("data prepare", "TEXT [options]", "turn a text into tokens on disk", _prepare_arguments)
def _data_prepare(given: argparse.Namespace) -> int:
    from seedbed.data import verbs

    return verbs.prepare(given.path, tokenizer=given.tokenizer, vocab=given.vocab, out=given.out, json=given.json)


def _store_argument(parser: Parser) -> None:
    parser.add_argument("path", metavar="STORE", help="the folder that `data prepare` made; what reads it also takes a text")


@verb("data inspect", "STORE|RECIPE/PRESET", "decoded samples and statistics", _store_argument)
def _data_inspect(given: argparse.Namespace) -> int:
    from seedbed.data import verbs

    return verbs.inspect(given.path, json=given.json, open_recipe=_open_data)


def _open_data(name: str) -> Any:
    from seedbed import recipes

    recipe, preset = recipes.find(name)
    return recipe.open_data(recipe.preset(preset))


@verb("data verify", "STORE", "hash a store again, check splits and counts", _store_argument)
def _data_verify(given: argparse.Namespace) -> int:
    from seedbed.data import verbs

    return verbs.verify(given.path, json=given.json)


@verb("data bench", "STORE", "GB/s of the feed against plain copies", _store_argument)
def _data_bench(given: argparse.Namespace) -> int:
    from seedbed.data import verbs

    return verbs.bench(given.path, json=given.json)


def _data_show_arguments(parser: Parser) -> None:
    _settings(parser, "RECIPE/PRESET")
    parser.add_argument("--batch", type=_number(int, 0), default=0, metavar="N", help="which batch of the run")
    parser.add_argument("--num", type=_number(int, 1), default=4, metavar="N", help="how many rows to print")


@verb("data show", "RECIPE/PRESET [key=value ...]", "print and draw what the model really receives", _data_show_arguments)
def _data_show(given: argparse.Namespace) -> int:
    from seedbed.checks import data_show
    from seedbed.tune.bench import output_folder

    chosen = {"batch_number": given.batch, "num": given.num, "as_json": given.json}
    return data_show.show(given.name, given.settings, folder=output_folder(given.runs, "data-show", given.name), **chosen)


# ---- listings --------------------------------------------------------------------------------------------------------


@verb("runs list", "", "every run: status, step, loss, best, age, why")
def _runs_list(given: argparse.Namespace) -> int:
    from seedbed.track import listing

    return listing.list_runs(given.runs, given.json)


@verb(
    "runs show",
    "RUN",
    "config, status, last rows and events, how to repeat it",
    lambda p: p.add_argument("name", metavar="RUN"),
)
def _runs_show(given: argparse.Namespace) -> int:
    from seedbed.track import verbs

    return verbs.show(given.runs, given.name, given.json)


def _diff_arguments(parser: Parser) -> None:
    parser.add_argument("first", metavar="RUN")
    parser.add_argument("second", metavar="RUN")


@verb("runs diff", "RUN RUN", "which settings differ, and what came of it", _diff_arguments)
def _runs_diff(given: argparse.Namespace) -> int:
    from seedbed.track import verbs

    return verbs.diff_runs(given.runs, given.first, given.second, given.json)


def _rm_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", metavar="RUN")
    parser.add_argument("--yes", action="store_true", help="do not ask")


@verb("runs rm", "RUN ... [--yes]", "delete runs for good", _rm_arguments)
def _runs_rm(given: argparse.Namespace) -> int:
    from seedbed.track import verbs

    return verbs.remove(given.runs, given.names, given.yes)


def _note_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("words", nargs="+", metavar="TEXT")


@verb("note", "RUN TEXT", "add your conclusion to the run's journal entry", _note_arguments)
def _note(given: argparse.Namespace) -> int:
    from seedbed.track import verbs

    return verbs.note(given.runs, given.name, given.words)


@verb("journal", "[RUN]", "print the journal, or a run's entry", lambda p: p.add_argument("name", nargs="?", metavar="RUN"))
def _journal(given: argparse.Namespace) -> int:
    from seedbed.track import verbs

    return verbs.print_journal(given.runs, given.name, given.json)
