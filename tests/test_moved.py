"""A run's folder that is renamed, removed or replaced while the run trains: noticed at the next write, and nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import TOY, assert_same_end, newest, resume, rows, start

from seedbed.errors import EXIT_USER
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.track import moved_folder
from seedbed.track.folders import FolderHandle
from seedbed.track.run import Run
from seedbed.train import checkpoint, loop


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


def before_step(step: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.take_step

    def take(job: loop.Job) -> None:
        if job.step + 1 == step:
            act()
        real(job)

    monkeypatch.setattr(loop, "take_step", take)


def test_renamed_folder_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    start(tmp_path, "straight", "every.sample=3")
    before_step(6, lambda: (tmp_path / "one").rename(tmp_path / "two"), monkeypatch)
    assert start(tmp_path, "one", "every.sample=3") == 0
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["straight", "two"], "nothing is left under the old name"
    assert_same_end(tmp_path, "straight", "two")
    assert Run.open(tmp_path, "two").status()["status"] == "done"
    reported = [event for event in Run.open(tmp_path, "two").events() if event["kind"] == "moved"]
    assert len(reported) == 1 and reported[0]["removed"] is False and reported[0]["was"].endswith("one")
    assert "was renamed: going on in" in capsys.readouterr().err


def test_folder_moved_out_of_runs_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").mkdir()
    before_step(6, lambda: (tmp_path / "runs" / "one").rename(tmp_path / "kept" / "mine"), monkeypatch)
    assert start(tmp_path / "runs", "one") == 0
    assert newest(tmp_path / "kept", "mine").step == 12 and not (tmp_path / "runs" / "one").exists()


def test_runs_folder_may_be_renamed_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_step(6, lambda: (tmp_path / "runs").rename(tmp_path / "old"), monkeypatch)
    assert start(tmp_path / "runs", "one") == 0
    assert newest(tmp_path / "old", "one").step == 12 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("step", [1, 4, 6, 11])
def test_removed_folder_is_recreated_and_the_run_is_saved_there(tmp_path: Path, monkeypatch, capsys, step: int) -> None:
    start(tmp_path, "straight")
    before_step(step, lambda: shutil.rmtree(tmp_path / "one"), monkeypatch)
    assert start(tmp_path, "one") == EXIT_USER
    printed = capsys.readouterr()
    assert "was removed: what is left of the run goes to" in printed.err
    assert not (tmp_path / "one").exists()
    monkeypatch.undo()
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    run = Run.open(tmp_path, "one-rescued")
    assert newest(tmp_path, "one-rescued").step >= step and run.status()["status"] in ("interrupted", "done")
    if run.status()["status"] == "interrupted":
        assert "seedbed resume one-rescued" in printed.out
        assert resume(tmp_path, "one-rescued") == 0
        assert "other code" not in capsys.readouterr().out, "code.patch and the recipe's file are there too"
    assert_same_end(tmp_path, "straight", "one-rescued")


def test_replaced_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace() -> None:
        (tmp_path / "one").rename(tmp_path / "away")
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "dear").write_text("to me")

    before_step(6, replace, monkeypatch)
    assert start(tmp_path, "one") == 0
    assert os.listdir(tmp_path / "one") == ["dear"] and newest(tmp_path, "away").step == 12


def test_removed_and_replaced_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace() -> None:
        shutil.rmtree(tmp_path / "one")
        (tmp_path / "one").mkdir()
        (tmp_path / "one-rescued").mkdir()

    before_step(6, replace, monkeypatch)
    assert start(tmp_path, "one") == EXIT_USER
    assert not list((tmp_path / "one").iterdir()) and not list((tmp_path / "one-rescued").iterdir())
    assert newest(tmp_path, "one-rescued-2").step == 6
    assert len(rows(tmp_path, "one-rescued-2")) == 6, "rows from before were still in the open file"


def test_removed_folder_that_cannot_be_recreated_stops_the_run_with_a_message(tmp_path: Path, monkeypatch, capsys) -> None:
    """No room beside it either: nothing can be saved, which is said once, and nothing hangs or recurses."""

    def fail(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("seedbed.track.moved_folder.recreate", fail)
    before_step(6, lambda: shutil.rmtree(tmp_path / "one"), monkeypatch)
    assert start(tmp_path, "one") == EXIT_USER
    printed = capsys.readouterr()
    assert printed.err.count("cannot be written (No space left on device)") == 1
    assert "no checkpoint could be written" in printed.out and "checkpoint saved" not in printed.out


def test_disk_that_does_not_answer_is_not_a_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    held = FolderHandle(tmp_path / "a")
    real = os.stat

    def stat(path, **how):
        if Path(os.fsdecode(path)) == tmp_path / "a":
            raise OSError(116, "Stale file handle")
        return real(path, **how)

    monkeypatch.setattr(os, "stat", stat)
    assert held.is_at(tmp_path / "a")
    monkeypatch.undo()
    held._key = (0, 0)  # a disk that numbers its folders anew
    assert not held.is_at(tmp_path / "a") and moved_folder.find(held) == tmp_path / "a"
    held.close()


def test_sample_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def sample(self, request, engine):
        raise OSError(28, "No space left on device")

    find(TOY)
    for module in [m for m in sys.modules.values() if getattr(m, "__file__", None) == TOY and hasattr(m, "Toy")]:
        monkeypatch.setattr(module.Toy, "sample", sample)  # a test may have imported the file under another name
    assert start(tmp_path, "one", "every.sample=3") == 0
    assert "no sample could be written" in capsys.readouterr().out


def test_open_folder_knows_its_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    held = FolderHandle(tmp_path / "a")
    assert held.is_at(tmp_path / "a") and moved_folder.find(held) == tmp_path / "a"
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").mkdir()
    assert not held.is_at(tmp_path / "a") and moved_folder.find(held) == tmp_path / "b"
    (tmp_path / "b").rmdir()
    assert moved_folder.find(held) is None
    held.close()


@pytest.mark.parametrize("behind", [False, True], ids=["", "behind the steps"])
@pytest.mark.parametrize("moment", ["aside", "files", "name"])
@pytest.mark.parametrize("act", ["rename", "remove"])
def test_folder_removed_during_a_save(tmp_path: Path, monkeypatch, act: str, moment: str, behind: bool) -> None:
    """The save fails where it is; the next one, or the last, is where the run is by then. Nothing is left under the old name."""
    monkeypatch.setattr(local, "saves_async", lambda device: behind)
    where = {"aside": "_make_aside", "files": "_write_part", "name": "_commit"}[moment]
    real = getattr(checkpoint, where)

    def go(*given):
        if (tmp_path / "one").exists():
            (tmp_path / "one").rename(tmp_path / "two") if act == "rename" else shutil.rmtree(tmp_path / "one")
        return real(*given)

    monkeypatch.setattr(checkpoint, where, go)
    assert start(tmp_path, "one", "every.eval=0") == {"rename": 0, "remove": EXIT_USER}[act]
    name = {"rename": "two", "remove": "one-rescued"}[act]
    assert os.listdir(tmp_path) == [name]
    assert newest(tmp_path, name).step >= {"rename": 12, "remove": 4}[act]


@pytest.mark.parametrize("behind", [False, True], ids=["", "behind the steps"])
@pytest.mark.parametrize("act", ["rename", "remove"])
def test_folder_removed_during_the_last_save(tmp_path: Path, monkeypatch, act: str, behind: bool) -> None:
    monkeypatch.setattr(local, "saves_async", lambda device: behind)
    real = checkpoint._commit

    def go(aside: Path, final: Path, *rest):
        if final.name == "step-000012" and (tmp_path / "one").exists():
            (tmp_path / "one").rename(tmp_path / "two") if act == "rename" else shutil.rmtree(tmp_path / "one")
        return real(aside, final, *rest)

    monkeypatch.setattr(checkpoint, "_commit", go)
    assert start(tmp_path, "one", "every.eval=0") == {"rename": 0, "remove": EXIT_USER}[act]
    name = {"rename": "two", "remove": "one-rescued"}[act]
    assert os.listdir(tmp_path) == [name] and newest(tmp_path, name).step == 12


@pytest.mark.slow
@pytest.mark.parametrize("act", ["rename", "remove"])
def test_moved_folder_of_a_run_in_its_own_process(tmp_path: Path, act: str) -> None:
    """From outside, at whatever moment it happens to be."""
    runs = tmp_path / "runs"
    words = ["train", TOY, "steps=100000", "every.eval=0", "every.save=50", "--run", "one", "--dirty", "--no-check"]
    child = subprocess.Popen(
        [sys.executable, "-m", "seedbed", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(runs.glob("one/checkpoints/step-*")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.02)
    if act == "rename":
        (runs / "one").rename(runs / "two")
        while "moved" not in (runs / "two" / "events.jsonl").read_text():
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.02)
        child.send_signal(signal.SIGTERM)
    else:
        while (runs / "one").exists():  # rm gives up where a file appears in a folder that it has just emptied
            subprocess.run(["rm", "-rf", str(runs / "one")], check=False)
    printed, _ = child.communicate(timeout=120)
    name = {"rename": "two", "remove": "one-rescued"}[act]
    assert child.returncode == {"rename": 143, "remove": 2}[act], printed[-2000:]
    assert f"seedbed resume {name}" in printed and "Traceback" not in printed
    step = newest(runs, name).step
    assert json.loads((runs / name / "status.json").read_text())["step"] == step
    assert [row["step"] for row in rows(runs, name)] == list(range(1, step + 1))
