"""Registry of checks by id: title, severity, what a recipe must declare, and what follows from their findings."""

from __future__ import annotations

import importlib
import pkgutil
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from seedbed import checks as package
from seedbed.report.findings import Finding, Severity

if TYPE_CHECKING:
    from seedbed.checks.subject import Subject

# The order in which groups run and are shown: cheap ones first, and causes before their consequences.
GROUPS = "ADMLCOHETVGI"
# What fails as a consequence of each check's fault, by ids or groups.
CONSEQUENCES: dict[str, str] = tomllib.loads(Path(__file__).with_name("consequences.toml").read_text())
# Why a failure matters and what to do: by check, and by case (such as D8-ends) where it can fail in several ways.
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
# The check that explains an error inside a method of a recipe; the outermost one counts.
EXPLAINS = {"evaluate": "V1", "sample": "I6", "export": "I7", "update": "M3", "loss": "M3", "batch": "D7", "locate": "D7"}


@dataclass(frozen=True)
class Check:
    """One property of a healthy run; `needs` names the fields of the probe that it requires."""

    id: str
    title: str
    severity: Severity
    run: Callable[[Subject], Finding]
    humbatova: tuple[int, ...]
    quick: bool
    needs: tuple[str, ...]

    @property
    def rank(self) -> tuple[int, int]:
        return GROUPS.index(self.id[0]), int(self.id[1:])


CHECKS: dict[str, Check] = {}


def check(
    id: str, title: str, severity: Severity, *, humbatova: tuple[int, ...], quick: bool = False, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Subject], Finding]], Callable[[Subject], Finding]]:
    """Registers a function as check `id`; `humbatova` are the categories of that fault taxonomy which it covers."""

    def register(run: Callable[[Subject], Finding]) -> Callable[[Subject], Finding]:
        assert id not in CHECKS, f"{id} is registered twice"
        assert all(1 <= category <= 15 for category in humbatova), f"{id}: there are 15 categories"
        CHECKS[id] = Check(id, title, severity, run, humbatova, quick, needs)
        return run

    return register


def all_checks() -> list[Check]:
    """All checks in the order in which they run."""
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.endswith("_checks"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    return sorted(CHECKS.values(), key=lambda found: found.rank)


def passed(what: str = "", value: float | None = None, limit: float | None = None) -> Finding:
    return Finding(what=what, value=value, limit=limit)


def skipped(reason: str) -> Finding:
    return Finding(status="skip", what=reason)


def failed(
    what: str,
    *,
    where: str,
    case: str = "",
    why: str = "",
    fix: str = "",
    value: float | None = None,
    limit: float | None = None,
    severity: Severity | Literal[""] = "",
) -> Finding:
    """A failure; `severity` overrides that of the check. `case` names its words in words.toml, of which `fix` may be given here;
    without a case and words of its own it gets those of its check."""
    words = {"why": why, "fix": fix} | (WORDS[case] if case else {})
    return Finding("", "", "fail", severity, 0.0, what, where, words["why"], words["fix"], value, limit)


def explained_by(error: BaseException, own: Path) -> str:
    """The check that tests what an error interrupted, by the names of the functions that were running; empty if unknown."""
    frames = (f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(str(own)))
    return next((EXPLAINS[f.name] for f in frames if f.name in EXPLAINS), "")


def fold(findings: list[Finding]) -> list[Finding]:
    """The findings, each with the id of the one that it follows from: a known cause, or one at the same line before it."""
    alarms = [f for f in findings if f.alarm]
    cause: dict[str, str] = {}
    for finding in alarms:
        for other in alarms:
            if other is finding or cause.get(other.id) == finding.id or (finding.severity, other.severity) == ("err", "warn"):
                continue
            same_line = other.where == finding.where and ".py:" in finding.where and alarms.index(other) < alarms.index(finding)
            if same_line or {finding.id, finding.id[0]} & {*CONSEQUENCES.get(other.id, "").split()}:
                cause[finding.id] = cause.get(other.id, other.id)
                break
    roots = {id: cause.get(root, root) for id, root in cause.items()}
    return [replace(f, follows=roots.get(f.id, "")) if f.alarm and roots.get(f.id) != f.id else f for f in findings]
