"""Verbs that measure a recipe or examine it: rates, batches, speed, plans; doctor, check, replay, overfit."""

import argparse
from pathlib import Path
from typing import Any

from seedbed.cli import queueing
from seedbed.cli.words import Parser, Verb, number, registrar, settings
from seedbed.errors import UserError

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)

# ---- instruments -----------------------------------------------------------------------------------------------------


def _find_lr_arguments(parser: Parser) -> None:
    settings(parser)
    parser.add_argument("--steps", type=number(int, 10), metavar="N", help="steps of each ramp")
    parser.add_argument("--repeats", type=number(int, 1), default=3, metavar="N", help="ramps on different data")
    parser.add_argument("--low", type=number(float, 0), metavar="LR", help="where the ramps begin")
    parser.add_argument("--high", type=number(float, 0), metavar="LR", help="where they end at the latest")


@verb("find-lr", "RECIPE/PRESET [key=value ...]", "suggest a learning rate", _find_lr_arguments)
def _find_lr(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    options = {"steps": given.steps, "repeats": given.repeats, "low": given.low, "high": given.high}
    return verbs.find_lr(given.name, given.settings, root=given.runs, json=given.json, **options)


def _find_batch_arguments(parser: Parser) -> None:
    settings(parser)
    parser.add_argument("--limit", type=number(float, 0), metavar="GIB", help="memory to stay below")
    parser.add_argument("--max", type=number(int, 1), dest="most", metavar="N", help="the largest batch to try")


@verb("find-batch", "RECIPE/PRESET [key=value ...]", "find the largest batch that fits", _find_batch_arguments)
def _find_batch(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    return verbs.find_batch(given.name, given.settings, root=given.runs, json=given.json, limit=given.limit, most=given.most)


def _profile_arguments(parser: Parser) -> None:
    settings(parser)
    parser.add_argument("--steps", type=number(int, 1), default=20, metavar="N", help="steps to look at")


@verb("profile", "RECIPE/PRESET [key=value ...]", "where the time of a step goes", _profile_arguments)
def _profile(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    return verbs.profile(given.name, given.settings, root=given.runs, json=given.json, steps=given.steps)


def _plan_arguments(parser: Parser) -> None:
    settings(parser)
    parser.add_argument("--run", metavar="RUN", help="take the speed that this run measured")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="your prices per GPU-hour, dated, as JSON")
    parser.add_argument("--world", type=number(int, 1, 65536), metavar="N", help="on N ranks; dist.shard=8 cuts each copy in 8")


@verb("plan", "RECIPE/PRESET [key=value ...]", "parameters, memory, hours and money", _plan_arguments)
def _plan(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    facts = {"run": given.run, "prices": given.prices, "world": given.world}
    return verbs.plan(given.name, given.settings, root=given.runs, json=given.json, **facts)


def _sweep_arguments(parser: Parser) -> None:
    settings(parser, needed=False)
    parser.add_argument(
        "--seeds", type=number(int, 0), metavar="N", help="train every setting with N seeds, from the config's on"
    )
    parser.add_argument(
        "--name", dest="sweep", metavar="NAME", help="the sweep's name; otherwise one that follows from the settings"
    )
    parser.add_argument("-m", "--why", default="", metavar="WHY", help="why this sweep: its report will tell")
    parser.add_argument("--patience", type=number(int, 0), default=0, metavar="N", help="end a trial after N evaluations in vain")
    parser.add_argument("--pack", type=number(int, 1), metavar="N", help="train at most N trials as one; otherwise what fits")
    parser.add_argument("--no-pack", action="store_true", help="train the trials one by one")
    parser.add_argument("--suggest", type=number(int, 1), metavar="N", help="N settings chosen one after the other, not a grid")
    parser.add_argument("--sampler", choices=("optuna", "random"), default="optuna", help="who chooses them")
    parser.add_argument("--no-check", action="store_true", help="start without the quick checks")
    parser.add_argument("--retry", action="store_true", help="try failed trials again")
    parser.add_argument("--join", metavar="NAME", help="work on a sweep that was started elsewhere")
    parser.add_argument("--show", metavar="NAME", help="print where a sweep stands")
    queueing.place_argument(parser)
    queueing.dry_argument(parser)


@verb(
    "sweep", "RECIPE/PRESET key=a,b,c key=1..4", "train a grid of settings, or suggested ones; --show, --join", _sweep_arguments
)
def _sweep(given: argparse.Namespace) -> int:
    from seedbed.tune.sweep import verbs

    if given.show:
        return verbs.show(given.runs, given.show, given.json)
    options = verbs.Options(
        root=given.runs,
        dirty=given.dirty,
        json=given.json,
        check=not given.no_check,
        most=1 if given.no_pack else given.pack,
        suggest=given.suggest,
        retry=given.retry,
    )
    if not given.name and not given.join:
        raise UserError("name a RECIPE/PRESET and what to vary, or a sweep with --show or --join; see: seedbed sweep --help")
    how = {"num_seeds": given.seeds, "patience": given.patience, "sampler": given.sampler}
    facts = {"name": given.sweep, "why": given.why, **how}
    if not queueing.stays_here(given):
        return queueing.sweep(given, options, facts)
    queueing.refuse_dry(given)
    if given.join:
        return verbs.join(given.join, options, _trials)
    return verbs.start(verbs.draft(given.name, given.settings, options, **facts), options, _trials)


def _trials() -> Any:
    from seedbed.launch import trials

    return trials


def _ablate_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RECIPE/PRESET")
    parser.add_argument(
        "axes", nargs="*", default=[], metavar="axis=a,b", help="what to vary; otherwise all that makes sense here"
    )
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="change the baseline itself; repeatable")
    parser.add_argument("--steps", type=number(int, 1), metavar="N", help="timed steps per visit; otherwise some seconds of them")
    parser.add_argument("--repeats", type=number(int, 1), default=3, metavar="N", help="visits per row, interleaved")
    parser.add_argument(
        "--name", dest="report", metavar="NAME", help="the report's name; otherwise one that follows from the rest"
    )


@verb("ablate", "RECIPE/PRESET [axis=a,b ...]", "what each switch buys, predicted and then measured", _ablate_arguments)
def _ablate(given: argparse.Namespace) -> int:
    from seedbed.tune.ablate import verbs

    options = {"settings": given.set, "steps": given.steps, "repeats": given.repeats, "report_name": given.report}
    return verbs.ablate(given.name, given.axes, root=given.runs, json=given.json, **options)


@verb(
    "doctor",
    "[RECIPE/PRESET [key=value ...]]",
    "examine this machine: what would spoil a run",
    lambda p: settings(p, needed=False),
)
def _doctor(given: argparse.Namespace) -> int:
    from seedbed.checks.doctor import doctor

    return doctor(given.name, given.settings, runs=given.runs, as_json=given.json, dirty=given.dirty)


# ---- why it is not learning ------------------------------------------------------------------------------------------


def _check_arguments(parser: Parser) -> None:
    settings(parser, "RECIPE/PRESET")
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
    parser.add_argument("step", nargs="?", type=number(int, 1), metavar="STEP", help="otherwise the last one that went wrong")


@verb("replay", "RUN [STEP]", "take a bad step again, bit for bit, and name its fault", _replay_arguments)
def _replay(given: argparse.Namespace) -> int:
    from seedbed.checks import replay_show

    return replay_show.replay(given.runs, given.name, given.step, given.json)


def _overfit_arguments(parser: Parser) -> None:
    settings(parser, "RECIPE/PRESET")
    parser.add_argument("--batches", type=number(int, 1), default=1, metavar="N", help="how many batches to learn by heart")
    parser.add_argument("--steps", type=number(int, 1), default=200, metavar="N", help="how many steps it may take")


@verb("overfit", "RECIPE/PRESET [key=value ...]", "learn a few fixed batches by heart, or say that it cannot", _overfit_arguments)
def _overfit(given: argparse.Namespace) -> int:
    from seedbed.checks import overfit

    size = {"num_batches": given.batches, "steps": given.steps}
    return overfit.overfit(given.name, given.settings, as_json=given.json, **size)
