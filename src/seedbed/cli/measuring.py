"""Commands that measure or examine a recipe: find-lr, find-batch, profile, plan, sweep, ablate, doctor, check, replay, drill."""

import argparse
from pathlib import Path
from typing import Any

from seedbed.cli.parser import argument, number, on_argument, runs_here, settings, verb
from seedbed.cli.slurm import dry_argument, refuse_dry
from seedbed.cli.trusting import confirm, trust_argument
from seedbed.errors import UserError


@verb("find-lr", "RECIPE/PRESET [key=value ...]", "suggest a learning rate")
@settings()
@argument("--seconds", type=number(float, 1), metavar="S", help="approximate time to spend; longer trials are more accurate")
@argument("--steps", type=number(int, 20), metavar="N", help="steps of each trial, regardless of time")
@argument("--repeats", type=number(int, 1), default=2, metavar="N", help="trials of the best rates, on different data")
@argument("--low", type=number(float, 0), metavar="LR", help="the lowest rate to try")
@argument("--high", type=number(float, 0), metavar="LR", help="the highest rate to try")
def _find_lr(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    options = {"steps": given.steps, "repeats": given.repeats, "seconds": given.seconds, "low": given.low, "high": given.high}
    return verbs.find_lr(given.name, given.settings, root=given.runs, json=given.json, **options)


@verb("find-batch", "RECIPE/PRESET [key=value ...]", "find the largest batch that fits")
@settings()
@argument("--limit", type=number(float, 0), metavar="GIB", help="memory to stay below")
@argument("--max", type=number(int, 1), dest="most", metavar="N", help="the largest batch to try")
@argument("--compiled", action="store_true", help="compile every size, not only the advised one: takes minutes")
def _find_batch(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    options = {"limit": given.limit, "most": given.most, "compiled": given.compiled}
    return verbs.find_batch(given.name, given.settings, root=given.runs, json=given.json, **options)


@verb("profile", "RECIPE/PRESET [key=value ...]", "time of a step by phase and operation")
@settings()
@argument("--steps", type=number(int, 1), default=20, metavar="N", help="steps to profile")
def _profile(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    return verbs.profile(given.name, given.settings, root=given.runs, json=given.json, steps=given.steps)


def _worlds(text: str) -> list[int]:
    return [number(int, 1, 65536)(part) for part in text.split(",")]


@verb("plan", "RECIPE/PRESET [key=value ...]", "parameters, memory, hours and cost of a run")
@settings()
@argument("--run", metavar="RUN", help="use the MFU that this run measured")
@argument("--prices", type=Path, metavar="FILE", help="your prices per GPU-hour, dated, as JSON")
@argument("--world", type=_worlds, metavar="N", help="on N ranks (dist.shard=8: shards of 8); N,N,...: with failures")
def _plan(given: argparse.Namespace) -> int:
    from seedbed.tune import verbs

    facts = {"run": given.run, "prices": given.prices, "world": given.world}
    return verbs.plan(given.name, given.settings, root=given.runs, json=given.json, **facts)


@verb("sweep", "RECIPE/PRESET key=a,b,c key=1..4", "train a grid of settings, or suggested ones; --show, --join")
@settings(needed=False)
@argument("--seeds", type=number(int, 0), metavar="N", help="train every setting with N seeds, starting at the config's")
@argument("--name", dest="sweep", metavar="NAME", help="the sweep's name; default: derived from the settings")
@argument("-m", "--why", default="", metavar="WHY", help="the reason for this sweep; shown in its report")
@argument("--patience", type=number(int, 0), default=0, metavar="N", help="end a trial after N evaluations without improvement")
@argument("--pack", type=number(int, 1), metavar="N", help="train at most N trials as one pack; default: what fits")
@argument("--no-pack", action="store_true", help="train the trials one by one")
@argument("--suggest", type=number(int, 1), metavar="N", help="choose N settings one after the other instead of a grid")
@argument("--sampler", choices=("optuna", "random"), default="optuna", help="the sampler of --suggest")
@argument("--metric", metavar="NAME", help="rank by this metric; default: the one that decides `best`")
@argument("--no-check", action="store_true", help="start without the quick checks")
@argument("--retry", action="store_true", help="try failed trials again")
@argument("--join", metavar="NAME", help="work on an existing sweep")
@argument("--show", metavar="NAME", help="print the state of a sweep")
@trust_argument
@on_argument
@dry_argument
def _sweep(given: argparse.Namespace) -> int:
    from seedbed.tune.sweep import verbs

    if given.show:
        return verbs.show(given.runs, given.show, given.json, given.metric)
    options = verbs.Options(
        root=given.runs,
        dirty=given.dirty,
        json=given.json,
        check=not given.no_check,
        most=1 if given.no_pack else given.pack,
        suggest=given.suggest,
        retry=given.retry,
    )
    if given.trust and not given.join:
        raise UserError("--trust needs --join: it confirms the recipe file that a sweep folder names")
    if not given.name and not given.join:
        raise UserError("name a RECIPE/PRESET and what to vary, or a sweep with --show or --join; see: seedbed sweep --help")
    confirm(given)
    options_of_sweep = {"num_seeds": given.seeds, "patience": given.patience, "sampler": given.sampler}
    facts = {"name": given.sweep, "why": given.why, "metric": given.metric, **options_of_sweep}
    if not runs_here(given):
        from seedbed.cli import slurm

        return slurm.sweep(given, options, facts)
    refuse_dry(given)
    if given.join:
        return verbs.join(given.join, options, _trials)
    return verbs.start(verbs.draft(given.name, given.settings, options, **facts), options, _trials)


def _trials() -> Any:
    from seedbed.launch import trials

    return trials


@verb("ablate", "RECIPE/PRESET [axis=a,b ...]", "the effect of each setting, predicted and then measured")
@argument("name", metavar="RECIPE/PRESET")
@argument("axes", nargs="*", default=[], metavar="axis=a,b", help="what to vary; default: every axis that applies here")
@argument("--set", action="append", default=[], metavar="key=value", help="change the baseline; repeatable")
@argument("--steps", type=number(int, 1), metavar="N", help="timed steps per repeat; default: some seconds of steps")
@argument("--repeats", type=number(int, 1), default=3, metavar="N", help="repeats per row, interleaved")
@argument("--name", dest="report", metavar="NAME", help="the report's name; default: derived from the arguments")
def _ablate(given: argparse.Namespace) -> int:
    from seedbed.tune.ablate import verbs

    options = {"settings": given.set, "steps": given.steps, "repeats": given.repeats, "report_name": given.report}
    return verbs.ablate(given.name, given.axes, root=given.runs, json=given.json, **options)


@verb("doctor", "[RECIPE/PRESET [key=value ...]]", "test whether this machine can train")
@settings(needed=False)
def _doctor(given: argparse.Namespace) -> int:
    from seedbed.checks.doctor import doctor

    return doctor(given.name, given.settings, runs=given.runs, as_json=given.json, dirty=given.dirty)


@verb("check", "RECIPE/PRESET [key=value ...] | script.py::make", "test data, model, loss and loop before training")
@settings()
@argument("--only", action="append", default=[], metavar="ID", help="run this check, or a group by its letter")
@argument("--skip", action="append", default=[], metavar="ID", help="skip this check or group")
@argument("--full", action="store_true", help="check the config at full depth, width and length")
def _check(given: argparse.Namespace) -> int:
    from seedbed.checks import preflight

    chosen = {"only": given.only, "skip": given.skip, "as_json": given.json}
    if "::" in given.name:
        if given.settings or given.full:
            raise UserError("a script has no settings and no --full; its function makes the model as it should be checked")
        return preflight.check_script(given.name, **chosen)
    chosen["full"] = given.full
    return preflight.check(given.name, given.settings, root=given.runs, **chosen)


@verb("replay", "RUN [STEP]", "repeat a failed step bit for bit and name the cause")
@argument("name", metavar="RUN")
@argument("step", nargs="?", type=number(int, 1), metavar="STEP", help="default: the last step that failed")
@trust_argument
def _replay(given: argparse.Namespace) -> int:
    confirm(given)
    from seedbed.checks.replay import replay

    return replay(given.runs, given.name, given.step, given.json)


@verb("overfit", "RECIPE/PRESET [key=value ...]", "test whether the model can memorise a few batches")
@settings()
@argument("--batches", type=number(int, 1), default=1, metavar="N", help="number of batches to memorise")
@argument("--steps", type=number(int, 1), default=200, metavar="N", help="number of steps")
def _overfit(given: argparse.Namespace) -> int:
    from seedbed.checks import overfit

    size = {"num_batches": given.batches, "steps": given.steps}
    return overfit.overfit(given.name, given.settings, as_json=given.json, **size)


@verb("drill", "[NAME ...]", "inject faults into small runs and count what is lost; --list, --short")
@argument("names", nargs="*", default=[], metavar="NAME", help="the drills to run; default: all")
@argument("--list", action="store_true", dest="listed", help="list the drills and run none")
@argument("--short", action="store_true", help="fewer faults of each kind")
@argument("--write", type=Path, metavar="PAGE", help="update the table in this page, such as docs/drills.md")
def _drill(given: argparse.Namespace) -> int:
    from seedbed.drills import table

    if given.listed:
        return table.show(given.json)
    return table.drill(given.names, short=given.short, as_json=given.json, page=given.write)
