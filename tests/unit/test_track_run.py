"""The run folder: made whole or not at all, held by one process, readable after any accident."""

import contextlib
import errno
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from track_samples import BASE, CODE, make

from seedbed.config import digest, override
from seedbed.config.saved import from_json
from seedbed.errors import UserError
from seedbed.track import files, folders
from seedbed.track.changes import change_config, rewind
from seedbed.track.run import Run
from seedbed.track.run_names import run_names

HOLD = """
import sys, time
from pathlib import Path
from seedbed.track.changes import change_config, rewind
from seedbed.track.run import Run
with Run(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def holder(run: Run):
    """Another process that has the run."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


# ---- making and finding ----------------------------------------------------------------------------------------------


def test_new_run_holds_what_it_was_made_of(tmp_path: Path):
    make(tmp_path, "parent")
    run = make(tmp_path, "first", "steps=7", "optim.lr=0.5", why="to see", parent="parent", code={**CODE, "patch": "+ a line\n"})
    facts = run.config_json()
    assert from_json(BASE, facts["config"]) == override(BASE, ["steps=7", "optim.lr=0.5"])
    assert facts["hash"] == digest(override(BASE, ["steps=7", "optim.lr=0.5"]))
    assert facts["changes"] == {"optim.lr": 0.5, "steps": 7}
    assert {k: facts[k] for k in ("recipe", "preset", "parent", "why", "version")} == {
        "recipe": "gpt",
        "preset": "demo",
        "parent": "parent",
        "why": "to see",
        "version": "0.0.1",
    }
    assert abs((datetime.now(UTC) - datetime.fromisoformat(facts["created"])).total_seconds()) < 60
    assert json.loads((run.path / "code.json").read_text()) == CODE
    assert (run.path / "code.patch").read_text() == "+ a line\n"
    assert sorted(os.listdir(run.path)) == ["checkpoints", "code.json", "code.patch", "config.json", "samples"]


def test_patch_is_absent_without_changes(tmp_path: Path):
    assert not (make(tmp_path, code={**CODE, "patch": ""}).path / "code.patch").exists()


def test_command_repeats_the_config(tmp_path: Path):
    settings = ["steps=7", "optim.lr=0.5", "model.sizes=5,6", "budget=5m", "data.source=my text; rm -rf *", "compile=blocks"]
    run = make(tmp_path, "first", *settings)
    words = shlex.split(run.command())
    assert words[:3] == ["seedbed", "train", "gpt/demo"]
    assert override(BASE, words[3:]) == override(BASE, settings)


def test_command_of_a_users_file_names_it_from_here(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make(tmp_path / "runs", recipe=str(tmp_path / "mine.py"), preset="small")
    assert run.command() == "seedbed train mine.py:small"
    assert make(tmp_path / "runs", None, recipe=str(tmp_path / "mine.py"), preset="small").name.split("-")[3] == "mine"


def test_resumed_run_takes_its_new_settings_as_its_own(tmp_path: Path):
    run = make(tmp_path, "first", "steps=7", why="kept")
    change_config(run, override(BASE, ["steps=9", "batch=16"]), BASE)
    facts = run.config_json()
    assert facts["changes"] == {"steps": 9, "batch": 16}
    assert facts["why"] == "kept"
    assert from_json(BASE, facts["config"]) == override(BASE, ["steps=9", "batch=16"])


@pytest.mark.parametrize("kind", ["run", "folder", "file", "dead link"])
def test_existing_name_is_refused_and_left_alone(tmp_path: Path, kind: str):
    path = tmp_path / "first"
    if kind == "run":
        make(tmp_path, "first", why="the old one")
    elif kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(tmp_path / "nowhere")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError, match="first exists already"):
        make(tmp_path, "first", why="the new one")
    assert sorted(os.listdir(tmp_path)) == before
    assert kind != "run" or Run.open(tmp_path, "first").config_json()["why"] == "the old one"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/abs", ".hidden", "-flag", "a b", "a\nb", "ä", "x" * 101, "a;b", "a\0b"]
)
def test_run_name_with_special_characters_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match="cannot name a run"):
        make(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()


def test_run_name_goes_to_one_of_many_processes(tmp_path: Path):
    def attempt(index: int) -> bool:
        try:
            make(tmp_path, "first", why=str(index))
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(16))) == 1
    assert os.listdir(tmp_path) == ["first"]
    assert Run.open(tmp_path, "first").config_json()["preset"] == "demo"


def test_run_names_of_simultaneous_runs_differ(tmp_path: Path, monkeypatch):
    moment = datetime(2026, 3, 1, 12, tzinfo=UTC)

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return moment

    monkeypatch.setattr("seedbed.track.run.datetime.datetime", Frozen)
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: make(tmp_path, None), range(40)))
    assert len({run.name for run in runs}) == 40 == len(run_names(tmp_path))
    assert all(run.name.startswith("2026-03-01-gpt-") and len(run.name.split("-")) == 6 for run in runs)


