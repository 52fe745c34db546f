"""Verbs on data, and those that look back on runs."""

import argparse
from pathlib import Path
from typing import Any

from seedbed.cli.words import Parser, Verb, number, registrar, settings
from seedbed.errors import UserError

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)

# ---- data ------------------------------------------------------------------------------------------------------------


def _prepare_arguments(parser: Parser) -> None:
    parser.add_argument("path", metavar="TEXT", help="a file, a folder, reference, stdlib or hf:NAME; images with --size; a take")
    parser.add_argument("--tokenizer", default="char", metavar="KIND", help="char, char75, bpe or the path of a tokenizer.json")
    parser.add_argument("--vocab", type=number(int, 257), default=4096, metavar="N", help="how many ids bpe learns")
    parser.add_argument("--size", metavar="N|HxW", help="decode images, to squares of N pixels; frames of a take, to HxW (64x64)")
    parser.add_argument(
        "--shift-actions", type=number(int, -64, 64), default=0, metavar="N", help="action[t] becomes action[t+N]"
    )
    parser.add_argument(
        "--flip", action="append", default=[], metavar="AXIS", help="change the sign of a control; may be repeated"
    )
    parser.add_argument("--accept-lag", action="store_true", help="keep a take although its controls look shifted or reversed")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the store goes; otherwise the cache")


@verb(
    "data prepare",
    "TEXT|IMAGES|TAKE [options]",
    "text into tokens, images into pixels, a take into a recording",
    _prepare_arguments,
)
def _data_prepare(given: argparse.Namespace) -> int:
    from seedbed.data import verbs
    from seedbed.data.recordings import importing
    from seedbed.data.recordings import verbs as recording_verbs

    if importing.is_importable(given.path):
        mending = {"shift": given.shift_actions, "flip": given.flip, "accept": given.accept_lag}
        return recording_verbs.prepare(given.path, size=given.size, **mending, out=given.out, json=given.json)
    if given.shift_actions or given.flip or given.accept_lag:
        raise UserError(f"{given.path} has no controls to mend: --shift-actions, --flip and --accept-lag are for takes")
    if given.size:
        return verbs.prepare_pictures(given.path, size=_side(given.size), out=given.out, json=given.json)
    return verbs.prepare(given.path, tokenizer=given.tokenizer, vocab=given.vocab, out=given.out, json=given.json)


def _side(text: str) -> int:
    try:
        return number(int, 4)(text)
    except argparse.ArgumentTypeError as problem:
        raise UserError(f"--size: {problem}; images become squares of N pixels") from None


def _record_arguments(parser: Parser) -> None:
    parser.add_argument("source", metavar="SIMULATOR", help="box, doom, atari:NAME or gym:ID")
    parser.add_argument("--frames", type=number(int, 10), default=20_000, metavar="N", help="how many frames (20,000)")
    parser.add_argument("--size", default="64x64", metavar="HxW", help="pixels, height first (64x64)")
    parser.add_argument("--seed", type=number(int, 0, 2**31), default=1, metavar="N", help="which world, and which walks (1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the recording goes; otherwise the cache")


@verb(
    "data record",
    "SIMULATOR [--frames N] [--size HxW]",
    "play a simulator by itself, keep frames and controls",
    _record_arguments,
)
def _data_record(given: argparse.Namespace) -> int:
    from seedbed.data.recordings import verbs

    chosen = {"frames": given.frames, "size": given.size, "seed": given.seed, "out": given.out, "json": given.json}
    return verbs.record(given.source, **chosen)


def _store_argument(parser: Parser) -> None:
    parser.add_argument("path", metavar="STORE", help="the folder that `data prepare` made; what reads it also takes a text")


@verb("data inspect", "STORE|RECIPE/PRESET", "decoded samples and statistics", _store_argument)
def _data_inspect(given: argparse.Namespace) -> int:
    from seedbed.data import verbs
    from seedbed.data.recording import is_recording

    if is_recording(Path(given.path).expanduser()):
        from seedbed.data.recordings import verbs as recording_verbs

        return recording_verbs.inspect(given.path, json=given.json)
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
    settings(parser, "RECIPE/PRESET")
    parser.add_argument("--batch", type=number(int, 0), default=0, metavar="N", help="which batch of the run")
    parser.add_argument("--num", type=number(int, 1), default=4, metavar="N", help="how many rows to print")


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


def _show_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("--model", action="store_true", help="the layers with shapes, parameters and FLOP")


@verb("runs show", "RUN [--model]", "config, status, last rows and events, how to repeat it; its layers", _show_arguments)
def _runs_show(given: argparse.Namespace) -> int:
    from seedbed.track import verbs

    return (verbs.show_model if given.model else verbs.show)(given.runs, given.name, given.json)


@verb(
    "runs checkpoints",
    "RUN",
    "its checkpoints: steps, losses, sizes, and the best",
    lambda p: p.add_argument("name", metavar="RUN"),
)
def _runs_checkpoints(given: argparse.Namespace) -> int:
    from seedbed.track import checkpoints

    return checkpoints.list_checkpoints(given.runs, given.name, given.json)


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


def _journal_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN")
    parser.add_argument("--week", action="store_true", help="what the last seven days taught, and what is still open")


@verb("journal", "[RUN] [--week]", "print the journal, a run's entry, or what the week taught", _journal_arguments)
def _journal(given: argparse.Namespace) -> int:
    from seedbed.track import verbs, week

    if given.week:
        if given.name:
            raise UserError("--week tells of all runs; drop it or the name")
        return week.print_week(given.runs, given.json)
    return verbs.print_journal(given.runs, given.name, given.json)
