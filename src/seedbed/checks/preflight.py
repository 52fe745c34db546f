"""The preflight as a command and before training: runs checks, prints findings, stores the verdict."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from seedbed import config as configs
from seedbed.cache import cache_folder
from seedbed.checks import runner
from seedbed.checks.progress import Progress
from seedbed.checks.registry import Check
from seedbed.checks.subject import Subject
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.recipes import Recipe, find
from seedbed.report.findings import Finding, Report
from seedbed.track import files, jsonl


def check(
    name: str,
    assignments: list[str],
    *,
    root: Path,
    only: list[str],
    skip: list[str],
    full: bool = False,
    as_json: bool = False,
) -> int:
    """Runs the checks on a recipe as it would be trained, and prints the findings."""
    recipe, preset = find(name)
    base = recipe.preset(preset)
    checks = runner.select(only, skip)
    try:
        config = configs.override(base, assignments)
    except UserError as problem:
        return _wrong_key(name, problem, as_json)
    subject = Subject(recipe, preset, config, root, full=full)
    report = _run(subject, checks, as_json)
    if not only and not skip:
        report.key = runner.key_of(recipe, config, str(subject.real_data.facts.get("fingerprint", "")))
        runner.save_verdict(verdict_folder(), report)
    return _print(report, as_json)


def check_script(name: str, *, only: list[str], skip: list[str], as_json: bool = False) -> int:
    """Runs the checks on the model of `script.py::make`, and prints the findings."""
    from seedbed.checks.foreign import script_subject

    checks = runner.select(only, skip)
    with script_subject(name) as subject:
        return _print(_run(subject, checks, as_json), as_json)


def _run(subject: Subject, checks: Sequence[Check], as_json: bool) -> Report:
    """Runs the checks; unless the output is JSON, shows each as it ends."""
    if not as_json:
        print(Report(subject.name, subject.shrunk).head(), flush=True)
    with Progress(silent=as_json) as progress:

        def show(finding: Finding) -> None:
            if not as_json:
                progress.clear()
                print(finding.row(), flush=True)

        progress.say("opening the data", ticking=False)  # preparing it prints its own progress
        _open(subject)
        return runner.run(subject, checks, show, progress.say)


def _print(report: Report, as_json: bool) -> int:
    if as_json:
        jsonl.print_json(report.json())
    else:
        print("\n".join(report.details()))
    return report.exit_code


def _open(subject: Subject) -> None:
    """Opens the data before the first check is timed. Errors are left to the checks."""
    with contextlib.suppress(Exception):
        _ = subject.real_data


def _wrong_key(name: str, problem: UserError, as_json: bool) -> int:
    """Reports an invalid override as the only finding."""
    why = "it would be ignored, or stop the run at its start"
    fix = "write the key as the config knows it"
    finding = Finding("A1", "config keys", "fail", "err", what=str(problem), where="command line", why=why, fix=fix)
    return _print(Report(name, findings=[finding]), as_json)


def verdict_folder() -> Path:
    """Folder of stored verdicts."""
    return cache_folder() / "preflight"


def before_training(
    recipe: Recipe,
    preset: str | None,
    config: Config,
    *,
    root: Path,
    folder: Path,
    say: Callable[[str], None],
    data: Data | None = None,
) -> Report:
    """The verdict that training starts on, stored in the run's folder: a full one that is still valid, or the quick checks'.

    `data` is what the run has opened. Errors of a stored verdict are tried again before they stop a run.
    """
    subject = Subject(recipe, preset, config, root, quick=True, data=data)
    key = runner.key_of(recipe, config, str(subject.real_data.facts.get("fingerprint", "")))
    report = runner.load_verdict(verdict_folder(), key)
    with Progress() as progress:
        if report is None:
            report = runner.run(subject, runner.select(quick=True), progress=progress.say)
            report.key, origin = key, ""
        elif report.of("err"):
            failed = " ".join(finding.id for finding in report.of("err"))
            origin = f"seedbed check of {_when(report.made)} found errors ({failed}), which were tried again"
            report = runner.rerun_errors(subject, report, progress.say)
            runner.save_verdict(verdict_folder(), report)
        else:
            origin = f"seedbed check of {_when(report.made)}, on the same config, code, data and torch"
    say(f"preflight: {report.summary()}" + (f" ({origin})" if origin else ""))
    files.write_atomic(folder / "preflight.json", json.dumps(report.json(), indent=1))
    for finding in report.findings:
        if finding.alarm:
            say("\n".join(finding.lines(report.name)))
    return report


def _when(made: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(made))
