"""Where the wall time of a run's process went: in its folder, its report and on the screen, anew for every start."""

import hashlib
import json
from pathlib import Path

import pytest
from helpers import newest, resume, start, stop_at

from seedbed.report import verbs
from seedbed.track.clocks import PARTS
from seedbed.track.run import Run
from seedbed.train import loop


def test_wall_time_is_split_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path, "one", "every.eval=4", "every.sample=6") == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("wall ")]
    wall = Run.open(tmp_path, "one").status()["wall"]
    assert set(wall) <= set(PARTS) and {"start", "data", "build", "train", "eval", "save", "sample", "report"} <= set(wall)
    assert float(line.split()[1]) == pytest.approx(sum(wall.values()), abs=0.2)
    assert wall["other"] <= max(0.05 * sum(wall.values()), 0.5), "what takes time has a name"
    report = (tmp_path / "one" / "report.md").read_text()
    (reported,) = [line for line in report.splitlines() if line.startswith("- time: ")]
    known = wall.keys() - {"report", "other", "exit"}  # those of the report itself are known after it is written
    assert all(PARTS[name] in reported for name in known if wall[name] > 0.06)
    end = next(e for e in Run.open(tmp_path, "one").events() if e["kind"] == "end")
    assert end["wall"]["train"] == pytest.approx(wall["train"], abs=0.05)
    verbs.show(tmp_path, "one", as_json=False)
    assert "  time  " in capsys.readouterr().out


def test_wall_time_of_a_resumed_run(tmp_path: Path, monkeypatch) -> None:
    stop_at(5, monkeypatch)
    assert start(tmp_path, "two") == 143
    first = Run.open(tmp_path, "two").status()
    assert resume(tmp_path, "two") == 0
    status = Run.open(tmp_path, "two").status()
    assert status["wall"]["train"] < status["clock"]["train"]
    assert status["clock"]["train"] >= first["clock"]["train"]
    reported = (tmp_path / "two" / "report.md").read_text()
    assert "with earlier starts" in reported or status["clock"]["train"] - status["wall"]["train"] < 0.05


def test_wall_time_of_an_old_checkpoint(tmp_path: Path, monkeypatch) -> None:
    stop_at(5, monkeypatch)
    start(tmp_path, "old")
    path = newest(tmp_path, "old").path
    state = json.loads((path / "state.json").read_text())
    state["clock"] = {"train": 100.0, "compile": 1.0}
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = hashlib.sha256((path / "state.json").read_bytes()).hexdigest()
    del manifest["hash"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    assert resume(tmp_path, "old") == 0
    status = Run.open(tmp_path, "old").status()
    assert status["clock"]["train"] > 100.0 > status["wall"]["train"]
    assert "train 100." in (tmp_path / "old" / "report.md").read_text()


def test_wall_time_of_a_failed_run(tmp_path: Path, monkeypatch) -> None:
    def fail(job: loop.Job) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(loop, "take_step", fail)
    with pytest.raises(RuntimeError):
        start(tmp_path, "failed")
    assert "build" in Run.open(tmp_path, "failed").status()["wall"]
