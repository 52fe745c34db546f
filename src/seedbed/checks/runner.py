"""Runs checks on a case: one after the other, undisturbed by each other, each with its time; a broken check is a finding."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from seedbed import config as configs
from seedbed import errors
from seedbed.checks.case import Case, place, short, undisturbed
from seedbed.checks.findings import Finding, Report
from seedbed.checks.registry import Check, Result, all_checks, skipped
from seedbed.errors import UserError
from seedbed.recipes import Recipe
from seedbed.track import files


def choose(only: Sequence[str] = (), skip: Sequence[str] = (), *, quick: bool = False) -> list[Check]:
    """The checks to run; an id that does not exist is an error that names those that do. `C` means all of C."""
    checks = all_checks()
    known = {c.id for c in checks} | {c.id[0] for c in checks}
    for name in (*only, *skip):
        if name not in known:
            raise UserError(f"there is no check {name!r}; there are: {' '.join(c.id for c in checks)}")
    chosen = [c for c in checks if not only or c.id in only or c.id[0] in only]
    return [c for c in chosen if c.id not in skip and c.id[0] not in skip and (c.quick or not quick)]


def run(case: Case, checks: Sequence[Check], show: Callable[[Finding], None] = lambda finding: None) -> Report:
    """Every check's finding, in order; `show` is called with each as it comes."""
    report = Report(case.name, case.shrunk)
    start = time.perf_counter()
    met: dict[str, str] = {}
    for check in checks:
        began = time.perf_counter()
        result = _run_one(case, check, met)
        severity = result.severity or check.severity
        told = {part: getattr(result, part) for part in ("what", "where", "why", "fix", "value", "limit")}
        if result.status == "fail":
            told["fix"] = f"{result.fix}; then: seedbed check {case.name} --only {check.id}"
        finding = Finding(check.id, check.title, result.status, severity, time.perf_counter() - began, **told)
        report.findings.append(finding)
        show(finding)
    report.seconds = time.perf_counter() - start
    return report


def _run_one(case: Case, check: Check, met: dict[str, str]) -> Result:
    with undisturbed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            missing = _missing(case, check)
            return missing or check.run(case)
        except Exception as error:
            return _broken(case, check, error, met)


def _missing(case: Case, check: Check) -> Result | None:
    if not check.needs:
        return None
    if case.probe is None:
        return skipped("the recipe has no probe()")
    absent = [name for name in check.needs if not case.probe.declares(name)]
    return skipped(f"the recipe's probe does not declare {', '.join(absent)}") if absent else None


def _broken(case: Case, check: Check, error: Exception, met: dict[str, str]) -> Result:
    """An error is a finding, once: the same error met by later checks makes them skip."""
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:300]
    where = place_of(error) or place(case.recipe._function("system", "build"))
    if (seen := met.setdefault(f"{reason} {where}", check.id)) != check.id:
        return skipped(f"the error that {seen} met came again")
    why = "what cannot run here cannot train either, or trains on a path that was never tried"
    return Result("fail", f"could not run: {reason}", where, why, "mend the line named above", severity="err")


def place_of(error: BaseException) -> str:
    """The innermost line of recipe or package code outside the checks that raised; empty when there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    skip = ("torch", "numpy", "importlib", "<frozen")
    outside = [f for f in frames if not f.filename.startswith(own) and not any(part in f.filename for part in skip)]
    return f"{short(outside[-1].filename)}:{outside[-1].lineno} {outside[-1].name}" if outside else ""


# ---- verdicts that are kept ----------------------------------------------------------------------------------------


def key_of(recipe: Recipe, config: configs.Config, fingerprint: str) -> str:
    """A hash of all that a verdict depends on: config, code of the recipe and of this package, and data."""
    digest = hashlib.sha256(f"{configs.digest(config)} {fingerprint}".encode())
    for path in sorted({*recipe.files(), *Path(errors.__file__).parent.rglob("*.py")}):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def store(folder: Path, report: Report) -> None:
    """Keep a verdict under its key."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / f"{report.key}.json", json.dumps(report.json(), indent=1))


def recall(folder: Path, key: str) -> Report | None:
    """The verdict kept under this key; None when there is none that can be read."""
    try:
        return Report.from_json(json.loads((folder / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
