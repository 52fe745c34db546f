"""Verbs that measure a recipe or examine it: rates, batches, speed, plans; doctor, check, replay, overfit."""

import argparse
from pathlib import Path

from seedbed.cli.words import Parser, Verb, number, registrar, settings

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


@verb("plan", "RECIPE/PRESET [key=value ...]", "parameters, memory, hours and money", _plan_arguments)
def _plan(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    return verbs.plan(given.name, given.settings, root=given.runs, json=given.json, run=given.run, prices=given.prices)


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
