"""Verbs that train a run."""

import argparse
from collections.abc import Sequence
from typing import Any

from seedbed.cli.parser import Parser, Verb, number, on_argument, registrar, runs_here, settings

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
    until_argument(parser)
    parser.add_argument("--dry", action="store_true", help="two steps with evaluation, sample, save and resume; keeps nothing")
    on_argument(parser)
    mirror_argument(parser)


def until_argument(parser: Parser) -> None:
    parser.add_argument(
        "--until", type=number(int, 1), default=0, metavar="STEP", help="save and stop at this step; resume continues"
    )


def mirror_argument(parser: Parser) -> None:
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
        from seedbed.cli.dry import dry_run

        return dry_run(given, num_ranks)
    if num_ranks:
        from seedbed.launch import spawn

        return spawn.start(num_ranks)
    from seedbed.launch import local

    facts = {"run_name": given.run, "why": given.why, "dirty": given.dirty, "parent": given.parent}
    facts["check"] = "skip" if given.no_check else "force" if given.force else "quick"
    facts["mirrors"] = mirrors_of(given.mirror)
    return local.train(given.name, given.settings, root=given.runs, anomaly=given.anomaly, until=given.until, **facts)


def mirrors_of(words: str | None) -> Sequence[Any]:
    if not words:
        return ()
    from seedbed.report.mirrors import choose

    return choose.read(words)
