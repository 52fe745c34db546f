"""In the terminal: what trains now, curves out of characters, colours only where somebody sees them, completion, the week."""

import datetime
import fcntl
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from conftest import ROOT
from test_html_report import a_run

from seedbed.cli import main
from seedbed.cli.completion import SCRIPTS, candidates
from seedbed.report import notes, terminal, top
from seedbed.track.run import Run

SGR = re.compile(r"\x1b\[[0-9;]*m")


def command(capsys, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    return main(words), *capsys.readouterr()


# ---- top and watch ---------------------------------------------------------------------------------------------------


def test_top_shows_running_runs_only(tmp_path: Path, capsys):
    root = tmp_path / "runs"
    a_run(root, "finished")
    live = a_run(root, "live", rows=20)
    rows = [{"step": i, "loss": 1.0 / i, "seconds": 2.0 * i, "items_per_s": 4e4, "wait": 0.25, "mfu": 0.5} for i in range(1, 21)]
    (live.path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (live.path / "status.json").write_text(json.dumps({"status": "running", "last_step": 80}))
    with live.lock():
        status, out, _ = command(capsys, "--runs", str(root), "top", "--once")
        (found,) = json.loads(command(capsys, "--runs", str(root), "top", "--json")[1])
    assert status == 0 and "1 training" in out and "finished" not in out
    assert all(words in out for words in ("live", "20/80", "25%", "40k", "50%", "2:00")), out
    assert found["name"] == "live" and found["seconds_left"] == 120.0
    status, out, _ = command(capsys, "--runs", str(root), "top")
    assert status == 0 and "nothing trains" in out and "finished" in out


def test_top_lists_a_run_without_rows(tmp_path: Path):
    run = a_run(tmp_path, "fresh")
    (run.path / "rows.jsonl").unlink()
    (run.path / "status.json").unlink()
    with run.lock():
        (found,) = top.training(tmp_path)
    assert found["seconds_left"] is None and len(top._cells(found)) == len(top._HEADER)


@pytest.mark.parametrize(("key", "says"), [("loss", "loss 0.0750"), ("error", "best 0.5000"), ("lrs.all", "lrs.all 0.0100")])
def test_watch_draws_rows_and_evaluations(tmp_path: Path, capsys, monkeypatch, key: str, says: str):
    monkeypatch.setenv("COLUMNS", "100")
    a_run(tmp_path, "one")
    status, out, _ = command(capsys, "--runs", str(tmp_path), "watch", "one", key)
    assert status == 0 and says in out and max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "says"),
    [(("watch", "one", "nix"), "there are: loss, lr"), (("watch", "two"), "no run 'two'"), (("completion", "ksh"), "bash")],
)
def test_mistakes_are_told_in_a_line(tmp_path: Path, capsys, words: tuple[str, ...], says: str):
    a_run(tmp_path, "one")
    status, _, reported = command(capsys, "--runs", str(tmp_path), *words)
    assert status == 2 and says in reported


# ---- curves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fine", [True, False])
@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1.0, 2.0)],
        [(1.0, 2.0), (2.0, 2.0)],
        [(0.0, -5.0), (9.0, 5.0)],
        [(float(i), math.sin(i) * 10 ** (i % 9)) for i in range(500)],
        [(1.0, math.nan), (2.0, math.inf), (3.0, 0.0), (4.0, 1e-300), (5.0, 1e300)],
    ],
)
def test_curve_stays_inside_its_canvas(points: list[tuple[float, float]], log: bool, fine: bool):
    drawn = terminal.draw(points, points[:3], terminal.Canvas(60, 12, log, fine))
    assert len(drawn) <= 13 and all(len(line) <= 60 for line in drawn)
    assert all(line.isascii() for line in drawn) or fine


def test_text_plot_of_a_rising_line_rises():
    drawn = terminal.draw([(float(i), float(i)) for i in range(50)], [], terminal.Canvas(60, 12, fine=False))
    first = [line.index("*") for line in drawn if "*" in line]
    assert first == sorted(first, reverse=True) and len(first) == 11


