"""A report under way: rows, what was predicted and what was seen, kept in one file so that nothing is measured twice."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files, lines, names
from seedbed.track.text import spell
from seedbed.tune.ablate.axes import BASELINE, COMBINED, Row
from seedbed.tune.ablate.measuring import Visit
from seedbed.tune.ablate.predictions import Prediction

ROUND = 10_000


@dataclass
class Entry:
    """One row with its prediction and its visits, by place: round times ROUND, and where in the round."""

    row: Row
    prediction: Prediction | None = None
    visits: dict[int, Visit] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """ok, oom, crash, not run, skipped, or waiting."""
        if self.row.why_not:
            return "not run"
        bad = [visit.outcome for visit in self.visits.values() if visit.outcome != "ok"]
        return bad[0] if bad else "ok" if self.visits else "waiting"

    @property
    def why(self) -> str:
        return self.row.why_not or next((v.why for v in self.visits.values() if v.outcome != "ok"), "")

    @property
    def seen(self) -> dict[int, Visit]:
        return {k: v for k, v in self.visits.items() if v.outcome == "ok"}

    def to_json(self) -> dict[str, Any]:
        row = {"axis": self.row.axis, "settings": self.row.settings, "why_not": self.row.why_not, "value": self.row.value}
        prediction = self.prediction.to_json() if self.prediction else None
        visits = {str(k): v.to_json() for k, v in self.visits.items()}
        return {"label": self.row.label, **row, "outcome": self.outcome, "prediction": prediction, "visits": visits}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Entry:
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in values["settings"].items()}
        row = Row(values["axis"], settings, values["why_not"], values["value"])
        found = {int(k): _visit(v) for k, v in values["visits"].items()}
        prediction = Prediction(**values["prediction"]) if values["prediction"] else None
        return cls(row, prediction, found)


def _visit(values: dict[str, Any]) -> Visit:
    known: dict[str, Any] = dict(values)
    known["losses"] = [math.nan if loss is None else loss for loss in values["losses"]]  # JSON has no word for it
    return Visit(**known)


@dataclass
class Study:
    """Everything a report is made of. `identity` is what two commands must share to go on with the same one."""

    path: Path
    identity: dict[str, Any]
    facts: dict[str, Any]
    steps: int
    repeats: int
    spacing: int
    entries: list[Entry]

    @property
    def baseline(self) -> Entry:
        return self.entries[0]

    @property
    def singles(self) -> list[Entry]:
        """The rows that change one thing."""
        return [entry for entry in self.entries if entry.row.axis not in (BASELINE, COMBINED)]

    @property
    def combined(self) -> Entry | None:
        return next((entry for entry in self.entries if entry.row.axis == COMBINED), None)

    @property
    def title(self) -> str:
        return str(self.identity["recipe"])

    def to_json(self) -> dict[str, Any]:
        kept = {
            "identity": self.identity,
            "facts": self.facts,
            "steps": self.steps,
            "repeats": self.repeats,
            "spacing": self.spacing,
        }
        return {"name": self.path.name, **kept, "rows": [entry.to_json() for entry in self.entries]}

    def save(self, summary: Sequence[dict[str, Any]] = ()) -> None:
        """Everything so far, at once or not at all."""
        try:
            files.write_atomic(self.path / "report.json", lines.pretty(self.to_json() | {"summary": list(summary)}))
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}") from None

    def waiting(self) -> Iterator[tuple[int, Entry]]:
        """What is still to be visited, and its place: A B A C A, and the next round the other way round."""
        for turn in range(self.repeats):
            yield from self._round(turn, self.singles[:: -1 if turn % 2 else 1])
        if self.combined:
            for turn in range(self.repeats, 2 * self.repeats):
                yield from self._round(turn, [self.combined])

    def _round(self, turn: int, rows: list[Entry]) -> Iterator[tuple[int, Entry]]:
        """Rows in their order, the baseline around every `spacing` of them; a row that failed is not tried again."""
        for first in range(0, len(rows), self.spacing):
            group = rows[first : first + self.spacing]
            places = {turn * ROUND + 2 * (first + i) + 1: entry for i, entry in enumerate(group)}
            if not any(entry.outcome in ("ok", "waiting") for entry in group):
                continue
            ends = min(places) - 1, max(places) + 1
            for place, entry in [(ends[0], self.baseline), *places.items(), (ends[1], self.baseline)]:
                if place not in entry.visits and entry.outcome in ("ok", "waiting"):
                    yield place, entry

    def pairs(self, entry: Entry) -> Iterator[tuple[Visit, list[Visit]]]:
        """Every visit to a row with the visits to the baseline right before and after it."""
        base = self.baseline.seen
        for place, visit in entry.seen.items():
            same = [p for p in base if p // ROUND == place // ROUND]
            ends = max((p for p in same if p < place), default=None), min((p for p in same if p > place), default=None)
            around = [base[p] for p in ends if p is not None]
            if around:
                yield visit, around

    def seconds_left(self) -> float:
        """By what visits to the same row took, and the baseline's where there was none yet."""
        known = [v.total_seconds for entry in self.entries for v in entry.visits.values()]
        usual = sum(known) / len(known) if known else math.nan
        took = {id(e): [v.total_seconds for v in e.visits.values()] for e in self.entries}
        return sum(min(took[id(e)], default=usual) for _, e in self.waiting())


def open_study(
    root: Path, name: str | None, identity: dict[str, Any], facts: dict[str, Any], rows: list[Row], repeats: int, spacing: int
) -> tuple[Study, bool]:
    """A new report, or the one of this name with what it has measured; True when it is an old one."""
    top = Path(root).parent / "ablations"
    path = top / names.check_name(name or default_name(identity))
    found = path / "report.json"
    if found.is_file():
        return _reopen(path, identity, facts), True
    try:
        path.mkdir(parents=True, exist_ok=True)
        (top / ".gitignore").write_text("*\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    entries = [Entry(Row(BASELINE), Prediction(1.0, "the baseline itself")), *map(Entry, rows)]
    return Study(path, identity, facts, 0, repeats, spacing, entries), False


def _reopen(path: Path, identity: dict[str, Any], facts: dict[str, Any]) -> Study:
    kept = lines.read_object(path / "report.json")
    try:
        entries = [Entry.from_json(values) for values in kept["rows"]]
        study = Study(path, kept["identity"], kept["facts"] | facts, kept["steps"], kept["repeats"], kept["spacing"], entries)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path / 'report.json'} is damaged ({error!r}); remove it or choose another --name") from None
    now = lines.finite(identity)
    different = [key for key in {**kept["identity"], **now} if kept["identity"].get(key) != now.get(key)]
    if different:
        told = "; ".join(f"{key} {spell(kept['identity'].get(key))} there, {spell(now.get(key))} here" for key in different)
        raise UserError(f"ablation {path.name} exists already with other settings: {told}\nchoose another --name")
    return study


def default_name(identity: dict[str, Any]) -> str:
    """The same command gives the same name, so that it finds its report again."""
    recipe = str(identity["recipe"])
    short = recipe.rpartition("/")[2].replace(".py", "") if ".py" in recipe else recipe
    stem = re.sub(r"[^A-Za-z0-9]+", "-", short).strip("-")
    told = json.dumps(lines.finite(identity), sort_keys=True)
    return f"{stem[:60]}-{hashlib.sha256(told.encode()).hexdigest()[:6]}"
