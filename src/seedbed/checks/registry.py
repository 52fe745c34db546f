"""Registry of checks by id: title, severity, and what a recipe must declare."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from seedbed import checks as package
from seedbed.report.findings import Finding, Severity

if TYPE_CHECKING:
    from seedbed.checks.subject import Subject

# The order in which groups run and are shown: cheap ones first, and causes before their consequences.
GROUPS = "ADMLCOHETVGI"
# Titles of earlier versions by id, for those who type one.
FORMER_TITLES = (
    "A1:keys A2:reads A4:echo D2:split D3:coverage D4:decode D5:range D7:purity D8:epoch G1:parity G3:layout G4:traffic "
    "V1:repeat V2:same V3:parts V4:chance I1:cache I2:harness I6:mode H1:rate H2:ratio H3:sums E2:input E3:falls T3:dice "
    "T4:neutral T6:crash M1:chance M2:birth M4:rows M5:units M6:bend M7:matters M9:state L0:probe L1:split L2:oracle "
    "L3:mask L5:floors L6:label O1:groups O2:moves O3:zeroed O4:accumulate O5:schedule O6:resolution O7:average C1:order "
    "C2:target C3:response C4:sweep C6:gradient "
)


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
    why: str,
    fix: str,
    value: float | None = None,
    limit: float | None = None,
    severity: Severity | Literal[""] = "",
) -> Finding:
    """A failure; `severity` overrides that of the check."""
    return Finding("", "", "fail", severity, 0.0, what, where, why, fix, value, limit)