# ---- colours ---------------------------------------------------------------------------------------------------------


def on_a_screen(words: list[str], folder: Path, seconds: float = 60.0, until: str = "", **environment: str) -> str:
    """What a command writes to a terminal of 110 columns; with `until`, Ctrl-C is pressed once that has appeared."""
    # Whoever started the tests may have told us to ignore Ctrl-C.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heard}; import sys; from seedbed.cli import main; sys.exit(main())"
    host, guest = pty.openpty()
    fcntl.ioctl(guest, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm-256color", **environment}
    env.pop("COLUMNS", None)
    process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=folder, env=env, stdin=guest, stdout=guest, stderr=guest)
    os.close(guest)
    out, deadline = b"", time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if until and until.encode() in out and process.poll() is None:
                process.send_signal(signal.SIGINT)
                until = ""
            if select.select([host], [], [], 0.1)[0]:
                try:
                    part = os.read(host, 65536)
                except OSError:  # the other end has closed
                    break
                out += part
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(host)
    return out.decode(errors="replace")


def test_colours_only_on_a_terminal(tmp_path: Path):
    a_run(tmp_path / "runs", "one")
    words = ["runs", "list"]
    assert "\x1b[32mdone" in on_a_screen(words, tmp_path)
    for refusal in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        shown = on_a_screen(words, tmp_path, **refusal)
        assert "done" in shown and "\x1b" not in shown


def test_colours_have_no_width():
    for word in ("done", "running", "2 done, 1 failed", "new word", ""):
        assert SGR.sub("", terminal.paint_status(f"{word:<12}", True)) == f"{word:<12}"
        assert terminal.paint_status(word, False) == word


@pytest.mark.slow
def test_top_and_watch_use_the_alternate_screen(tmp_path: Path):
    run = a_run(tmp_path / "runs", "one")
    with run.lock():
        for words in (["top"], ["watch", "one"]):
            shown = on_a_screen(words, tmp_path, until="40", NO_COLOR="1")
            assert shown.startswith("\x1b[?1049h") and "\x1b[?1049l" in shown, "what was there before comes back"
            assert shown.index("\x1b[?25l") < shown.index("\x1b[?25h") and not SGR.search(shown)
    ended = on_a_screen(["watch", "one"], tmp_path)
    assert "loss 0.0750" in ended, "a run that has ended is drawn once"


# ---- completion ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    a_run(tmp_path / "runs", "amber", recipe="gpt", preset="demo")
    a_run(tmp_path / "runs", "birch")
    (tmp_path / "runs" / "amber" / "checkpoints" / "step-000020").mkdir(parents=True)
    (tmp_path / "sweeps" / "aspen").mkdir(parents=True)
    (tmp_path / "mine.py").write_text("raise SystemExit('completion ran a stranger')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("seedbed comp", ["completion"]),
        ("seedbed runs ex", ["export"]),
        ("seedbed runs show ", ["amber", "birch"]),
        ("seedbed runs diff amber b", ["birch"]),
        ("seedbed --runs runs watch a", ["amber"]),
        ("seedbed --runs nowhere watch a", []),
        ("seedbed report a", ["amber", "aspen"]),
        ("seedbed train gpt/dem", ["gpt/demo"]),
        ("seedbed train mi", ["mine.py"]),
        ("seedbed train mine.py mod", []),
        ("seedbed train gpt/demo optim.ki", ["optim.kind="]),
        ("seedbed train gpt/demo -m 'why not' optim.kind=", ["optim.kind=adamw", "optim.kind=muon"]),
        ("seedbed train gpt/demo optim.kind=muon compile_auto", ["compile_autograd="]),
        ("seedbed resume amber every.lo", ["every.log="]),
        ("seedbed train gpt/demo --mirror wandb,te", ["wandb,tensorboard"]),
        ("seedbed train gpt/demo --mirr", ["--mirror"]),
        ("seedbed sample amber --checkpoint ", ["step-000020"]),
        ("seedbed completion f", ["fish"]),
        ("seedbed nonsense ", []),
        ("seedbed train 'gpt/dem", ["gpt/demo"]),
        ("seedbed train nobody/nothing mo", []),
        ("", sorted({"ablate", "train", "runs"})),
    ],
)
def test_completion_candidates(here: Path, line: str, wanted: list[str]):
    found = candidates(line)
    assert found == wanted if line else set(wanted) <= set(found)


