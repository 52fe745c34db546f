"""Finding: one result of a check, of the doctor or of a replay; and the report of a preflight. Does not import torch."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from seedbed.errors import EXIT_FAILED, EXIT_OK, EXIT_WARNING
from seedbed.track.text import clip, number, safe, width

Severity = Literal["err", "warn", "note"]
_WORDS = {"err": "error", "warn": "warning", "note": "note"}


@dataclass(frozen=True)
class Finding:
    """What was seen, where in the code, why it matters and what to do. `severity` is that of a failure.

    `follows` is the id of the finding that this one is a consequence of.
    """

    id: str = ""
    title: str = ""
    status: Literal["pass", "fail", "skip", "broken"] = "pass"
    severity: Severity | Literal[""] = ""
    seconds: float = 0.0
    what: str = ""
    where: str = ""
    why: str = ""
    fix: str = ""
    value: float | None = None
    limit: float | None = None
    follows: str = ""

    @property
    def alarm(self) -> bool:
        """A failure more severe than a note."""
        return self.status == "fail" and self.severity != "note"

    def lines(self, name: str) -> list[str]:
        head = f"FAIL {self.id} {self.title:<16} {name}"
        tail = f"[{_WORDS[self.severity]}, {self.seconds:.1f} s]"
        body = [f" {part:<6} {safe(getattr(self, part))}" for part in ("what", "where", "why", "fix")]
        return [f"{head:<75} {tail}", *body]

    def row(self) -> str:
        """One line of the table: a value against its limit, or the reason for a skip."""
        word = {"pass": "ok", "skip": "skip", "fail": "note" if self.severity == "note" else self.severity.upper()}[self.status]
        word = f"({self.follows})" if self.follows else word
        seen = self.what if self.value is None else f"{number(self.value)} (limit {number(self.limit)})  {self.what}"
        return clip(f"  {word:<5}{self.id:<4}{self.title:<17}{self.seconds:5.1f} s  {safe(seen).strip()}", width())


@dataclass
class Report:
    """All outcomes of one preflight."""

    name: str
    shrunk: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    key: str = ""
    seconds: float = 0.0
    made: float = 0.0  # seconds since 1970

    def of(self, severity: str) -> list[Finding]:
        """The failures of one severity that follow from no other."""
        return [f for f in self.findings if f.status == "fail" and f.severity == severity and not f.follows]

    def following(self, finding: Finding) -> str:
        """The line below a finding that names those which follow from it; empty when there are none."""
        ids = [f.id for f in self.findings if f.follows == finding.id]
        return f"\n        follows from {finding.id}: {', '.join(ids)}" if ids else ""

    @property
    def exit_code(self) -> int:
        return EXIT_FAILED if self.of("err") else EXIT_WARNING if self.of("warn") else EXIT_OK

    def head(self) -> str:
        changes = ", ".join(f"{k} {old} -> {new}" for k, (old, new) in self.shrunk.items())
        return f"preflight of {self.name}" + (f"\n  on a small copy: {changes} (--full checks it as it is)" if changes else "")

    def summary(self) -> str:
        count = {s: sum(f.status == s for f in self.findings) for s in ("pass", "skip")}
        parts = [f"{count['pass']} passed", f"{count['skip']} skipped"]
        for severity, word in _WORDS.items():
            if found := self.of(severity):
                parts.append(f"{len(found)} {word}{'s' if len(found) > 1 else ''} ({' '.join(f.id for f in found)})")
        return f"{', '.join(parts)} in {self.seconds:.1f} s"

    def details(self) -> list[str]:
        found = [finding for severity in _WORDS for finding in self.of(severity)]
        shown = ("\n" + "\n".join(finding.lines(self.name)) + self.following(finding) for finding in found)
        return [*shown, f"\n{self.name}: {self.summary()}"]

    def __str__(self) -> str:
        return "\n".join([self.head(), *(finding.row() for finding in self.findings), *self.details()])

    def json(self) -> dict[str, Any]:
        plain = {"name": self.name, "exit_code": self.exit_code, "seconds": self.seconds, "key": self.key, "made": self.made}
        return {**plain, "shrunk": self.shrunk, "findings": [dataclasses.asdict(f) for f in self.findings]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Report":
        findings = [Finding(**f) for f in values["findings"]]
        shrunk = {k: (old, new) for k, (old, new) in values["shrunk"].items()}
        return cls(values["name"], shrunk, findings, values["key"], values["seconds"], values["made"])
