"""Verbs that train a run."""

import argparse
from collections.abc import Sequence
from typing import Any

from seedbed.cli.parser import (
    Parser,
    Verb,
    confirm,
    dry_argument,
    number,
    on_argument,
    refuse_dry,
    registrar,
    runs_here,
    settings,
    trust_argument,
)
from seedbed.errors import UserError

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)


@verb("demo", "", "train a small GPT on this machine and show what it writes")
def _demo(given: argparse.Namespace) -> int:
    from seedbed.launch.demo import demo

    return demo(given.runs)


def _train_arguments(parser: Parser) -> None:
    settings(parser, "RECIPE/PRESET")
    parser.add_argument("-m", "--why", default="", metavar="WHY", help="the reason for this run; shown in the journal")
    parser.add_argument("--run", metavar="NAME", help="the run's name; default: date, recipe and two words")
    parser.add_argument("--parent", metavar="RUN", help="the run to compare with")
    parser.add_argument("--no-check", action="store_true", help="skip the quick checks; recorded in the journal")
    parser.add_argument("--force", action="store_true", help="start even if a check fails; recorded in the journal")
    parser.add_argument(
        "--anomaly", action="store_true", help="stop at the first NaN in a backward pass and name its source line; slow"
    )
    _until_argument(parser)
    parser.add_argument("--dry", action="store_true", help="two steps with evaluation, sample, save and resume; keeps nothing")
    on_argument(parser)
    _mirror_argument(parser)


def _until_argument(parser: Parser) -> None:
    parser.add_argument(
        "--until", type=number(int, 1), default=0, metavar="STEP", help="save and stop at this step; resume continues"
    )


def _mirror_argument(parser: Parser) -> None:
    kinds = "wandb, tensorboard, trackio, mlflow; NAME+checkpoints also sends checkpoints; none"
    parser.add_argument("--mirror", metavar="NAME,...", help=f"copy the run to {kinds}")


@verb("train", "RECIPE/PRESET [key=value ...]", "train a new run; -m gives the reason, --run the name", _train_arguments)
def _train(given: argparse.Namespace) -> int:
    if not runs_here(given):
        from seedbed.cli import slurm

        return slurm.train(given)
    from seedbed import launch

    num_ranks = launch.to_train(given.name, given.settings)
    if given.dry:
        launch.refuse_ranks(num_ranks, "--dry")
        return _dry_run(given)
    if num_ranks:
        from seedbed.launch import spawn

        return spawn.start(num_ranks)
    from seedbed.launch import local

    facts = {"run_name": given.run, "why": given.why, "dirty": given.dirty, "parent": given.parent}
    facts["check"] = "skip" if given.no_check else "force" if given.force else "quick"
    facts["mirrors"] = _mirrors(given.mirror)
    return local.train(given.name, given.settings, root=given.runs, anomaly=given.anomaly, until=given.until, **facts)


def _mirrors(words: str | None) -> Sequence[Any]:
    if not words:
        return ()
    from seedbed.report.mirrors import choose

    return choose.read(words)


def _dry_run(given: argparse.Namespace) -> int:
    from seedbed.launch import dry

    for option in ("run", "parent", "why", "mirror"):
        if getattr(given, option):
            raise UserError(f"--dry keeps nothing, so --{option} has no effect; drop one of them")
    return dry.dry_run(given.name, given.settings)


def _resume_arguments(parser: Parser) -> None:
    settings(parser, "RUN")
    parser.add_argument("--force", action="store_true", help="also if the run is finished, or a check of a queued run fails")
    parser.add_argument("--no-check", action="store_true", help="start a queued run without the quick checks")
    parser.add_argument("--accept-edits", action="store_true", help="accept an edited config.json; recorded")
    _until_argument(parser)
    on_argument(parser)
    dry_argument(parser)
    _mirror_argument(parser)
    trust_argument(parser)


@verb("resume", "RUN [key=value ...]", "continue a run from its newest checkpoint, bit for bit", _resume_arguments)
def _resume(given: argparse.Namespace) -> int:
    if given.accept_edits:
        _accept_edits(given)
    confirm(given)
    if not runs_here(given):
        from seedbed.cli import slurm

        return slurm.resume(given)
    from seedbed.launch import spawn

    refuse_dry(given)
    num_ranks = spawn.to_resume(given.runs, given.name, given.settings)
    if num_ranks:
        return spawn.start(num_ranks)
    from seedbed.launch.resume import resume

    mirrors = None if given.mirror is None else _mirrors(given.mirror)
    check = "skip" if given.no_check else "force" if given.force else "quick"
    options = {"force": given.force, "check": check, "until": given.until, "mirrors": mirrors}
    return resume(given.runs, given.name, given.settings, **options)


def _accept_edits(given: argparse.Namespace) -> None:
    import os

    from seedbed.track import edits
    from seedbed.track.run import Run
    from seedbed.track.text import safe

    if "RANK" not in os.environ:  # the process that started the ranks has done it
        what = edits.accept(Run.open(given.runs, given.name))
        print(f"accepted: {safe(what)}" if what else "nothing to accept: config.json and checkpoints are unchanged")


def _cancel_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="a run or a sweep that was submitted to Slurm")


@verb("cancel", "RUN|SWEEP", "cancel its Slurm job; it is saved first and can be resumed", _cancel_arguments)
def _cancel(given: argparse.Namespace) -> int:
    from seedbed.launch import slurm

    return slurm.cancel(given.runs, given.name)