def test_full_disk_makes_no_half_run(tmp_path: Path, monkeypatch):
    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(UserError, match=r"cannot be created in .*No space left"):
        make(tmp_path / "runs", "first")
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_process_killed_while_making_a_run_leaves_all_of_it_or_nothing(tmp_path: Path):
    outcomes = set()
    for index, survives in enumerate([0, 1, 50, 400, 800, 1200, 1500, 10**9]):
        root = tmp_path / str(index)
        child = os.fork()
        if child == 0:
            _die_after(survives)
            make(root, "first", code={**CODE, "patch": "x" * 300})
            os._exit(0)
        os.waitpid(child, 0)
        found = run_names(root)
        outcomes.add(len(found))
        if found:
            run = Run.open(root, "first")
            assert run.config_json()["hash"] == digest(BASE) and run.code_json() == CODE
            assert (run.path / "code.patch").read_text() == "x" * 300
        else:
            make(root, "first")
    assert outcomes == {0, 1}, "the drill must see both ends"


def _die_after(num_bytes: int) -> None:
    left = num_bytes

    def write(fd: int, data: bytes) -> None:
        nonlocal left
        os.write(fd, data[:left])
        left -= len(data)
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    files.write = write


def test_root_that_is_a_file_is_explained(tmp_path: Path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="cannot be created in"):
        make(tmp_path / "runs", "first")


def test_parent_must_exist(tmp_path: Path):
    make(tmp_path, "first")
    with pytest.raises(UserError, match=r"no run 'frist'.*nearest: first"):
        make(tmp_path, "second", parent="frist")
    assert run_names(tmp_path) == ["first"]


def test_run_leftovers_of_a_killed_process_are_removed(tmp_path: Path):
    (tmp_path / ".new-1-1.tmp").mkdir()
    (tmp_path / ".new-1-1.tmp" / "config.json").touch()
    os.utime(tmp_path / ".new-1-1.tmp", (1, 1))
    (tmp_path / ".new-2-2.tmp").mkdir()
    make(tmp_path, "first")
    assert sorted(os.listdir(tmp_path)) == [".new-2-2.tmp", "first"]


def test_run_is_found_by_name_or_by_path(tmp_path: Path, monkeypatch):
    make(tmp_path / "runs", "first")
    monkeypatch.chdir(tmp_path)
    for typed in ("first", "runs/first", "runs/first/", "./runs/first", str(tmp_path / "runs" / "first")):
        assert Run.open(Path("runs"), typed).name == "first"


MISSING = ["fist", "other/first", "../first", "first/samples", "", ".", "..", ".hidden", "first\0", "/etc"]


@pytest.mark.parametrize("typed", MISSING)
def test_run_that_is_not_there_is_answered_with_the_nearest(tmp_path: Path, typed: str):
    make(tmp_path / "runs", "first")
    (tmp_path / "runs" / ".hidden").mkdir()
    (tmp_path / "first").mkdir()
    with pytest.raises(UserError, match="nearest: first"):
        Run.open(tmp_path / "runs", typed)


def test_run_missing_error_says_how_to_start_one(tmp_path: Path):
    with pytest.raises(UserError, match="holds no runs yet; start one with: seedbed train"):
        Run.open(tmp_path / "nowhere", "first")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"recipe": "gpt"}', '{"recipe": 1, "preset": "a", "config": {}}', "\xff"]
)
def test_damaged_config_is_named(tmp_path: Path, content: str):
    run = make(tmp_path, "first")
    (run.path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        run.config_json()


# ---- the lock --------------------------------------------------------------------------------------------------------


def test_run_in_use_names_the_process_that_has_it(tmp_path: Path):
    run = make(tmp_path)
    with holder(run) as process:
        assert run.is_running()
        with pytest.raises(UserError, match=f"in use by process {process.pid} on {os.uname().nodename} since 20"), run.lock():
            pytest.fail("two processes hold one run")


def test_killed_process_frees_the_run(tmp_path: Path):
    run = make(tmp_path)
    with holder(run) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not run.is_running()
        with run.lock():
            assert run.is_running()
    assert not run.is_running()


def test_run_lock_is_not_reentrant(tmp_path: Path):
    run = make(tmp_path)
    with run.lock(), pytest.raises(UserError, match=f"process {os.getpid()}"), run.lock():
        pass
    with run.lock():
        pass


def test_lock_is_free_after_an_error(tmp_path: Path):
    run = make(tmp_path)
    with pytest.raises(ZeroDivisionError), run.lock():
        raise ZeroDivisionError
    assert not run.is_running()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path):
    run = make(tmp_path)
    parent = os.fork()
    if parent == 0:
        with run.lock():
            child = os.fork()
            if child == 0:
                time.sleep(20)
                os._exit(0)
            (tmp_path / "child").write_text(str(child))
            os._exit(0)  # as abrupt as SIGKILL: the block is never left
    os.waitpid(parent, 0)
    child = int((tmp_path / "child").read_text())
    try:
        deadline = time.monotonic() + 10
        while run.is_running() and time.monotonic() < deadline:
            time.sleep(0.01)  # the child may not have run at all yet
        os.kill(child, 0)
        assert not run.is_running()
    finally:
        os.kill(child, signal.SIGKILL)


