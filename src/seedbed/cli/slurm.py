"""`--on slurm`: train, resume and sweep as jobs of a cluster."""

import argparse
from typing import Any

from seedbed.cli.parser import argument
from seedbed.errors import UserError


def train(given: argparse.Namespace) -> int:
    from seedbed.launch import slurm

    if given.anomaly:
        raise UserError("--anomaly is for a run on this machine; drop it, or --on slurm")
    facts = {"run_name": given.run, "why": given.why, "parent": given.parent}
    return slurm.train(given.name, given.settings, _submit_options(given), **facts)


def resume(given: argparse.Namespace) -> int:
    from seedbed.launch import slurm
    from seedbed.launch.resume import config_to_resume
    from seedbed.track.run import Run

    run = Run.open(given.runs, given.name)
    own = [word for word in given.settings if not word.startswith("slurm.")]
    recipe, _, config = config_to_resume(run, own, given.force)
    return slurm.resume(run, recipe, config, given.settings, _submit_options(given))


def sweep(given: argparse.Namespace, options: Any, facts: dict[str, Any]) -> int:
    from seedbed.launch import slurm, slurm_script
    from seedbed.tune.sweep import verbs
    from seedbed.tune.sweep.folder import Sweep

    resources, own = slurm_script.read(given.settings)
    submit = _submit_options(given)
    if given.join:
        found = Sweep.open(given.runs, given.join)
        return slurm.sweep(slurm.sweep_job_of(found, given.retry), resources, submit, lambda: found)
    made = verbs.draft(given.name, own, options, **facts)
    if not given.dry:
        made.remember()
    return slurm.sweep(
        slurm.SweepJob(made.name, made.num_trials, made.recipe, made.config), resources, submit, lambda: made.write(given.runs)
    )


def _submit_options(given: argparse.Namespace) -> Any:
    from seedbed.launch import slurm
    from seedbed.report.mirrors import choose

    options = vars(given)
    choose.read(options.get("mirror") or "")
    flags: list[str] = []  # of the command inside the job
    for name in ("no_check", "force", "no_pack", "pack", "until", "mirror"):
        if (value := options.get(name)) not in (None, False, 0):
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    words = {"dry": given.dry, "json": given.json, "dirty": given.dirty}
    return slurm.SubmitOptions(root=given.runs, **words, retry=options.get("retry", False), flags=tuple(flags))


dry_argument = argument("--dry", action="store_true", help="with --on slurm: print script and command, submit nothing")


def refuse_dry(given: argparse.Namespace) -> None:
    if given.dry:
        raise UserError("--dry needs --on slurm here; on this machine: seedbed train RECIPE/PRESET --dry")
