"""Verbs that continue or cancel a run."""

import argparse
import os

from seedbed.cli.parser import argument, on_argument, runs_here, settings, verb
from seedbed.cli.slurm import dry_argument, refuse_dry
from seedbed.cli.training import mirror_argument, mirrors_of, until_argument
from seedbed.cli.trusting import confirm, trust_argument


@verb("resume", "RUN [key=value ...]", "continue a run from its newest checkpoint, bit for bit")
@settings("RUN")
@argument("--force", action="store_true", help="also if the run is finished, or a check of a queued run fails")
@argument("--no-check", action="store_true", help="start a queued run without the quick checks")
@argument("--accept-edits", action="store_true", help="accept an edited config.json; recorded")
@until_argument
@on_argument
@dry_argument
@mirror_argument
@trust_argument
def _resume(given: argparse.Namespace) -> int:
    if given.accept_edits:
        from seedbed.track import edits
        from seedbed.track.run import Run
        from seedbed.track.text import safe

        if "RANK" not in os.environ:  # the process that started the ranks has done it
            what = edits.accept(Run.open(given.runs, given.name))
            print(f"accepted: {safe(what)}" if what else "nothing to accept: config.json and checkpoints are unchanged")
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

    mirrors = None if given.mirror is None else mirrors_of(given.mirror)
    check = "skip" if given.no_check else "force" if given.force else "quick"
    options = {"force": given.force, "check": check, "until": given.until, "mirrors": mirrors}
    return resume(given.runs, given.name, given.settings, **options)


@verb("cancel", "RUN|SWEEP", "cancel its Slurm job; it is saved first and can be resumed")
@argument("name", metavar="NAME", help="a run or a sweep that was submitted to Slurm")
def _cancel(given: argparse.Namespace) -> int:
    from seedbed.launch import slurm

    return slurm.cancel(given.runs, given.name)
