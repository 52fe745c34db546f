"""The tour: what it would type on each machine, and what it reads from runs, checks and their files."""

import json
import sys
from pathlib import Path

import pytest
import tour

from seedbed.report.findings import Finding, Report


def test_every_preset_is_checked_on_a_gpu_and_every_demo_trained_everywhere(tmp_path: Path) -> None:
    gpu, cpu = (tour.rows_for(machine, None, 10) for machine in ("gpu", "cpu"))
    assert {row.words[1] for row in gpu if row.words[:1] == ("check",)} == set(tour._presets())
    for rows in (gpu, cpu):
        assert {f"train {name}/demo" for name in tour.recipes.names()} <= {row.name for row in rows}
        assert len({row.name for row in rows}) == len(rows)
    needs = {row.name: row.needs for row in gpu}
    assert needs["train gpt/shakespeare"] == "tinyshakespeare.txt" and needs["check flow/cifar10"] == "cifar10"
    assert not needs["train world/box64 steps=2600"] and not needs["train gpt/gpt2-124m"]
    (tmp_path / "tinyshakespeare.txt").write_text("To be")
    assert not {row.name: row.needs for row in tour.rows_for("gpu", tmp_path, 10)}["train gpt/shakespeare"]


def test_alarms_and_slow_checks_are_read_from_what_a_check_prints() -> None:
    found = [
        Finding("M1", "birth", "pass", "err", 0.4, "fine", "", "", "", 1.0, 2.0),
        Finding("O4", "rates", "fail", "warn", 12.5, "what", "where", "why", "fix"),
        Finding("T4", "times", "fail", "note", 3.0, "what", "where", "why", "fix"),
        Finding("L0", "loop", "fail", "err", 36.0, "what", "where", "why", "fix"),
    ]
    lines = [f.row() for f in found] + [line for f in found if f.status == "fail" for line in f.lines("gpt/demo")]
    read = tour.of_log("\n".join([Report("gpt/demo").head(), *lines]))
    assert read == {"alarms": ["O4", "L0"], "slowest": "L0 36 O4 12.5 T4 3"}


def test_tour_row_is_read_from_its_run_and_compared_with_its_limit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    wall = {"start": 4.0, "train": 20.0, "other": 0.5}
    (run / "status.json").write_text(json.dumps({"status": "done", "step": 9, "wall": wall}))
    events = [
        {"step": 0, "kind": "preflight", "outcome": "passed", "errors": [], "warnings": ["A2"]},
        {"step": 5, "kind": "blind", "what": "x", "where": "y", "why": "z", "fix": "w"},
        {"step": 9, "kind": "eval", "loss": 1.25, "perplexity": 3.0},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    found = tour.of_run(run)
    assert found["split"] == wall and found["alarms"] == ["A2", "blind"] and found["metric"] == "loss 1.2500"
    row = tour._train("flow/s2-32", over_training=30.0)
    assert tour.judged(row, {**found, "wall": 49.0, "exit": 0}, 1) == {"limit": 50.0, "kept": True}
    assert not tour.judged(row, {**found, "wall": 51.0, "exit": 0}, 1)["kept"]
    assert not tour.judged(row, {**found, "wall": 9.0, "exit": "time-out"}, 1)["kept"]
    assert tour.of_run(tmp_path / "none") == {}, "a run that never began leaves a row without a split"
    shown = {
        **found,
        **tour.judged(row, {**found, "wall": 51.0, "exit": 0}, 1),
        "command": "c",
        "start": 1,
        "wall": 51.0,
        "exit": 0,
    }
    table = tour.table({"a": shown, "b": {"skipped": "skipped: needs cifar10"}})
    assert "50 MISS" in table and "skipped: needs cifar10" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1


@pytest.mark.slow
def test_tour_writes_each_row_as_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDBED_RESULTS", str(tmp_path / "results"))
    words = ["tour.py", "--machine", "cpu", "--only", "^(runs list|runs show|overview)$", "--folder", str(tmp_path / "place")]
    monkeypatch.setattr(sys, "argv", words)
    tour.main()
    (path,) = (tmp_path / "results").glob("tour-cpu-*.json")
    facts = json.loads(path.read_text())
    assert [row["exit"] for row in facts["figures"]["rows"].values()] == [0, 0, 0]
    assert facts["hardware"]["num_cores"] and "seedbed runs show used" in path.with_suffix(".md").read_text()
