"""The sweep folder: made once, joined by its equals, claimed by the living, and never trained twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from sweep_samples import BASE, end, make
from track_samples import make as make_run

from seedbed.errors import UserError
from seedbed.track import folders
from seedbed.tune.sweep import grid as grids
from seedbed.tune.sweep.folder import Sweep, default_name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_sweep_folder_has_a_file_per_trial(root: Path):
    sweep = make(root, "optim.lr=1e-3,1e-2", "steps=5", seeds=2)
    assert sweep.path == root.parent / "sweeps" / "some"
    assert (root.parent / "sweeps" / ".gitignore").read_text() == "*\n"
    names = sorted(p.name for p in (sweep.path / "trials").iterdir())
    assert names == ["0001.json", "0002.json", "0003.json", "0004.json"]
    assert json.loads((sweep.path / "trials" / "0002.json").read_text()) == {"settings": {"optim.lr": 0.01, "seed": 1}}
    assert [sweep.run_name(t) for t in sweep.trials()][:2] == ["some-0001", "some-0002"]
    assert {s.state for s in sweep.statuses()} == {"waiting"}


def test_sweep_with_equal_settings_is_joined_and_others_refused(root: Path):
    make(root, "optim.lr=1e-3,1e-2", "steps=5")
    again = make(root, "steps=5", "optim.lr=0.001,0.01")
    assert len(again.trials()) == 2
    for words, printed in [
        (["optim.lr=1e-3,1e-2", "steps=6"], "steps 5 there, 6 here"),
        (["optim.lr=1e-3,1e-2"], "steps 5 there, not set here"),
        (["optim.lr=1e-3,1e-2,1e-1", "steps=5"], "optim.lr 0.001,0.01 there, 0.001,0.01,0.1 here"),
    ]:
        with pytest.raises(UserError) as problem:
            make(root, *words)
        assert printed in str(problem.value) and "another --name" in str(problem.value)


def test_sweep_name_follows_from_its_settings():
    def name(*words: str) -> str:
        return default_name("gpt", "demo", grids.read(BASE, words, None))

    assert name("steps=1,2", "batch=4") == name("steps=1,2", "batch=4")
    assert len({name("steps=1,2"), name("steps=1,3"), name("batch=1,2"), name("steps=1,2", "batch=4")}) == 4
    assert name("steps=1,2").startswith("gpt-demo-")


@pytest.mark.parametrize("name", ["../up", "a b", "", ".hidden"])
def test_sweep_name_that_is_no_folder_name_is_refused(root: Path, name: str):
    with pytest.raises(UserError, match="cannot name a run"):
        make(root, "steps=1,2", name=name)


def test_sweep_name_with_foreign_runs_is_refused(root: Path):
    make_run(root, "some-0002")
    with pytest.raises(UserError, match="run some-0002 exists"):
        make(root, "steps=1,2")
    assert not (root.parent / "sweeps" / "some").exists()


def test_unknown_sweep_suggests_the_nearest(root: Path):
    with pytest.raises(UserError, match="holds none yet"):
        Sweep.open(root, "some")
    make(root, "steps=1,2")
    with pytest.raises(UserError, match="nearest: some"):
        Sweep.open(root, "sone")
    assert Sweep.open(root, str(root.parent / "sweeps" / "some")).name == "some"


def test_damaged_sweep_is_named(root: Path):
    sweep = make(root, "steps=1,2")
    (sweep.path / "trials" / "0001.json").write_text("{}")
    with pytest.raises(UserError, match=r"0001\.json is damaged"):
        sweep.trials()
    (sweep.path / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match=r"sweep\.json is damaged"):
        Sweep(root, "some")


def test_trial_claim_is_exclusive(root: Path):
    sweep = make(root, "steps=1,2")
    first, second = sweep.trials()
    fd = sweep.claim(first)
    assert fd is not None and sweep.claim(first) is None
    assert [s.state for s in sweep.statuses()] == ["running", "waiting"]
    other = sweep.claim(second)
    assert other is not None
    folders.release(fd)
    assert not sweep.is_claimed(first) and sweep.is_claimed(second)
    fd = sweep.claim(first)
    assert fd is not None
    folders.release(fd)
    folders.release(other)


CLAIM = """
import sys, time
from pathlib import Path
from seedbed.tune.sweep.folder import Sweep
sweep = Sweep.open(Path(sys.argv[1]), "some")
print(sweep.claim(sweep.trials()[0]) is not None, flush=True)
time.sleep(60)
"""


def test_trial_claim_ends_with_its_process(root: Path):
    sweep = make(root, "steps=1,2")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen([sys.executable, "-c", CLAIM, str(root)], env=env, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        first = sweep.trials()[0]
        assert sweep.claim(first) is None and sweep.is_claimed(first)
        other.send_signal(signal.SIGKILL)
    fd = sweep.claim(first)
    assert fd is not None
    folders.release(fd)


def test_ended_trial_is_never_claimed_again(root: Path):
    sweep = make(root, "steps=1,2,3")
    done, failed, _ = sweep.trials()
    end(sweep, done, 0.5)
    end(sweep, failed, None, "failed", "no such file")
    assert sweep.claim(done) is None and sweep.claim(failed) is None
    assert [s.state for s in sweep.statuses()] == ["done", "failed", "waiting"]
    assert Sweep.open(root, "some").status(failed).error == "no such file"
    assert sweep.forget_failures() == 1
    assert [s.state for s in sweep.statuses()] == ["done", "waiting", "waiting"]


def test_run_resumed_by_hand_is_not_claimed(root: Path):
    sweep = make(root, "steps=1,2")
    run = make_run(root, "some-0001")
    with run.lock():
        assert sweep.claim(sweep.trials()[0]) is None
    fd = sweep.claim(sweep.trials()[0])
    assert fd is not None
    folders.release(fd)


@pytest.mark.parametrize(
    ("status", "event", "state"),
    [("done", "end", "done"), ("done", "early_stop", "stopped early"), ("nan", "end", "nan"), ("diverged", "end", "diverged")],
)
def test_trial_result_outlives_the_run_folder(root: Path, status: str, event: str, state: str):
    sweep = make(root, "steps=1,2")
    trial = sweep.trials()[0]
    run = make_run(root, "some-0001")
    assert sweep.record(trial) is None
    run.event(4, "eval", error=0.25, best=True)
    run.event(8, event)
    run.close()
    run.set_status(status, step=8, best=0.25, best_step=4)
    found = sweep.record(trial)
    assert found is not None and (found.state, found.best, found.best_step, found.metric) == (state, 0.25, 4, "error")
    for path in sorted(run.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.path.rmdir()
    assert Sweep.open(root, "some").status(trial) == found


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_resumable_run_has_no_result_unless_it_failed(root: Path, status: str):
    sweep = make(root, "steps=1,2")
    trial = sweep.trials()[0]
    make_run(root, "some-0001").set_status(status)
    assert sweep.record(trial) is None
    found = sweep.record(trial, "two\nlines")
    assert found is not None and (found.state, found.error) == ("failed", "two lines")


def test_sweep_command_recreates_the_sweep(root: Path):
    sweep = make(root, "optim.lr=1e-3,1e-2", "steps=5", seeds=2)
    assert sweep.command() == "seedbed sweep gpt/demo optim.lr=0.001,0.01 seed=1,2 steps=5 --name some"
    words = sweep.command().split()[3:-2]
    assert make(root, *words).grid == sweep.grid
    searched = make(root, "optim.lr=1e-4..1e-2", "batch=2..8..2", name="other", sampler="random")
    assert searched.command().split()[3:5] == ["optim.lr=0.0001..0.01", "batch=2..8..2"]
