"""What a preflight found, as a person reads it, as JSON, and as an exit code. Knows nothing of torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from seedbed.track.text import clip, number, safe, width

EXIT_OK, EXIT_ERR, EXIT_BROKE, EXIT_WARN = 0, 1, 2, 3
_WORDS = {"err": "error", "warn": "warning", "note": "note"}


@dataclass(frozen=True)
class Finding:
    """One check's outcome."""

    id: str
    title: str
    status: str
    severity: str
    seconds: float
    what: str = ""
    where: str = ""
    why: str = ""
    fix: str = ""
    value: float | None = None
    limit: float | None = None

    @property
    def alarm(self) -> bool:
        """A failure above a note."""
        return self.status == "fail" and self.severity != "note"

    def lines(self, name: str) -> list[str]:
        """The five lines of a failure."""
        head = f"FAIL {self.id} {self.title:<16} {name}"
        tail = f"[{_WORDS[self.severity]}, {self.seconds:.1f} s]"
        body = [f" {part:<6} {safe(getattr(self, part))}" for part in ("what", "where", "why", "fix")]
        return [f"{head:<75} {tail}", *body]

    def row(self) -> str:
        """One line of the table: a value against its limit, or the reason why there is none."""
        word = {"pass": "ok", "skip": "skip", "fail": "note" if self.severity == "note" else self.severity.upper()}[self.status]
        seen = self.what if self.value is None else f"{number(self.value)} (limit {number(self.limit)})  {self.what}"
        return clip(f"  {word:<5}{self.id:<4}{self.title:<11}{self.seconds:5.1f} s  {safe(seen).strip()}", width())


@dataclass
class Report:
    """All outcomes of one preflight."""

    name: str
    shrunk: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    key: str = ""
    seconds: float = 0.0

    def of(self, severity: str) -> list[Finding]:
        return [f for f in self.findings if f.status == "fail" and f.severity == severity]

    @property
    def exit_code(self) -> int:
        return EXIT_ERR if self.of("err") else EXIT_WARN if self.of("warn") else EXIT_OK

    def head(self) -> str:
        changes = ", ".join(f"{k} {old} -> {new}" for k, (old, new) in self.shrunk.items())
        return f"preflight of {self.name}" + (f"\n  on a small copy: {changes} (--full checks it as it is)" if changes else "")

    def summary(self) -> str:
        count = {s: sum(f.status == s for f in self.findings) for s in ("pass", "skip")}
        parts = [f"{count['pass']} passed", f"{count['skip']} skipped"]
        for severity, word in _WORDS.items():
            found = self.of(severity)
            if found:
                parts.append(f"{len(found)} {word}{'s' if len(found) > 1 else ''} ({' '.join(f.id for f in found)})")
        return f"{', '.join(parts)} in {self.seconds:.1f} s"

    def json(self) -> dict[str, Any]:
        """Plain values, the same in the terminal with --json and in the run folder."""
        plain = {"name": self.name, "exit_code": self.exit_code, "seconds": self.seconds, "key": self.key}
        return {**plain, "shrunk": self.shrunk, "findings": [dataclasses.asdict(f) for f in self.findings]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        findings = [Finding(**f) for f in values["findings"]]
        shrunk = {k: (old, new) for k, (old, new) in values["shrunk"].items()}
        return cls(values["name"], shrunk, findings, values["key"], values["seconds"])
