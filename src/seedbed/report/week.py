"""`seedbed journal --week`: results, conclusions and open entries of the last seven days."""

import datetime
import math
import re
from pathlib import Path
from typing import Any

from seedbed.report import facts, notes
from seedbed.track.jsonl import print_json
from seedbed.track.run import Run
from seedbed.track.text import duration, safe

DAYS = 7
_CONCLUSION = re.compile(r"^- conclusion, (\d{4}-\d\d-\d\d): (.*(?:\n[ \t]+\S.*)*)", re.M)


def print_week(root: Path, as_json: bool, today: datetime.date | None = None) -> int:
    """Print the week that ends today, as text or as JSON."""
    found = look(root, today or datetime.date.today())
    if as_json:
        return print_json(found)
    print(safe("\n".join(week_lines(found))))
    return 0


def look(root: Path, today: datetime.date) -> dict[str, Any]:
    """The entries of the week, and older ones that were concluded in it."""
    first = today - datetime.timedelta(days=DAYS - 1)
    entries = [_entry(entry) for entry in notes.entries(root)]
    new = [entry for entry in entries if first.isoformat() <= entry["date"] <= today.isoformat()]
    late = [e for e in entries if e not in new and any(c["date"] >= first.isoformat() for c in e["conclusions"])]
    seconds = math.fsum(_seconds(Run(Path(root) / entry["run"])) for entry in new)
    return {"from": first.isoformat(), "to": today.isoformat(), "seconds": seconds, "entries": new, "concluded_late": late}


def _entry(found: dict[str, str]) -> dict[str, Any]:
    date, _, rest = found["title"].partition(" · ")
    name, _, verdict = rest.partition(" · ")
    lines = {key: value for key, _, value in (line.removeprefix("- ").partition(": ") for line in found["text"].splitlines())}
    conclusions = [{"date": one[1], "text": " ".join(one[2].split())} for one in _CONCLUSION.finditer(found["text"])]
    why = lines.get("why", "")
    return {
        "date": date,
        "run": found["run"],
        "title": verdict or name,
        "why": "" if why.startswith(("(not given", "(not said")) else why,
        "negative": verdict.startswith("negative"),
        "numbers": lines.get("verdict") or lines.get("best") or "",
        "conclusions": conclusions,
    }


def _seconds(run: Run) -> float:
    """Training time of a run, if its folder still exists."""
    clock = run.status().get("clock")
    return float(clock["train"]) if isinstance(clock, dict) and facts.is_number(clock.get("train")) else 0.0


def week_lines(found: dict[str, Any]) -> list[str]:
    """The week as text: conclusions first, open entries last."""
    entries, late = found["entries"], found["concluded_late"]
    trained = f", {duration(found['seconds'])} of training" if found["seconds"] >= 1 else ""
    count = f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
    out = [f"{found['from']} to {found['to']}: {count}{trained}"]
    concluded = [entry for entry in [*late, *entries] if entry["conclusions"]]
    parts = {
        "concluded": concluded,
        "negative results": [e for e in entries if e["negative"] and not e["conclusions"]],
        "other results, no conclusion yet": [e for e in entries if not e["negative"] and not e["conclusions"]],
    }
    for title, members in parts.items():
        if members:
            out += ["", title, *(line for entry in members for line in _entry_lines(entry))]
    waiting = [entry["run"] for entry in entries if not entry["conclusions"]]
    if waiting:
        out += ["", f'{len(waiting)} wait for a conclusion: seedbed note {waiting[-1]} "what we learned"']
    return out if entries or late else [f"{out[0]}; a run that ends writes one"]


def _entry_lines(entry: dict[str, Any]) -> list[str]:
    out = [f"  {entry['date']}  {entry['run']}: {entry['title']}"]
    out += [f"      why: {entry['why']}"] if entry["why"] else []
    out += [f"      {entry['numbers']}"] if entry["numbers"] and not entry["conclusions"] else []
    return [*out, *(f"      {one['date']}: {one['text']}" for one in entry["conclusions"])]
