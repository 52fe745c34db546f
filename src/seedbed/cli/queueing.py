"""`--on slurm`: what train, resume and sweep do when the work goes to a cluster."""

import argparse
from typing import Any

from seedbed.cli.words import Parser
from seedbed.errors import UserError


def place_argument(parser: Parser) -> None:
    parser.add_argument("--on", choices=("slurm",), help="hand it to a cluster; slurm.time=4h, slurm.partition=... as settings")


def dry_argument(parser: Parser) -> None:
    parser.add_argument("--dry", action="store_true", help="with --on slurm: print script and command, submit nothing")


def stays_here(given: argparse.Namespace) -> bool:
    """Whether the work is for this machine; words that only a cluster understands are refused then."""
    if given.on:
        return False
    stray = next((word for word in given.settings if word.startswith("slurm.")), None)
    if stray:
        raise UserError(f"{stray} is for a job of a cluster; add --on slurm")
    return True


def refuse_dry(given: argparse.Namespace) -> None:
    if given.dry:
        raise UserError("--dry goes with --on slurm here; seedbed train RECIPE/PRESET --dry rehearses on this machine")


def train(given: argparse.Namespace) -> int:
    from seedbed.launch import slurm

    if given.anomaly:
        raise UserError("--anomaly is for a run on this machine; drop it, or --on slurm")
    facts = {"run_name": given.run, "why": given.why, "parent": given.parent}
    return slurm.train(given.name, given.settings, _how(given, _run_flags(given)), **facts)


def resume(given: argparse.Namespace) -> int:
    from seedbed.launch import local, slurm
    from seedbed.track.run import Run

    run = Run.open(given.runs, given.name)
    own = [word for word in given.settings if not word.startswith("slurm.")]
    recipe, _, config = local.may_resume(run, own, given.force)
    return slurm.resume(run, recipe, config, given.settings, _how(given, _run_flags(given)))


def sweep(given: argparse.Namespace, options: Any, facts: dict[str, Any]) -> int:
    from seedbed.launch import slurm, slurm_script
    from seedbed.tune.sweep import verbs
    from seedbed.tune.sweep.folder import Sweep

    ask, own = slurm_script.read(given.settings)
    how = _how(given, _sweep_flags(given))
    if given.join:
        found = Sweep.open(given.runs, given.join)
        return slurm.sweep(slurm.crew_of(found, given.retry), ask, how, lambda: found)
    made = verbs.draft(given.name, own, options, **facts)
    return slurm.sweep(slurm.Crew(made.name, made.num_trials, made.recipe, made.config), ask, how, lambda: made.write(given.runs))


def _how(given: argparse.Namespace, flags: list[str]) -> Any:
    from seedbed.launch import slurm

    words = {"dry": given.dry, "json": given.json, "dirty": given.dirty}
    return slurm.How(root=given.runs, **words, retry=getattr(given, "retry", False), flags=tuple(flags))


def _run_flags(given: argparse.Namespace) -> list[str]:
    from seedbed.track.mirrors import choose

    choose.read(given.mirror or "")
    mirror = [] if given.mirror is None else ["--mirror", given.mirror]
    return [*(f"--{name.replace('_', '-')}" for name in ("no_check", "force") if getattr(given, name)), *mirror]


def _sweep_flags(given: argparse.Namespace) -> list[str]:
    flags = [f"--{name.replace('_', '-')}" for name in ("no_check", "no_pack") if getattr(given, name)]
    return [*flags, *(["--pack", str(given.pack)] if given.pack else [])]
