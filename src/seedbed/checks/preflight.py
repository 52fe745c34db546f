"""The preflight as a command and as the first act of training: run, show, keep the verdict."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from seedbed import config as configs
from seedbed.checks import runner
from seedbed.checks.case import Case
from seedbed.checks.findings import EXIT_ERR, Finding, Report
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.recipes import Recipe, find
from seedbed.track import files, listing


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
    """Run the checks on a recipe as it would be trained, and print what they found."""
    recipe, preset = find(name)
    base = recipe.preset(preset)
    checks = runner.choose(only, skip)
    try:
        config = configs.override(base, assignments)
    except UserError as problem:
        return _wrong_key(name, problem, as_json)
    case = Case(recipe, preset, config, root, full=full)
    if not as_json:
        print(Report(case.name, case.shrunk).head(), flush=True)
    report = runner.run(case, checks, (lambda finding: None) if as_json else _row)
    if not only and not skip:
        report.key = runner.key_of(recipe, config, str(case.real_data.facts.get("fingerprint", "")))
        runner.store(verdicts(), report)
    if as_json:
        listing.print_json(report.json())
    else:
        _tell(report, print)
    return report.exit_code


def _row(finding: Finding) -> None:
    print(finding.row(), flush=True)


def _tell(report: Report, say: Callable[[str], None]) -> None:
    """The findings in full, worst first, and the sum of it."""
    for severity in ("err", "warn", "note"):
        for finding in report.of(severity):
            say("\n" + "\n".join(finding.lines(report.name)))
    say(f"\n{report.name}: {report.summary()}")


def _wrong_key(name: str, problem: UserError, as_json: bool) -> int:
    """An override that does not fit is the first finding, and the last."""
    why = "it would be ignored, or stop the run at its start"
    fix = "write the key as the config knows it"
    finding = Finding("A1", "keys", "fail", "err", 0.0, str(problem), "command line", why, fix)
    report = Report(name, findings=[finding])
    if as_json:
        listing.print_json(report.json())
    else:
        _tell(report, print)
    return EXIT_ERR


def verdicts() -> Path:
    """Where full verdicts are kept: $SEEDBED_CACHE, or the user's cache folder."""
    named = os.environ.get("SEEDBED_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "seedbed"
    return (Path(named).expanduser() if named else home) / "preflight"


def before_training(
    recipe: Recipe, preset: str | None, config: Config, *, root: Path, folder: Path, say: Callable[[str], None]
) -> Report:
    """The verdict that training starts on, kept in the run's folder: a full one that still holds, or that of the quick checks."""
    case = Case(recipe, preset, config, root)
    key = runner.key_of(recipe, config, str(case.real_data.facts.get("fingerprint", "")))
    report = runner.recall(verdicts(), key)
    if report is not None:
        say(f"preflight: {report.summary()} (seedbed check, on the same config, code and data)")
    else:
        report = runner.run(case, runner.choose(quick=True))
        report.key = key
        say(f"preflight: {report.summary()}")
    files.write_atomic(folder / "preflight.json", json.dumps(report.json(), indent=1))
    for finding in report.findings:
        if finding.alarm:
            say("\n".join(finding.lines(report.name)))
    return report
