"""The journal as people use it: conclusions that they write, its entries, and a summary of the last seven days."""

import datetime
import difflib
import math
import re
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.report import facts
from seedbed.report.journal import closed, conclusions_end, editing, escaped, find_entry, path_of, read, record
from seedbed.track import files
from seedbed.track.jsonl import print_json
from seedbed.track.run import Run
from seedbed.track.text import duration, one_line, safe

DAYS = 7
_CONCLUSION = re.compile(r"^- conclusion, ([^:\n]*): (.*(?:\n[ \t]+\S.*)*)", re.M)


def note(root: Path, name: str, conclusion: str) -> Path:
    """Add a dated conclusion to the run's entry, which is kept when the run folder is removed."""
    conclusion = one_line(conclusion)
    if not conclusion:
        raise UserError('the note is empty; write: seedbed note RUN "what we learned"')
    name = Path(name).name
    if not find_entry(read(path_of(root)), name):
        try:
            run = Run.open(root, name)
        except UserError:
            near = difflib.get_close_matches(name, [entry["run"] for entry in entries(root)], 3, 0.4)
            if not near:
                raise
            missing = f"there is no run {name!r}, and no entry for it in the journal"
            raise UserError(f"{missing}; nearest: {', '.join(near)}") from None
        record(run)
    with editing(root) as (journal, text):
        found = find_entry(text, name)
        assert found
        end = conclusions_end(text, found)
        line = f"\n- conclusion, {datetime.date.today():%Y-%m-%d}: {escaped(conclusion)}"
        text = text[: found.start()] + closed(found[0]) + text[found.end() : end] + line + text[end:]
        files.write_atomic(journal, text)
    return journal


def conclusions(root: Path, name: str) -> list[dict[str, str]]:
    """The conclusions on a run, oldest first: date and text."""
    text = read(path_of(root))
    found = find_entry(text, name)
    return _conclusions_in(text[found.end() : conclusions_end(text, found)]) if found else []


def _conclusions_in(text: str) -> list[dict[str, str]]:
    return [{"date": one[1], "text": " ".join(one[2].split())} for one in _CONCLUSION.finditer(text)]


def amend(root: Path, name: str, old: str, new: str) -> Path:
    """Replace the text of a conclusion, keeping its date; refused when it is no longer `old`."""
    new = one_line(new)
    if not new:
        raise UserError("the note is empty; write what was learned")
    with editing(root) as (journal, text):
        found = find_entry(text, name)
        where = (found.end(), conclusions_end(text, found)) if found else (0, 0)
        same = [one for one in _CONCLUSION.finditer(text, *where) if " ".join(one[2].split()) == old]
        if not same:
            raise UserError("somebody changed this note in the meantime; look at it again")
        text = text[: same[0].start(2)] + escaped(new) + text[same[0].end(2) :]
        files.write_atomic(journal, text)
    return journal


def entries(root: Path) -> list[dict[str, str]]:
    """Every entry in the order of the file: the run, its heading, and the text below."""
    _, *parts = re.split(r"^<!-- run (\S+) -->\n", read(path_of(root)), flags=re.M)
    out = []
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        heading, _, rest = body.replace(f"<!-- end {name} -->\n", "").strip("\n").partition("\n")
        out.append({"run": name, "title": heading.removeprefix("## "), "text": rest.strip("\n")})
    return out


def print_week(root: Path, as_json: bool) -> int:
    found = look(root, datetime.date.today())
    if as_json:
        return print_json(found)
    print(safe("\n".join(week_lines(found))))
    return 0


def look(root: Path, today: datetime.date) -> dict[str, Any]:
    """The entries of the week, and older ones that were concluded in it."""
    first = today - datetime.timedelta(days=DAYS - 1)
    found = [_entry(entry) for entry in entries(root)]
    new = [entry for entry in found if first.isoformat() <= entry["date"] <= today.isoformat()]
    late = [e for e in found if e not in new and any(c["date"] >= first.isoformat() for c in e["conclusions"])]
    clocks = [Run(Path(root) / entry["run"]).status().get("clock") for entry in new]
    seconds = math.fsum(c["train"] for c in clocks if isinstance(c, dict) and facts.is_number(c.get("train")))
    return {"from": first.isoformat(), "to": today.isoformat(), "seconds": seconds, "entries": new, "concluded_late": late}


def _entry(found: dict[str, str]) -> dict[str, Any]:
    date, _, rest = found["title"].partition(" · ")
    name, _, verdict = rest.partition(" · ")
    lines = {key: value for key, _, value in (line.removeprefix("- ").partition(": ") for line in found["text"].splitlines())}
    why = lines.get("why", "")
    return {
        "date": date,
        "run": found["run"],
        "title": verdict or name,
        "why": "" if why.startswith(("(not given", "(not said")) else why,
        "negative": verdict.startswith("negative"),
        "numbers": lines.get("verdict") or lines.get("best") or "",
        "conclusions": _conclusions_in(found["text"]),
    }


def week_lines(found: dict[str, Any]) -> list[str]:
    """The week as text: conclusions first, open entries last."""
    entries, late = found["entries"], found["concluded_late"]
    trained = f", {duration(found['seconds'])} of training" if found["seconds"] >= 1 else ""
    count = f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
    out = [f"{found['from']} to {found['to']}: {count}{trained}"]
    parts = {
        "concluded": [entry for entry in [*late, *entries] if entry["conclusions"]],
        "negative results": [e for e in entries if e["negative"] and not e["conclusions"]],
        "other results, no conclusion yet": [e for e in entries if not e["negative"] and not e["conclusions"]],
    }
    for title, members in parts.items():
        if members:
            out += ["", title]
        for entry in members:
            out.append(f"  {entry['date']}  {entry['run']}: {entry['title']}")
            out += [f"      why: {entry['why']}"] if entry["why"] else []
            out += [f"      {entry['numbers']}"] if entry["numbers"] and not entry["conclusions"] else []
            out += [f"      {one['date']}: {one['text']}" for one in entry["conclusions"]]
    if waiting := [entry["run"] for entry in entries if not entry["conclusions"]]:
        out += ["", f'{len(waiting)} wait for a conclusion: seedbed note {waiting[-1]} "what we learned"']
    return out if entries or late else [f"{out[0]}; a run that ends writes one"]
