"""Verbs that train a run."""

import argparse
from collections.abc import Sequence
from typing import Any

from seedbed.cli.parser import argument, number, on_argument, runs_here, settings, verb


@verb("demo", "", "train a small GPT on this machine and show what it writes")
def _demo(given: argparse.Namespace) -> int:
    from seedbed.launch.demo import demo

    return demo(given.runs)


_UNTIL = "save and stop at this step; resume continues"
until_argument = argument("--until", type=number(int, 1), default=0, metavar="STEP", help=_UNTIL)
_MIRRORS = "wandb, tensorboard, trackio, mlflow; NAME+checkpoints also sends checkpoints; none"
mirror_argument = argument("--mirror", metavar="NAME,...", help=f"copy the run to {_MIRRORS}")


@verb("train", "RECIPE/PRESET [key=value ...]", "train a new run; -m gives the reason, --name the name")
@settings()
@argument("-m", "--why", default="", metavar="WHY", help="the reason for this run; shown in the journal")
@argument("--name", "--run", dest="run", metavar="NAME", help="the run's name; default: date, recipe and two words")
@argument("--parent", metavar="RUN", help="the run to compare with")
@argument("--no-check", action="store_true", help="skip the quick checks; recorded in the journal")
@argument("--force", action="store_true", help="start even if a check fails; recorded in the journal")
@argument("--anomaly", action="store_true", help="stop at the first NaN in a backward pass and name its source line; slow")
@until_argument
@argument("--dry", action="store_true", help="two steps with evaluation, sample, save and resume; keeps nothing")
@argument("-v", "--verbose", action="store_true", help="print every setting, and all facts of data and model, before step 0")
@on_argument
@mirror_argument
def _train(given: argparse.Namespace) -> int:
    if not runs_here(given):
        from seedbed.cli import slurm

        return slurm.train(given)
    from seedbed import launch

    num_ranks = launch.to_train(given.name, given.settings)
    if given.dry:
        from seedbed.launch import dry

        facts = {"name": given.run, "parent": given.parent, "why": given.why, "mirror": given.mirror}
        kept = [option for option, value in facts.items() if value]
        return dry.dry_run(given.name, given.settings, kept, num_ranks)
    if num_ranks:
        from seedbed.launch import spawn

        return spawn.start(num_ranks)
    from seedbed.launch import local

    facts = {"run_name": given.run, "why": given.why, "dirty": given.dirty, "parent": given.parent}
    facts["check"] = "skip" if given.no_check else "force" if given.force else "quick"
    facts |= {"mirrors": mirrors_of(given.mirror), "verbose": given.verbose}
    return local.train(given.name, given.settings, root=given.runs, anomaly=given.anomaly, until=given.until, **facts)


def mirrors_of(words: str | None) -> Sequence[Any]:
    if not words:
        return ()
    from seedbed.report.mirrors import choose

    return choose.read(words)
