"""The console: readable columns, a plain copy in console.log, and nothing that can stop a run."""

import io
import math
import os
import pty
import re
from pathlib import Path
from typing import Any

import pytest

from seedbed.track import console as console_module
from seedbed.track.console import Console

ROW = {"step": 120, "loss": 2.31459, "lr": 6e-4, "items_per_s": 12345.6, "wait": 0.013, "mfu": 0.4512, "memory": 1.2e9}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def on_terminal(act: Any, log: Path | None = None) -> str:
    """What reaches a real terminal of 80 columns."""
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        console = Console(log, stream=stream)
        act(console)
        console.close()
        stream.flush()
        os.set_blocking(leader, False)
        text = b""
        try:
            while part := os.read(leader, 65536):
                text += part
        except (BlockingIOError, OSError):
            pass
    os.close(leader)
    return text.decode()


def test_log_line_tells_everything_within_a_hundred_columns():
    out = io.StringIO()
    console = Console(stream=out)
    console.step_row({**ROW, "step": 99_990}, last_step=100_000)
    console.step_row({**ROW, "step": 100_000}, last_step=100_000)
    first, last = out.getvalue().splitlines()
    assert first == "step  99990/100000  loss   2.3146  lr 6.0e-04  12.3k items/s  wait  1%  mfu 45%   1.2 GB"
    assert last.endswith("mfu 45%   1.2 GB  eta  0:00")
    assert len(last) <= 100


def test_console_columns_are_aligned():
    out = io.StringIO()
    console = Console(stream=out)
    for step, loss, rate in [
        (20, 11.5, 99.5),
        (40, 0.0012, 1e6),
        (60, 12345.678, 0.5),
        (80, 100.0, 99.95),
        (100, 3e7, 999.4),
        (120, math.nan, 5e9),
        (2400, 1e-7, 1234.0),
    ]:
        console.step_row({**ROW, "step": step, "loss": loss, "items_per_s": rate, "memory": rate * 1e3}, last_step=2400)
    lines = out.getvalue().splitlines()
    for word in ("loss ", "lr ", "items/s", "wait ", "mfu "):
        assert len({line.index(word) for line in lines}) == 1, word
    assert len({line.index("B  eta ") for line in lines[1:]}) == 1


@pytest.mark.parametrize("missing", ["lr", "items_per_s", "wait", "mfu", "memory", "loss"])
def test_console_row_omits_missing_values(missing: str):
    out = io.StringIO()
    Console(stream=out).step_row({k: v for k, v in ROW.items() if k != missing}, last_step=None)
    assert out.getvalue().startswith("step 120  loss")
    assert {"items_per_s": "items/s", "memory": "GB"}.get(missing, f"{missing} ") not in out.getvalue() or missing == "loss"


def test_console_column_is_one_entry_of_the_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(console_module.COLUMNS, "gap", lambda value: f"gap {value:.2f}")
    out = io.StringIO()
    Console(stream=out).step_row({**ROW, "gap": 0.25})
    Console(stream=out).step_row(ROW)
    shown, without = out.getvalue().splitlines()
    assert "gap 0.25" in shown and "gap" not in without


@pytest.mark.parametrize("loss", [math.nan, math.inf, None, 0.0, -1.5])
def test_console_shows_any_loss(loss: Any):
    out = io.StringIO()
    Console(stream=out).step_row({"step": 1, "loss": loss}, last_step=10)
    assert "loss" in out.getvalue()


def test_time_left_follows_the_pace_since_this_process_began():
    out, clock = io.StringIO(), Clock()
    console = Console(stream=out, clock=clock)
    for step in range(510, 601, 10):
        console.step_row({"step": step, "loss": 1.0}, last_step=1000)
        clock.now += 20
    assert out.getvalue().splitlines()[-1].endswith("eta 13:20"), "400 steps at 2 s each"


def test_console_log_has_no_colours(tmp_path: Path):
    def act(console: Console) -> None:
        console.line("before", style="bold red")
        console.step_row(ROW, last_step=240)
        console.evaluation(120, {"valid_loss": 1.5}, improved=True)
        console.sample(120, "a\nb", ["samples/x.png"])
        console.warn("careful")

    shown = on_terminal(act, tmp_path / "console.log")
    logged = (tmp_path / "console.log").read_text()
    assert "\x1b" not in logged and "\x1b[" in shown
    assert logged.splitlines()[0] == "before"
    for line in logged.splitlines():
        assert line in ESCAPE.sub("", shown)
    assert "━" not in logged


