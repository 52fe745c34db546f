"""Runs checks on a subject, each isolated and timed; a check that raises becomes a finding. Stores verdicts."""

import hashlib
import json
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from seedbed import config as configs
from seedbed import errors
from seedbed.checks.registry import WORDS, Check, all_checks, explained_by, failed, fold, skipped
from seedbed.checks.subject import Subject, is_installed, preserve_global_state, short, source_line
from seedbed.errors import UserError
from seedbed.recipes import Recipe
from seedbed.report.findings import Finding, Report
from seedbed.track import files
from seedbed.train.engine import pick_device

# The key of errors reported so far that holds the ids of the checks to come.
LATER = "later"


def run(
    subject: Subject,
    checks: Sequence[Check],
    show: Callable[[Finding], None] = lambda finding: None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Every check's finding, in order; `show` is called with each result, `progress` before each check.

    M3 comes first: where the loss cannot be computed or is not finite, all else is a consequence.
    """
    checks = sorted(checks, key=lambda check: check.id != "M3")
    rank = {check.id: check.rank for check in checks}
    report = Report(subject.name, subject.shrunk, made=time.time())
    start = time.perf_counter()
    reported: dict[str, str] = {}
    postponed: dict[str, Finding] = {}
    for number, check in enumerate(checks, 1):
        began = time.perf_counter()
        progress(f"check {number} of {len(checks)}: {check.id} {check.title}")
        reported[LATER] = " ".join(later.id for later in checks[number:])
        result = _run_one(subject, check, reported)
        if result.follows:  # left to a later check, unless that one does not meet the error
            postponed[check.id], result = result, skipped(f"an error that {result.follows} explains")
        where, fix = subject.advice(result, check.id) if result.status == "fail" else (result.where, result.fix)
        facts = {"id": check.id, "title": check.title, "severity": result.severity or check.severity, "where": where, "fix": fix}
        finding = replace(result, **facts, seconds=time.perf_counter() - began)
        report.findings.append(finding)
        show(finding)
    failing = {finding.id for finding in report.findings if finding.status == "fail"}
    for place, finding in enumerate(report.findings):
        if finding.id in postponed and postponed[finding.id].follows not in failing:
            facts = {"id": finding.id, "title": finding.title, "seconds": finding.seconds, "follows": ""}
            report.findings[place] = replace(postponed[finding.id], **facts)
    report.findings = sorted(fold(report.findings), key=lambda finding: rank[finding.id])
    report.seconds = time.perf_counter() - start
    return report


def select(only: Sequence[str] = (), skip: Sequence[str] = (), *, quick: bool = False) -> list[Check]:
    """The checks to run; an id that does not exist is an error that names those that do. `C` means all of C."""
    checks = all_checks()
    known = {c.id for c in checks} | {c.id[0] for c in checks}
    for name in (*only, *skip):
        if name not in known:
            titled = [c.id for c in checks if c.title == name]
            hint = f"checks are named by id; {name!r} is {titled[0]}" if titled else ""
            raise UserError(hint or f"there is no check {name!r}; there are: {' '.join(c.id for c in checks)}")
    chosen = [c for c in checks if not only or c.id in only or c.id[0] in only]
    return [c for c in chosen if c.id not in skip and c.id[0] not in skip and (c.quick or not quick)]


def _run_one(subject: Subject, check: Check, reported: dict[str, str]) -> Finding:
    with preserve_global_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = subject.version(check)
            result = skipped(found) if isinstance(found, str) else found(subject)
            return replace(result, **WORDS.get(check.id, {})) if result.status == "fail" and not result.why else result
        except Exception as error:
            return _error_result(subject, check, error, reported)


def _error_result(subject: Subject, check: Check, error: Exception, reported: dict[str, str]) -> Finding:
    """An error is reported once, by the check that explains it where that one is still to come."""
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:300]
    where = source_line_of_error(error) or source_line(subject.recipe.function("system", "build"))
    better = explained_by(error, Path(__file__).parent)
    better, is_new = better if better in reported[LATER].split() else "", f"{reason} {where}" not in reported
    if (seen := reported.setdefault(f"{reason} {where}", better or check.id)) != check.id and not (better and is_new):
        return skipped(f"same error as in {seen}")
    why = "what cannot run here cannot train either, or trains untested code"
    # A user's model need not bear what a check does to it, but its loss must run, and so must its evaluation.
    severity = "err" if check.id == "M3" or check.id[0] in "TVI" else subject.unsure or "err"
    found = failed(f"could not run: {reason}", where=where, why=why, fix="fix the line named above", severity=severity)
    return replace(found, follows=better)


def source_line_of_error(error: BaseException) -> str:
    """The innermost source line outside the checks that raised; empty when there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    outside = [f for f in frames if not f.filename.startswith(own) and not is_installed(f.filename)]
    return f"{short(outside[-1].filename)}:{outside[-1].lineno} {outside[-1].name}" if outside else ""


def key_of(recipe: Recipe, config: configs.Config, fingerprint: str) -> str:
    """A hash of all that a verdict depends on: config, data, torch, device type, code of the recipe and of this package."""
    try:
        device = pick_device(config.device).type
    except UserError:  # a check may run on another machine than training
        device = config.device
    digest = hashlib.sha256(f"{configs.digest(config)} {fingerprint} {torch.__version__} {device}".encode())
    for path in sorted({*recipe.files(), *Path(errors.__file__).parent.rglob("*.py")}):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def rerun_errors(subject: Subject, report: Report, ids: set[str], progress: Callable[[str], None]) -> Report:
    """A stored verdict with its errors in these checks tried again: they may have been caused by the machine."""
    failed = [finding.id for finding in report.of("err") if finding.id in ids]
    fresh = run(subject, [check for check in all_checks() if check.id in failed], progress=progress)
    found = {finding.id: finding for finding in fresh.findings}
    findings = [found.get(finding.id, finding) for finding in report.findings]
    return replace(report, findings=findings, made=fresh.made, seconds=fresh.seconds)


def save_verdict(folder: Path, report: Report) -> None:
    """Stores a verdict under its key."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / f"{report.key}.json", json.dumps(report.json(), indent=1))


def load_verdict(folder: Path, key: str) -> Report | None:
    """The verdict stored under this key; None when there is none that can be read."""
    try:
        return Report.from_json(json.loads((folder / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
