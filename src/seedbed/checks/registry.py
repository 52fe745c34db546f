"""Every check by its id: what it tests, how grave a failure is, and what a recipe must declare for it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from seedbed import checks as package

if TYPE_CHECKING:
    from seedbed.checks.case import Case

Severity = Literal["err", "warn", "note"]
# The order in which groups run and are shown: cheap ones first, and causes before their consequences.
GROUPS = "ADMLCOHETVGI"


@dataclass(frozen=True)
class Result:
    """What a check found. `severity` overrides the check's own where one id covers grave and lesser failures."""

    status: Literal["pass", "fail", "skip"]
    what: str = ""
    where: str = ""
    why: str = ""
    fix: str = ""
    value: float | None = None
    limit: float | None = None
    severity: Severity | None = None


@dataclass(frozen=True)
class Check:
    """One property of a healthy run; `needs` names the probe's fields without which it cannot be tested."""

    id: str
    title: str
    severity: Severity
    run: Callable[[Case], Result]
    humbatova: tuple[int, ...]
    quick: bool
    needs: tuple[str, ...]

    @property
    def rank(self) -> tuple[int, int]:
        return GROUPS.index(self.id[0]), int(self.id[1:])


CHECKS: dict[str, Check] = {}


def check(
    id: str, title: str, severity: Severity, *, humbatova: tuple[int, ...], quick: bool = False, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Case], Result]], Callable[[Case], Result]]:
    """Register a function as the check `id`; `humbatova` are the categories of that taxonomy of faults which it answers."""

    def register(run: Callable[[Case], Result]) -> Callable[[Case], Result]:
        assert id not in CHECKS, f"{id} is registered twice"
        assert all(1 <= category <= 15 for category in humbatova), f"{id}: there are 15 categories"
        CHECKS[id] = Check(id, title, severity, run, humbatova, quick, needs)
        return run

    return register


def all_checks() -> list[Check]:
    """Every check of every group, in the order in which they run."""
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.endswith("_checks"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    return sorted(CHECKS.values(), key=lambda found: found.rank)


def passed(what: str = "", value: float | None = None, limit: float | None = None) -> Result:
    return Result("pass", what, value=value, limit=limit)


def skipped(reason: str) -> Result:
    return Result("skip", reason)


def failed(
    what: str,
    *,
    where: str,
    why: str,
    fix: str,
    value: float | None = None,
    limit: float | None = None,
    severity: Severity | None = None,
) -> Result:
    """A finding: what was seen, the place in the code, why it matters, and what to do."""
    return Result("fail", what, where, why, fix, value, limit, severity)