def test_console_log_holds_earlier_lines(tmp_path: Path):
    console = Console(stream=io.StringIO())
    console.line("early")
    console.attach(tmp_path / "console.log")
    console.line("late")
    console.close()
    assert (tmp_path / "console.log").read_text() == "early\nlate\n"


def test_second_process_adds_to_the_log(tmp_path: Path):
    for word in ("first", "second"):
        console = Console(tmp_path / "console.log", stream=io.StringIO())
        console.line(word)
        console.close()
    assert (tmp_path / "console.log").read_text() == "first\nsecond\n"


def test_terminal_shows_progress_and_takes_it_away_at_the_end():
    def act(console: Console) -> None:
        console.step_row({**ROW, "step": 60}, last_step=240)
        console.step_row({**ROW, "step": 120}, last_step=240)
        console.line("done")

    shown = on_terminal(act)
    assert "━━━" in shown and " 50%" in shown and " left" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the last thing is to clear the progress line"


def test_file_or_pipe_sees_no_control_codes():
    out = io.StringIO()
    console = Console(stream=out)
    console.line("styled", style="bold red")
    console.step_row(ROW, last_step=240)
    console.evaluation(120, {"valid_loss": 1.5}, improved=False)
    console.close()
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue() and "━" not in out.getvalue()


def test_notebook_gets_plain_lines_in_their_order(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels of Jupyter have it, for the commands that they start too
    console = Console(stream=(out := io.StringIO()))
    for act in (console.line, console.warn, console.line):
        act("text")
    console.step_row(ROW, last_step=200)
    console.close()
    assert "\r" not in out.getvalue() and "\x1b[2K" not in out.getvalue()
    assert ESCAPE.sub("", out.getvalue()).startswith("text\nwarning: text\ntext\nstep 120/200")


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    shown = on_terminal(lambda console: console.line("styled", style="red"))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", shown)
    monkeypatch.delenv("NO_COLOR")
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", on_terminal(lambda console: console.line("styled", style="red")))


def test_dumb_terminal_gets_no_progress_line(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in on_terminal(lambda console: console.step_row(ROW, last_step=240))


@pytest.mark.parametrize("text", ["\x1b[2Jgone", "\x1b]0;title\x07", "a\rb", "[bold]x[/bold]", "\u202eevil", "\udcff", ":smile:"])
def test_console_strips_control_characters_of_samples(text: str, tmp_path: Path):
    out = io.StringIO()
    console = Console(tmp_path / "console.log", stream=out)
    console.sample(1, text, [])
    console.close()
    for seen in (out.getvalue(), (tmp_path / "console.log").read_text()):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", seen)
        assert "[bold]x[/bold]" in seen or not text.startswith("[bold]")
        assert ":smile:" in seen or text != ":smile:"


def test_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    console = Console(tmp_path / "console.log", stream=stream)
    for step in range(1, 2000):
        console.step_row({**ROW, "step": step}, last_step=2000)
    console.close()
    assert len((tmp_path / "console.log").read_text().splitlines()) == 1999
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_terminal_that_knows_only_ascii_gets_what_it_can_show():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(stream=stream)
    console.line("grün 🌱")
    console.line("still here")
    assert raw.getvalue().decode().splitlines() == ["gr?n ?", "still here"]


def test_log_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path):
    out = io.StringIO()
    console = Console(tmp_path / "no" / "such" / "folder" / "console.log", stream=out)
    console.line("shown")
    console.close()
    assert out.getvalue() == "shown\n"


def test_console_evaluation_wraps_between_metrics_in_the_log(tmp_path: Path) -> None:
    console = Console(tmp_path / "console.log", stream=(stream := io.StringIO()))
    numbers = {f"number_{n}": n / 7 for n in range(20)}
    console.evaluation(50, numbers, improved=True)
    console.close()
    logged = (tmp_path / "console.log").read_text()
    lines = logged.splitlines()
    assert len(lines) > 2 and all(len(line) <= 100 for line in lines[:-1])
    assert [word for word in logged.split() if word.startswith("number_")] == list(numbers)
    assert all(line.startswith("      ") for line in lines[1:]) and lines[-1].endswith("best so far")
    (shown,) = stream.getvalue().splitlines()
    num_shown = shown.count("number_")
    assert len(shown) <= 100 and shown.endswith(f"and {20 - num_shown} more  best so far") and num_shown >= 3
