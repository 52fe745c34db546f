"""An ablation in progress: rows, predictions and repeats, kept in one file so that nothing is measured twice."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files, folders, jsonl
from seedbed.track.text import format_value
from seedbed.tune.ablate.axes import BASELINE, COMBINED, Row
from seedbed.tune.ablate.measure import Repeat
from seedbed.tune.ablate.predictions import Prediction
from seedbed.tune.workload import writing

ROUND = 10_000
# Keys of earlier reports, and what they are called now.
RENAMED = {"visits": "repeats", "why_not": "skip_reason", "how": "execution"}


@dataclass
class Entry:
    """One row with its prediction and its repeats, by place: round times ROUND, plus the position in the round."""

    row: Row
    prediction: Prediction | None = None
    repeats: dict[int, Repeat] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """ok, oom, crash, not run, skipped, or waiting."""
        if self.row.skip_reason:
            return "not run"
        bad = [repeat.outcome for repeat in self.repeats.values() if repeat.outcome != "ok"]
        return bad[0] if bad else "ok" if self.repeats else "waiting"

    @property
    def why(self) -> str:
        return self.row.skip_reason or next((v.why for v in self.repeats.values() if v.outcome != "ok"), "")

    @property
    def succeeded(self) -> dict[int, Repeat]:
        return {k: v for k, v in self.repeats.items() if v.outcome == "ok"}

    def to_json(self) -> dict[str, Any]:
        prediction = asdict(self.prediction) if self.prediction else None
        repeats = {str(k): asdict(v) for k, v in self.repeats.items()}
        found = {"outcome": self.outcome, "prediction": prediction, "repeats": repeats}
        return {"label": self.row.label, **asdict(self.row), **found}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Entry:
        values = _renamed(values)
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in values["settings"].items()}
        found = cls(Row(values["axis"], settings, values["skip_reason"], values["value"]))
        for place, repeat in values["repeats"].items():
            known = _renamed(repeat)
            known["losses"] = [math.nan if loss is None else loss for loss in repeat["losses"]]  # JSON has no NaN
            found.repeats[int(place)] = Repeat(**known)
        found.prediction = Prediction(**values["prediction"]) if values["prediction"] else None
        return found


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(key, key): value for key, value in values.items()}


@dataclass
class Study:
    """All data of a report. `identity` is what two commands must share to continue the same one."""

    path: Path
    identity: dict[str, Any]
    facts: dict[str, Any]
    steps: int
    num_repeats: int
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
        kept = {"identity": self.identity, "facts": self.facts, "steps": self.steps, "repeats": self.num_repeats}
        rows = [entry.to_json() for entry in self.entries]
        return {"name": self.path.name, **kept, "spacing": self.spacing, "rows": rows}

    def save(self, summary: Sequence[dict[str, Any]] = ()) -> None:
        """Writes everything so far atomically."""
        with writing(self.path):
            files.write_atomic(self.path / "report.json", jsonl.pretty(self.to_json() | {"summary": list(summary)}))

    def waiting(self) -> Iterator[tuple[int, Entry]]:
        """What is still to be measured, and its place: A B A C A, and the next round in reverse."""
        for turn in range(self.num_repeats):
            yield from self._round(turn, self.singles[:: -1 if turn % 2 else 1])
        if self.combined:
            for turn in range(self.num_repeats, 2 * self.num_repeats):
                yield from self._round(turn, [self.combined])

    def _round(self, turn: int, rows: list[Entry]) -> Iterator[tuple[int, Entry]]:
        """Rows in order, the baseline around every `spacing` of them; a failed row is not tried again."""
        for first in range(0, len(rows), self.spacing):
            group = rows[first : first + self.spacing]
            places = {turn * ROUND + 2 * (first + i) + 1: entry for i, entry in enumerate(group)}
            if not any(entry.outcome in ("ok", "waiting") for entry in group):
                continue
            ends = min(places) - 1, max(places) + 1
            for place, entry in [(ends[0], self.baseline), *places.items(), (ends[1], self.baseline)]:
                if place not in entry.repeats and entry.outcome in ("ok", "waiting"):
                    yield place, entry

    def pairs(self, entry: Entry) -> Iterator[tuple[Repeat, list[Repeat]]]:
        """Every repeat of a row with the repeats of the baseline right before and after it."""
        base = self.baseline.succeeded
        for place, repeat in entry.succeeded.items():
            same = [p for p in base if p // ROUND == place // ROUND]
            ends = max((p for p in same if p < place), default=None), min((p for p in same if p > place), default=None)
            around = [base[p] for p in ends if p is not None]
            if around:
                yield repeat, around

    def seconds_left(self) -> float:
        """Estimated from earlier repeats of the same row, or of the baseline."""
        known = [v.total_seconds for entry in self.entries for v in entry.repeats.values()]
        usual = sum(known) / len(known) if known else math.nan
        took = {id(e): [v.total_seconds for v in e.repeats.values()] for e in self.entries}
        return sum(min(took[id(e)], default=usual) for _, e in self.waiting())


def open_study(
    root: Path, name: str | None, identity: dict[str, Any], facts: dict[str, Any], rows: list[Row], repeats: int, spacing: int
) -> Study:
    """A new report, or the existing one of this name."""
    top = Path(root).parent / "ablations"
    path = top / folders.check_name(name or default_name(identity))
    if (path / "report.json").is_file():
        return _reopen(path, identity, facts)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        (top / ".gitignore").write_text("*\n")
    entries = [Entry(Row(BASELINE), Prediction(1.0, "the baseline itself")), *map(Entry, rows)]
    return Study(path, identity, facts, 0, repeats, spacing, entries)


def _reopen(path: Path, identity: dict[str, Any], facts: dict[str, Any]) -> Study:
    kept = jsonl.read_object(path / "report.json")
    try:
        entries = [Entry.from_json(values) for values in kept["rows"]]
        study = Study(path, kept["identity"], kept["facts"] | facts, kept["steps"], kept["repeats"], kept["spacing"], entries)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path / 'report.json'} is damaged ({error!r}); remove it or choose another --name") from None
    now = jsonl.finite(identity)
    different = [key for key in {**kept["identity"], **now} if kept["identity"].get(key) != now.get(key)]
    if different:
        differences = "; ".join(
            f"{key} {format_value(kept['identity'].get(key))} there, {format_value(now.get(key))} here" for key in different
        )
        raise UserError(f"ablation {path.name} exists already with other settings: {differences}\nchoose another --name")
    return study


def default_name(identity: dict[str, Any]) -> str:
    """The same command gives the same name, so that it finds its report again."""
    recipe = str(identity["recipe"])
    short = recipe.rpartition("/")[2].replace(".py", "") if ".py" in recipe else recipe
    stem = re.sub(r"[^A-Za-z0-9]+", "-", short).strip("-")
    content = json.dumps(jsonl.finite(identity), sort_keys=True)
    return f"{stem[:60]}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"
