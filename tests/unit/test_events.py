"""Event kinds: every kind that the package emits is registered, and every alarm reaches report, journal, pages and mirrors."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from track_samples import make, train

from seedbed.report import html_report, journal, notes, run_report
from seedbed.report.mirrors import base
from seedbed.serve import views
from seedbed.serve.run_index import RunIndex
from seedbed.track import events
from seedbed.track.run import Run
from seedbed.train.alarm_tables import read_alarms

SRC = ROOT / "src" / "seedbed"
# What these helpers write as an event, and the place of the kind among their arguments.
EMITTERS = {"event": 1, "Alarm": 0, "Limits": 0, "_report": 2}


def emitted(path: Path) -> Iterator[str]:
    """Kinds that a source file writes: literal arguments of the emitters, and `kind = "..."` of watchers."""
    tree = ast.parse(path.read_text())
    raises = any(isinstance(node, ast.Name) and node.id == "Alarm" for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [inner for one in node.args for inner in (one.value.elts if _is_starred_tuple(one) else [one])]
            place = EMITTERS.get(name)
            if place is not None and len(given) > place and isinstance(given[place], ast.Constant):
                yield given[place].value
        elif raises and isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "kind":
            yield ast.literal_eval(node.value)


def _is_starred_tuple(node: ast.AST) -> Any:
    return isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple)


EMITTED = {kind: path for path in sorted(SRC.rglob("*.py")) for kind in emitted(path)}
EMITTED |= {kind: path for path in sorted((SRC / "recipes").rglob("alarms.toml")) for kind in read_alarms(path)}
ALARMS = [kind for kind, known in events.KINDS.items() if known.severity in ("warning", "error")]


def test_events_are_found_in_the_source():
    assert {"spike", "nonfinite", "eval", "stall", "out_of_memory", "host_leak", "data_wait", "moved", "edited"} <= set(EMITTED)
    assert sum(path.is_relative_to(SRC / "recipes") for path in EMITTED.values()) >= 10


def test_every_emitted_event_kind_is_registered():
    assert not {kind: str(path.relative_to(SRC)) for kind, path in EMITTED.items() if kind not in events.KINDS}


def test_every_alarm_of_a_recipe_is_at_least_a_warning():
    raised = [kind for kind, path in EMITTED.items() if path.is_relative_to(SRC / "recipes")]
    assert [events.KINDS[kind].severity for kind in raised] == ["warning"] * len(raised)


def run_with(root: Path, kind: str, **facts: Any) -> Run:
    run = train(make(root, "one"))
    run.event(5, kind, what=f"this is what {kind} says", **facts)
    run.close()
    return run


class Sink:
    """Keeps the texts that a mirror would send."""

    def __init__(self, run: Run):
        self.run, self.texts = run, {}

    def text(self, step: int, title: str, text: str) -> None:
        self.texts[title] = text


@pytest.mark.parametrize("kind", ALARMS)
def test_every_alarm_reaches_report_journal_page_and_mirrors(tmp_path: Path, kind: str):
    shown_everywhere(run_with(tmp_path / "runs", kind), kind)


def shown_everywhere(run: Run, kind: str) -> None:
    written = run.events()
    says = f"this is what {kind} says"
    assert f"1 {kind}" in run_report.incident_line(written)
    journal.record(run)
    entry = notes.read(notes.path_of(run.path.parent))
    assert f"1 {kind}" in entry and says in entry
    [shown] = [e for e in views.time_line(RunIndex(run.path.parent), run.name) if e["kind"] == kind]
    assert shown["what"] == says and shown["severity"] in ("warning", "error")
    page = html_report._events_section(written)
    assert says in page and "No spikes" not in page
    sink: Any = Sink(run)
    base.relay(sink, base.Item(kind, written[-1], 0.0))
    assert says in sink.texts[f"event/{kind}"]


def test_kind_of_a_users_recipe_is_shown_without_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(events, "KINDS", dict(events.KINDS))
        events.register("error", my_alarm="my metric left its range")
        run = run_with(tmp_path / "runs", "my_alarm")
    assert "my_alarm" not in events.KINDS and run.events()[-1]["severity"] == "error"
    shown_everywhere(run, "my_alarm")


def test_unregistered_alarm_with_a_fix_counts_as_a_warning(tmp_path: Path):
    run = run_with(tmp_path / "runs", "unheard_of", fix="do this")
    shown_everywhere(run, "unheard_of")
    assert events.severity_of({"kind": "unheard_of", "fix": ""}) == "warning"  # events of older runs carry no severity
    assert events.severity_of({"kind": "unheard_of"}) == "info"


@pytest.mark.parametrize("event", [{}, {"kind": []}, {"kind": None, "severity": []}, {"kind": "spike", "severity": "loud"}])
def test_severity_of_damaged_events_is_always_known(event: dict[str, Any]):
    assert events.severity_of(event) in events.LEVELS and events.has_section(event) is False


def test_ordinary_event_is_no_incident(tmp_path: Path):
    run = train(make(tmp_path / "runs", "one"))
    assert run_report.incident_line(run.events()) == ""
    assert not any("severity" in event for event in run.events())


def test_every_event_kind_is_in_the_docs():
    text = (ROOT / "docs" / "runs.md").read_text()
    recipes = {kind for kind, path in EMITTED.items() if path.is_relative_to(SRC / "recipes")}
    for kind, known in events.KINDS.items():
        rows = [line for line in text.splitlines() if line.startswith(f"| {known.severity} |")]
        assert kind in recipes or any(f"`{kind}`" in row for row in rows), kind
