"""JOURNAL.md next to the runs: a dated entry per run, generated except for the conclusion, which the user writes.

The generated part of an entry is between two comments and may be rewritten; everything else is never changed.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from seedbed.config import diff, flat
from seedbed.errors import UserError
from seedbed.report import facts, run_report
from seedbed.track import code, files
from seedbed.track.events import is_at_least
from seedbed.track.run import Run, full_name
from seedbed.track.text import format_value, one_line

_HEAD = '# Journal\n\nOne entry per run, oldest first; negative results stay. Add a conclusion with `seedbed note RUN "..."`.\n'
_MAX_CHANGES = 12
_OPEN = re.compile(r"^- conclusion: open .*\n", re.M)
# The conclusions directly below the generated part, with indented lines that the user may have added.
_CONCLUSIONS = re.compile(r"(?:\n- conclusion, .*(?:\n[ \t]+\S.*)*)*")
MAX_JOURNAL = 256 << 20


def path_of(root: Path) -> Path:
    return Path(root).absolute().parent / "JOURNAL.md"


def record(run: Run) -> Path:
    """Write or update the run's entry; notes and other text of the user are kept."""
    return record_as(run.path.parent, run.name, _facts(run))


def record_as(root: Path, name: str, parts: list[str]) -> Path:
    """Write or update the entry of a run or a sweep: a heading, then its facts."""
    invitation = f'- conclusion: open (`seedbed note {name} "..."`)'
    entry = "\n".join([f"<!-- run {name} -->", *parts, invitation, f"<!-- end {name} -->"])
    with editing(root) as (journal, text):
        if old := find_entry(text, name):
            concluded = conclusions_end(text, old) > old.end()
            text = text[: old.start()] + (closed(entry) if concluded else entry) + text[old.end() :]
        else:
            text = (text or _HEAD).rstrip("\n") + f"\n\n{entry}\n"
        files.write_atomic(journal, text)
    return journal


def finish(run: Run, warn: Callable[[str], None]) -> None:
    """Write report and journal entry at the end of a run; failures are warnings."""
    # The runs of a sweep share one entry, which the sweep writes.
    entry = () if run.config_json().get("sweep") else (("journal entry", record),)
    for what, make in (("report", run_report.write), *entry):
        try:
            make(run)
        except Exception as error:
            # Training is done and saved: a failing report must not fail the run.
            reason = error if isinstance(error, UserError | OSError) else f"{type(error).__name__}: {error}"
            warn(f"the {what} could not be written: {reason}")


def verdict(run: Run, parent: Run | None, metric: str | None = None) -> tuple[str, str]:
    """A title in a few words, and the numbers behind it with their noise band."""
    rows, events, status = run.rows(), run.events(), run.status()
    shown = [run_report.outcome(run, status, rows)]
    if loss := run_report.loss_line(rows):
        shown.append(f"loss {loss}")
    if evaluation := run_report.evaluation_line(events):
        shown.append(f"evaluation: {evaluation}")
    word = facts.final_status(run, status)
    if word in ("nan", "diverged", "failed"):
        return f"negative result: {word}", "; ".join(shown)
    if word != "done" or parent is None:
        return word, "; ".join(shown)
    from seedbed.report.comparison import against

    title, numbers = against(run, parent, metric)
    return title, "; ".join([*shown, numbers])


def _facts(run: Run) -> list[str]:
    config = run.config_json()
    parent = open_optional(run.path.parent, config.get("parent"))
    title, numbers = verdict(run, parent)
    base, changes = _changes(config, parent)
    picture = run.path / run_report.PICTURE
    relative = os.path.relpath(picture, path_of(run.path.parent).parent)
    return [
        f"## {str(config.get('created'))[:10]} · {run.name} · {title}",
        f"- why: {escaped(one_line(str(config.get('why') or ''))) or '(not given; -m WHY sets it)'}",
        f"- recipe: {full_name(config['recipe'], config['preset'])}, {code.describe(run.code_json())}",
        f"- changed against {base}: {changes}",
        f"- verdict: {numbers}",
        *_preflight(run),
        *_incidents(run),
        *([f"- picture: ![loss of {run.name}]({relative})"] if picture.exists() else []),
        f"- reproduce: `{run.command()}`",
    ]


def _preflight(run: Run) -> list[str]:
    """A line for runs that started unchecked or in spite of a failed check."""
    found = next((e for e in run.events() if e.get("kind") == "preflight"), {})
    outcomes = {"skipped": "skipped", "forced": f"forced past {', '.join(map(str, found.get('errors', [])))}"}
    return [f"- preflight: {outcomes[found['outcome']]}"] if found.get("outcome") in outcomes else []


def _incidents(run: Run) -> list[str]:
    """Warnings and errors by number, and the first of each kind in words, for the first three kinds."""
    found = [e for e in run.events() if is_at_least("warning", e)]
    first = {str(e["kind"]): e for e in reversed(found) if e.get("what")}
    words = [f"  - step {e.get('step')}, {kind}: {e['what']}" for kind, e in list(first.items())[::-1][:3]]
    words = ["  " + escaped(one_line(text)) for text in words]
    return [f"- incidents: {escaped(run_report.incident_line(found))}", *words] if found else []


def _changes(config: dict[str, Any], parent: Run | None) -> tuple[str, str]:
    base, words = "the preset", [f"{key}={format_value(value)}" for key, value in (config.get("changes") or {}).items()]
    if parent is not None:
        moved = diff(flat(parent.config_json()["config"]), flat(config["config"]))
        base = f"parent {parent.name}"
        words = [f"{key} {format_value(old)} -> {format_value(new)}" for key, (old, new) in moved.items()]
    more = [f"and {len(words) - _MAX_CHANGES} more"] if len(words) > _MAX_CHANGES else []
    return base, escaped(one_line(", ".join([*words[:_MAX_CHANGES], *more]))) or "nothing"


def open_optional(root: Path, name: str | None) -> Run | None:
    """The run of this name, or None where it is missing or damaged."""
    with contextlib.suppress(UserError):
        if name:
            run = Run.open(root, name)
            run.config_json()
            return run
    return None


def conclusions_end(text: str, found: re.Match[str]) -> int:
    below = _CONCLUSIONS.match(text, found.end())
    assert below, "the pattern matches nothing as well"
    return below.end()


def closed(entry: str) -> str:
    """The generated part of an entry without the placeholder for a conclusion."""
    return _OPEN.sub("", entry)


def find_entry(text: str, name: str) -> re.Match[str] | None:
    """The generated part of an entry."""
    mark = re.escape(name)
    return re.search(rf"^<!-- run {mark} -->\n.*?^<!-- end {mark} -->$", text, re.M | re.S)


@contextlib.contextmanager
def editing(root: Path) -> Iterator[tuple[Path, str]]:
    """The journal's path and text, locked until the block has written it."""
    # The lock is a separate file: the journal is replaced on every change, and its lock would go with the old file.
    Path(root).mkdir(parents=True, exist_ok=True)
    fd = os.open(Path(root) / ".journal-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        journal = path_of(root)
        yield journal, read(journal)
    finally:
        os.close(fd)


def read(journal: Path) -> str:
    try:
        return files.read_regular(journal, MAX_JOURNAL).decode()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{journal} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{journal} is not UTF-8 text (byte {error.start}); it was left as it is") from None


def escaped(text: str) -> str:
    """Escape comment markers in text that the user typed."""
    return text.replace("<!--", "&lt;!--").replace("-->", "--&gt;")
