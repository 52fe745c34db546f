"""Signals that stop a run save it first, and no rank outlives the command that started it."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from helpers import TOY, assert_same_end, resume, start

from seedbed.cli import main
from seedbed.errors import UserError
from seedbed.launch import spawn
from seedbed.track.run import Run
from seedbed.train import loop

LONG = ("steps=1000000", "every.eval=0", "every.save=50", "keep=2")


def hang_up_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGHUP) -> None:
    real = loop.take_step

    def take(job: loop.Job) -> None:
        real(job)
        if job.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loop, "take_step", take)


@pytest.fixture(autouse=True)
def default_sighup() -> Iterator[None]:
    """The tests themselves may have been started by nohup, which ignores the signal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_sighup_saves_and_the_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGHUP)
    start(tmp_path, "straight")
    with monkeypatch.context() as patch:
        hang_up_at(5, patch)
        assert start(tmp_path, "hung") == 129
    assert Run.open(tmp_path, "hung").status()["status"] == "interrupted" and signal.getsignal(signal.SIGHUP) == before
    assert resume(tmp_path, "hung") == 0
    assert_same_end(tmp_path, "straight", "hung")


def test_sighup_is_ignored_under_nohup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hang_up_at(5, monkeypatch)
    assert start(tmp_path, "kept") == 0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "seedbed", *words]


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"}


def until(true: Callable[[], Any], what: str, seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def num_rows(folder: Path) -> int:
    path = folder / "runs" / "far" / "rows.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs" / "far" / "status.json").read_text())


TRAIN = ("train", TOY, *LONG, "--run", "far", "--no-check", "--dirty")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_closed_terminal_saves_and_ends_the_run(tmp_path: Path, ranks: int) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execve(sys.executable, command(*TRAIN, f"dist.replicate={ranks}"), environment())
    while num_rows(tmp_path) < 5:
        os.read(terminal, 1 << 16)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 129
    assert status(tmp_path)["status"] == "interrupted"
    saved = sorted(path.name for path in (tmp_path / "runs" / "far" / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{status(tmp_path)['step']:06d}"


def ranks_in(folder: Path) -> list[int]:
    """Processes that work in this folder, by /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
            if os.readlink(path / "cwd") == str(folder) and b"seedbed" in words and b"train" in words:
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["SIGKILL", "SIGHUP"])
def test_ranks_end_with_their_command(tmp_path: Path, number: int) -> None:
    folder = tmp_path.resolve()
    with subprocess.Popen(
        command(*TRAIN, "dist.replicate=2"), cwd=folder, env=environment(), stdout=subprocess.DEVNULL
    ) as process:
        until(lambda: num_rows(folder) >= 5 or process.poll() is not None, "the run trains")
        assert len(ranks_in(folder)) == 3
        process.send_signal(number)
        assert process.wait(60) == (-number if number == signal.SIGKILL else 129)
    until(lambda: not ranks_in(folder), "ranks outlive their command", 60.0)
    assert status(folder)["status"] == "interrupted"
    saved = sorted(path.name for path in (folder / "runs" / "far" / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{status(folder)['step']:06d}", "the last step was not saved"


def test_process_count_of_a_foreign_config_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    start(tmp_path / "runs", "one", "steps=2")
    path = tmp_path / "runs" / "one" / "config.json"
    # As older versions wrote it, without a hash that an edit would have to fit.
    facts = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("hash", "id")}
    monkeypatch.setattr(spawn, "MAX_UNASKED", 8)
    monkeypatch.setattr(spawn, "start", lambda num: pytest.fail(f"{num} processes were started"))
    monkeypatch.chdir(tmp_path)
    for values in ({"replicate": 24, "shard": 1}, {"replicate": 1, "shard": 9}, {"replicate": 65536, "shard": 65536}):
        facts["config"] |= {"dist": values, "batch": values["replicate"] * values["shard"]}
        path.write_text(json.dumps(facts))
        with pytest.raises(UserError, match=r"needs .* processes"):
            spawn.to_resume(tmp_path / "runs", "one", [])
        assert main(["resume", "one", "steps=4"]) == 2
        assert "processes, and this machine has" in capsys.readouterr().err
    assert spawn.to_resume(tmp_path / "runs", "one", ["dist.replicate=24", "dist.shard=1", "batch=48"]) == 24
