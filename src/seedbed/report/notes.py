"""Conclusions that people write into the journal, and reading its entries."""

import datetime
import difflib
import re
from pathlib import Path

from seedbed.errors import UserError
from seedbed.report.journal import closed, conclusions_end, editing, escaped, find_entry, path_of, read, record
from seedbed.track import files
from seedbed.track.run import Run
from seedbed.track.text import one_line

_CONCLUSION = re.compile(r"\n- conclusion, ([^:\n]*): (.*(?:\n[ \t]+\S.*)*)")


def text(root: Path) -> str:
    """The text of the journal; empty when there is none."""
    return read(path_of(root))


def note(root: Path, name: str, conclusion: str) -> Path:
    """Add a dated conclusion to the run's entry, which is kept when the run folder is removed."""
    conclusion = one_line(conclusion)
    if not conclusion:
        raise UserError('the note is empty; write: seedbed note RUN "what we learned"')
    name = Path(name).name
    if not find_entry(read(path_of(root)), name):
        record(_open_or_suggest(root, name))
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
    below = text[found.end() : conclusions_end(text, found)] if found else ""
    return [{"date": one[1], "text": " ".join(one[2].split())} for one in _CONCLUSION.finditer(below)]


def amend(root: Path, name: str, old: str, new: str) -> Path:
    """Replace the text of a conclusion, keeping its date; refused when it is no longer `old`."""
    new = one_line(new)
    if not new:
        raise UserError("the note is empty; write what was learned")
    with editing(root) as (journal, text):
        found = find_entry(text, name)
        end = conclusions_end(text, found) if found else 0
        start = found.end() if found else 0
        same = [one for one in _CONCLUSION.finditer(text, start, end) if " ".join(one[2].split()) == old]
        if not same:
            raise UserError("somebody changed this note in the meantime; look at it again")
        text = text[: same[0].start(2)] + escaped(new) + text[same[0].end(2) :]
        files.write_atomic(journal, text)
    return journal


def entries(root: Path) -> list[dict[str, str]]:
    """Every entry in the order of the file: the run, its heading, and the text below."""
    text = read(path_of(root))
    starts = list(re.finditer(r"^<!-- run (\S+) -->\n", text, re.M))
    out = []
    for index, start in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(text)
        body = text[start.end() : end].replace(f"<!-- end {start[1]} -->\n", "").strip("\n")
        heading, _, rest = body.partition("\n")
        out.append({"run": start[1], "title": heading.removeprefix("## "), "text": rest.strip("\n")})
    return out


def _open_or_suggest(root: Path, name: str) -> Run:
    try:
        return Run.open(root, name)
    except UserError:
        near = difflib.get_close_matches(name, [entry["run"] for entry in entries(root)], 3, 0.4)
        if near:
            raise UserError(f"there is no run {name!r}, and no entry for it in the journal; nearest: {', '.join(near)}") from None
        raise