def test_listing_never_keeps_a_run_from_starting(tmp_path: Path):
    run = make(tmp_path)
    looking = [True]

    def look() -> None:
        while looking[0]:
            Run(run.path).is_running()

    with ThreadPoolExecutor(2) as pool:
        watchers = [pool.submit(look) for _ in range(2)]
        try:
            for _ in range(20):
                with run.lock():
                    pass
        finally:
            looking[0] = False
        assert all(watcher.exception() is None for watcher in watchers)


def test_run_lock_removes_temporary_files(tmp_path: Path):
    run = make(tmp_path)
    (run.path / ".config.json.12-3.tmp").write_text("half")
    with run.lock():
        assert not (run.path / ".config.json.12-3.tmp").exists()


def test_lock_file_with_nonsense_in_it_breaks_nothing(tmp_path: Path):
    run = make(tmp_path)
    with holder(run):
        (run.path / "lock").write_text("[]")
        with pytest.raises(UserError, match="in use by another process"), run.lock():
            pass


# ---- rows, events, status --------------------------------------------------------------------------------------------


def test_rows_and_events_round_trip(tmp_path: Path):
    run = make(tmp_path)
    rows = [{"step": n, "loss": 1 / (n + 1), "lrs": {"main": 1e-3}, "note": "grün"} for n in range(50)]
    for row in rows:
        run.row(row)
    run.event(10, "eval", valid_loss=0.5)
    assert run.rows() == rows, "readable while the files are open"
    assert [(e["step"], e["kind"], e["valid_loss"]) for e in run.events()] == [(10, "eval", 0.5)]
    assert list(run.events()[0]) == ["step", "kind", "valid_loss", "time"]
    run.close()
    run.row({"step": 50, "loss": 0.0})
    assert len(run.rows()) == 51


