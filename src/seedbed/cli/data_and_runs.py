"""The verbs `data ...`, `runs ...`, `note` and `journal`."""

import argparse
from pathlib import Path
from typing import Any

from seedbed.cli.parser import Parser, argument, declares, number, settings, verb
from seedbed.errors import UserError
from seedbed.recipes import catalogue, find


@declares
def _prepare_options_of_kinds(parser: Parser) -> None:
    for kind in catalogue.dataset_kinds().values():
        kind.add_prepare_arguments(parser)


@verb("data prepare", "TEXT|IMAGES|TAKE [options]", "text into tokens, images into pixels, a take into a recording")
@argument("path", metavar="TEXT", help="a file, a folder, reference, stdlib or hf:NAME; images with --size; a take")
@argument("--tokenizer", default="char", metavar="KIND", help="char, char75, bpe or the path of a tokenizer.json")
@argument("--vocab", type=number(int, 257), default=4096, metavar="N", help="vocabulary size of bpe")
@argument("--size", metavar="N|HxW", help="size of decoded images: N x N pixels, or HxW; of a take's frames: HxW (64x64)")
@argument("--out", type=Path, metavar="DIR", help="folder of the store; default: the cache")
@_prepare_options_of_kinds
def _data_prepare(given: argparse.Namespace) -> int:
    from seedbed.report import data_verbs as verbs

    for kind in catalogue.dataset_kinds().values():
        if kind.can_prepare(given.path):
            return kind.prepare(given)
        kind.check_unused(given)
    if given.size:
        return verbs.prepare_image_store(given.path, **_sides(given.size), out=given.out, json=given.json)
    return verbs.prepare(given.path, tokenizer=given.tokenizer, vocab=given.vocab, out=given.out, json=given.json)


def _sides(text: str) -> dict[str, int]:
    """The side of a square, or height and width."""
    try:
        return dict(zip(("size", "width"), [number(int, 4)(part) for part in text.lower().split("x", 1)], strict=False))
    except argparse.ArgumentTypeError as problem:
        raise UserError(f"--size: {problem}; images become squares of N pixels, or HxW, height first") from None


@verb("data record", "SIMULATOR [--frames N] [--size HxW]", "record frames and controls of a simulator")
@declares(lambda parser: catalogue.dataset_kinds()["recording"].add_record_arguments(parser))
@argument("--frames", type=number(int, 10), default=20_000, metavar="N", help="number of frames (20,000)")
@argument("--size", default="64x64", metavar="HxW", help="pixels, height first (64x64)")
@argument("--seed", type=number(int, 0, 2**31), default=1, metavar="N", help="seed of the world and of the controls (1)")
@argument("--out", type=Path, metavar="DIR", help="folder of the recording; default: the cache")
def _data_record(given: argparse.Namespace) -> int:
    return catalogue.dataset_kinds()["recording"].record(given)


_store_argument = argument("path", metavar="STORE", help="a folder made by `data prepare`, or a text")


@verb("data inspect", "STORE|RECIPE/PRESET", "decoded samples and statistics")
@_store_argument
def _data_inspect(given: argparse.Namespace) -> int:
    from seedbed.report import data_verbs as verbs

    for kind in catalogue.dataset_kinds().values():
        if kind.can_inspect(given.path):
            return kind.inspect(given)
    return verbs.inspect(given.path, json=given.json, open_recipe=_open_data)


def _open_data(name: str) -> Any:
    recipe, preset = find(name)
    return recipe.open_data(recipe.preset(preset))


@verb("data verify", "STORE", "verify checksums, splits and counts of a store")
@_store_argument
def _data_verify(given: argparse.Namespace) -> int:
    from seedbed.report import data_verbs as verbs

    return verbs.verify(given.path, json=given.json)


@verb("data bench", "STORE", "GB/s of the feed against plain copies")
@_store_argument
def _data_bench(given: argparse.Namespace) -> int:
    from seedbed.report import data_verbs as verbs

    return verbs.bench(given.path, json=given.json)


@verb("data show", "RECIPE/PRESET [key=value ...]", "print and draw a batch as the model receives it")
@settings()
@argument("--batch", type=number(int, 0), default=0, metavar="N", help="index of the batch")
@argument("--num", type=number(int, 1), default=4, metavar="N", help="number of rows to print")
def _data_show(given: argparse.Namespace) -> int:
    from seedbed.checks import data_show
    from seedbed.tune.workload import output_folder

    chosen = {"batch_number": given.batch, "num": given.num, "as_json": given.json}
    return data_show.show(given.name, given.settings, folder=output_folder(given.runs, "data-show", given.name), **chosen)


@verb("runs list", "", "all runs: status, step, loss, best, age, reason")
def _runs_list(given: argparse.Namespace) -> int:
    from seedbed.report import summaries

    return summaries.list_runs(given.runs, given.json)


@verb("runs show", "RUN [--model]", "config, status, last rows and events; --model: layers")
@argument("name", metavar="RUN")
@argument("--model", action="store_true", help="the layers with shapes, parameters and FLOP")
def _runs_show(given: argparse.Namespace) -> int:
    from seedbed.report import verbs

    return (verbs.show_model if given.model else verbs.show)(given.runs, given.name, given.json)


@verb("runs checkpoints", "RUN", "checkpoints of a run: step, loss, size, and the best")
@argument("name", metavar="RUN")
def _runs_checkpoints(given: argparse.Namespace) -> int:
    from seedbed.report import summaries

    return summaries.list_checkpoints(given.runs, given.name, given.json)


@verb("runs diff", "RUN RUN", "settings and results that differ")
@argument("first", metavar="RUN")
@argument("second", metavar="RUN")
def _runs_diff(given: argparse.Namespace) -> int:
    from seedbed.report import verbs

    return verbs.diff_runs(given.runs, given.first, given.second, given.json)


@verb("runs rm", "RUN ... [--yes]", "delete runs permanently")
@argument("names", nargs="+", metavar="RUN")
@argument("--yes", action="store_true", help="do not ask for confirmation")
def _runs_rm(given: argparse.Namespace) -> int:
    from seedbed.report import verbs

    return verbs.remove(given.runs, given.names, given.yes)


@verb("note", "RUN TEXT", "add your conclusion to the run's journal entry")
@argument("name", metavar="RUN")
@argument("words", nargs="+", metavar="TEXT")
def _note(given: argparse.Namespace) -> int:
    from seedbed.report import notes

    print(f"noted in {notes.note(given.runs, given.name, ' '.join(given.words))}")
    return 0


@verb("journal", "[RUN] [--week]", "print the journal, a run's entry, or the last seven days")
@argument("name", nargs="?", metavar="RUN")
@argument("--week", action="store_true", help="results of the last seven days and open entries")
def _journal(given: argparse.Namespace) -> int:
    from seedbed.report import notes, verbs

    if given.week:
        if given.name:
            raise UserError("--week covers all runs; drop it or the name")
        return notes.print_week(given.runs, given.json)
    return verbs.print_journal(given.runs, given.name, given.json)