@pytest.mark.slow
def test_completion_in_bash(here: Path, tmp_path: Path):
    bash = shutil.which("bash")
    if not bash:
        pytest.skip("there is no bash here")
    (tmp_path / "seedbed").write_text(f'#!/bin/sh\nexec {sys.executable} -m seedbed "$@"\n')
    (tmp_path / "seedbed").chmod(0o755)
    lines = {"seedbed runs show a": "amber", "seedbed train gpt/demo optim.kind=m": "muon"}
    for line, wanted in lines.items():
        script = 'eval "$(seedbed completion bash)"; COMP_LINE="$1"; COMP_POINT=${#1}; _seedbed; printf "%s," "${COMPREPLY[@]}"'
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            [bash, "-c", script, "bash", line], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout == f"{wanted},", done.stderr


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completion_scripts_call_the_command(capsys, shell: str):
    status, out, _ = command(capsys, "completion", shell)
    assert status == 0 and "seedbed completion words" in out and "SEEDBED_COMPLETE" in out


# ---- the week --------------------------------------------------------------------------------------------------------


JOURNAL = """# Journal

<!-- run old -->
## 2026-02-01 · old · done
- why: long ago
<!-- end old -->
- conclusion, 2026-02-27: it was the data

<!-- run older -->
## 2026-01-01 · older · done
<!-- end older -->

<!-- run good -->
## 2026-02-26 · good · better than old
- why: try a smaller rate
- verdict: done at step 40
- conclusion: open (`seedbed note good "..."`)
<!-- end good -->

<!-- run bad -->
## 2026-03-01 · bad · negative result: diverged
- why: (not given; -m WHY sets it)
- verdict: diverged at step 9
<!-- end bad -->
- conclusion, 2026-03-01: a rate of 1 is too much,
  even for one step
"""


def test_week_lists_results_conclusions_and_open_entries(tmp_path: Path, capsys):
    root = tmp_path / "runs"
    a_run(root, "good")
    (tmp_path / "JOURNAL.md").write_text(JOURNAL)
    found = notes.look(root, datetime.date(2026, 3, 1))
    assert [entry["run"] for entry in found["entries"]] == ["good", "bad"]
    assert [entry["run"] for entry in found["concluded_late"]] == ["old"]
    assert found["seconds"] == 10.0 and (found["from"], found["to"]) == ("2026-02-23", "2026-03-01")
    text = "\n".join(notes.week_lines(found))
    for words in (
        "it was the data",
        "even for one step",
        "why: try a smaller rate",
        "1 wait for a conclusion: seedbed note good",
    ):
        assert words in text, text
    assert "older" not in text and "(not said" not in text
    status, out, _ = command(capsys, "--runs", str(root), "journal", "--week", "--json")
    assert status == 0 and json.loads(out)["entries"] == []
    assert command(capsys, "--runs", str(root), "journal", "good", "--week")[0] == 2


def test_week_without_a_journal(tmp_path: Path, capsys):
    status, out, _ = command(capsys, "--runs", str(tmp_path / "runs"), "journal", "--week")
    assert status == 0 and "0 entries; a run that ends writes one" in out


def test_watch_of_a_removed_run_ends(tmp_path: Path, monkeypatch):
    run = a_run(tmp_path, "one")
    monkeypatch.setattr(Run, "open", classmethod(lambda cls, root, name: run))
    frames = []
    monkeypatch.setattr(top.terminal, "show", lambda frame, seconds, once: frames.append(frame) or 0)
    top.watch(tmp_path, "one", "loss", log=False, once=False)
    assert frames[0](80, 20)[1], "a run that nobody trains is shown once"
    run.path.rename(tmp_path / "other")
    with pytest.raises(ValueError, match="removed or renamed"):
        frames[0](80, 20)