def test_rows_are_strict_json(tmp_path: Path):
    run = make(tmp_path)
    run.row({"step": 1, "loss": math.nan, "inner": {"list": [math.inf, 1.0, (-math.inf,)]}})
    run.row({"step": np.int64(2), "loss": np.float32(0.5), "zero": np.array(1.5), "bad": np.float32("nan")})
    run.event(3, "sample", text="two\nlines \x00 \u2028 🌱", path=Path("a"))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    texts = [*(run.path / "rows.jsonl").read_text().split("\n"), *(run.path / "events.jsonl").read_text().split("\n")]
    values = [json.loads(text, parse_constant=refuse) for text in texts if text]
    assert values[0] == {"step": 1, "loss": None, "inner": {"list": [None, 1.0, [None]]}}
    assert values[1] == {"step": 2, "loss": 0.5, "zero": 1.5, "bad": None}
    assert values[2]["text"] == "two\nlines \x00 \u2028 🌱" and values[2]["path"] == "a"


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b"\x00\x00\x00\x00", b'"text"\n', b"17\n", b"[" * 100_000, b"\xff\xfe\n"])
def test_damaged_tail_costs_only_itself(tmp_path: Path, tail: bytes):
    run = make(tmp_path)
    run.row({"step": 1, "loss": 1.0})
    run.row({"step": 2, "loss": 0.5})
    run.close()
    with open(run.path / "rows.jsonl", "ab") as file:
        file.write(tail)
    assert [row["step"] for row in run.rows()] == [1, 2]
    run.row({"step": 3, "loss": 0.2})
    assert [row["step"] for row in run.rows()] == [1, 2, 3]
    rewind(run, 3)
    assert [json.loads(line)["step"] for line in (run.path / "rows.jsonl").read_bytes().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("step", [-1, 0, 5, 9, 100])
def test_rewind_drops_rows_after_a_step(tmp_path: Path, step: int):
    run = make(tmp_path)
    for n in range(10):
        run.row({"step": n, "loss": 0.0})
        run.event(n, "eval")
    rewind(run, step)
    assert [row["step"] for row in run.rows()] == [n for n in range(10) if n <= step]
    assert [event["step"] for event in run.events()] == [n for n in range(10) if n <= step]
    run.row({"step": step + 1, "loss": 1.0})
    assert run.rows()[-1] == {"step": step + 1, "loss": 1.0}


def test_rewind_can_keep_the_events(tmp_path: Path):
    run = make(tmp_path)
    run.row({"step": 5, "loss": 0.0})
    run.event(5, "spike")
    rewind(run, 1, events=False)
    assert (run.rows(), len(run.events())) == ([], 1)


def test_rewind_of_a_run_without_rows(tmp_path: Path):
    run = make(tmp_path)
    rewind(run, 0)
    assert (run.rows(), run.events()) == ([], [])
    assert not (run.path / "rows.jsonl").exists()


def test_full_disk_warns_once_and_loses_no_row(tmp_path: Path, monkeypatch):
    run, warnings = make(tmp_path), []
    run.warn = warnings.append
    real = files.write

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for n in range(20):
        monkeypatch.setattr(files, "write", full if 5 <= n < 10 or n == 15 else real)
        run.row({"step": n, "loss": 0.0})
    assert [row["step"] for row in run.rows()] == list(range(20))
    assert len(warnings) == 2, "once for each time the disk filled up"
    assert all("rows.jsonl cannot be written (No space left" in text for text in warnings)
    monkeypatch.setattr(files, "write", full)
    run.event(20, "eval")
    run.set_status("running", step=20)
    assert len(warnings) == 4


def test_folder_that_vanishes_does_not_stop_training(tmp_path: Path):
    run, warnings = make(tmp_path), []
    run.warn = warnings.append
    run.path.rename(tmp_path / "moved")
    run.row({"step": 1, "loss": 0.0})
    run.set_status("running")
    assert len(warnings) == 2


def test_status_is_merged_and_drops_an_old_error(tmp_path: Path):
    run = make(tmp_path)
    assert run.status() == {}
    run.set_status("running", step=5, best=0.5)
    run.set_status("failed", step=7, error="lost", loss=math.nan)
    assert {k: v for k, v in run.status().items() if k != "updated"} == {
        "status": "failed",
        "step": 7,
        "best": 0.5,
        "loss": None,
        "error": "lost",
    }
    run.set_status("running")
    assert "error" not in run.status() and run.status()["step"] == 7
    (run.path / "status.json").write_text("{")
    assert run.status() == {}


def test_checkpoints_are_listed_with_the_best(tmp_path: Path):
    run = make(tmp_path)
    assert run.checkpoints() == ([], None)
    for name in ("step-000020", "step-000010", ".aside-step-000030", "other"):
        (run.path / "checkpoints" / name).mkdir()
    (run.path / "checkpoints" / "best").symlink_to("step-000010")
    assert run.checkpoints() == (["step-000010", "step-000020"], "step-000010")
    (run.path / "checkpoints" / "step-000010").rmdir()
    assert run.checkpoints() == (["step-000020"], None)


def test_row_costs_little_more_than_its_json_and_one_write(tmp_path: Path):
    """About eight microseconds on a quiet machine; held to a ratio, because the tests share theirs with others."""
    run = make(tmp_path)
    row = {"step": 1, "loss": 2.34567, "lr": 1e-3, "items_per_s": 1e4, "wait": 0.01, "mfu": 0.4, "memory": 1e9, "seconds": 1.5}
    with open(tmp_path / "plain", "ab", buffering=0) as plain:
        ways = {"row": lambda: run.row(row), "plain": lambda: plain.write(json.dumps(row).encode() + b"\n")}
        least = dict.fromkeys(ways, math.inf)
        for _ in range(40):
            for name, way in ways.items():
                start = time.process_time()
                for _ in range(200):
                    way()
                least[name] = min(least[name], (time.process_time() - start) / 200)
    assert least["row"] < 2 * least["plain"], least


# ---- names -----------------------------------------------------------------------------------------------------------


def test_run_names_follow_from_time_and_avoid_taken_ones():
    moment = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
    taken: set[str] = set()
    for _ in range(300):
        name = folders.new_name("gpt", moment, taken)
        assert name not in taken
        assert folders.check_name(name) == name
        taken.add(name)
    assert folders.new_name("gpt", moment, ()) == folders.new_name("gpt", moment, ()) in taken
    later = {folders.two_words(int(moment.timestamp() * 1e6) + n) for n in range(1000)}
    assert len(later) > 900, "neighbouring moments must not repeat words"


@pytest.mark.parametrize("recipe", ["/a b/My Recipe (2).py", "日本.py", "x" * 300 + ".py", ".py"])
def test_name_is_legal_whatever_the_recipe_is_called(recipe: str):
    name = folders.new_name(recipe, datetime(2026, 3, 1, tzinfo=UTC), ())
    assert folders.check_name(name) == name
