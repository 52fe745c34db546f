"""The drills are held in a short form, can fail, and their page tells their results; and the parts of the loop they rely on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from helpers import kinds, newest, resume, rows, start

from seedbed.data import feed
from seedbed.drills import table
from seedbed.drills.sandbox import DrillResult
from seedbed.errors import EXIT_STALLED, UserError
from seedbed.launch import local
from seedbed.track.run import Run
from seedbed.train import guard, loop
from seedbed.train.engine import Engine


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


def events(root: Path, name: str, kind: str) -> list[dict]:
    return [e for e in Run.open(root, name).events() if e["kind"] == kind]


# ---- out of memory ---------------------------------------------------------------------------------------------------


def memory_for(num: int, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """A device that holds `num` items at a time, and notices only after forward and backward passes have left their marks."""
    real = Engine._update

    def update(self: Engine, batch, part: int):
        if len(batch["x"]) > num:
            real(self, batch, -1)
            raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, batch, part)

    monkeypatch.setattr(Engine, "_update", update)


@pytest.mark.parametrize(("batch", "room", "accum"), [(8, 4, 2), (8, 1, 8), (6, 2, 6), (9, 3, 3), (30, 7, 6)])
@pytest.mark.parametrize("mapped", [False, True], ids=["memory", "memory-map"])
def test_smaller_micro_batches_give_the_same_gradient(tmp_path: Path, monkeypatch, batch, room, accum, mapped) -> None:
    if mapped:
        monkeypatch.setattr(feed, "room", lambda device: 0)
    settings = [f"batch={batch}", "steps=6", "ema=0.9"]
    start(tmp_path, "plain", *settings)
    memory_for(room, monkeypatch)
    assert start(tmp_path, "tight", *settings) == 0
    assert events(tmp_path, "tight", "out_of_memory")[-1]["accum"] == accum
    for one, other in zip(rows(tmp_path, "plain"), rows(tmp_path, "tight"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5) and other["items"] == one["items"]
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    calls = newest(tmp_path, "tight").tensors["model"]["num_calls"]
    assert calls == 6 * accum, "the buffers of the abandoned step were put back"


def test_reduced_micro_batch_is_kept_on_resume(tmp_path: Path, monkeypatch) -> None:
    memory_for(2, monkeypatch)
    start(tmp_path, "one", "steps=6")
    facts = Run.open(tmp_path, "one").config_json()
    assert facts["config"]["accum"] == 4 and facts["changes"] == {"accum": 4, "steps": 6}
    assert resume(tmp_path, "one", "steps=9") == 0
    assert len(events(tmp_path, "one", "out_of_memory")) == 2, "the resumed run starts in small parts"


def test_out_of_memory_step_is_repeated_and_no_item_is_lost(tmp_path: Path, monkeypatch) -> None:
    start(tmp_path, "plain")
    real = loop.take_step

    def take(job: loop.Job) -> None:
        if job.step == 6 and job.config.accum == 1:
            memory_for(4, monkeypatch)
        real(job)

    monkeypatch.setattr(loop, "take_step", take)
    start(tmp_path, "late")
    assert [e["step"] for e in events(tmp_path, "late", "out_of_memory")] == [7]
    assert [r["step"] for r in rows(tmp_path, "late")] == list(range(1, 13))
    assert rows(tmp_path, "late")[:6] == rows(tmp_path, "plain")[:6]
    assert newest(tmp_path, "late").state["items"] == 96


@pytest.mark.parametrize(
    ("room", "touched", "words"),
    [(0, False, "with one item at a time"), (4, True, "in the middle of an update.*\n.*seedbed resume one accum=2")],
)
def test_out_of_memory_with_one_item_is_reported(tmp_path: Path, monkeypatch, room: int, touched: bool, words: str) -> None:
    memory_for(room, monkeypatch)
    if touched:
        monkeypatch.setattr(Engine, "touched", property(lambda self: True, lambda self, value: None), raising=False)
    with pytest.raises(UserError, match=words):
        start(tmp_path, "one")


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("no")])
def test_out_of_memory_is_distinguished_from_other_errors(tmp_path: Path, monkeypatch, error: Exception) -> None:
    memory_for(1, monkeypatch, error)
    with pytest.raises(type(error), match=str(error)):
        start(tmp_path, "one")
    assert "out_of_memory" not in kinds(tmp_path, "one")


def test_out_of_memory_outside_steps_is_explained(tmp_path: Path, monkeypatch) -> None:
    def greedy(job: loop.Job) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB\nand more")

    monkeypatch.setattr(loop, "evaluate", greedy)
    with pytest.raises(UserError, match=r"after step 4, while evaluating.*9.00 GiB\)\n.*seedbed resume one"):
        start(tmp_path, "one")


# ---- standing still --------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the watchdog would have ended the process; the step that hangs goes on then."""
    codes: list[int] = []

    monkeypatch.setattr(guard.os, "_exit", codes.append)
    return codes


def test_stalled_step_is_reported_and_ended(tmp_path: Path, monkeypatch, capsys, ended: list[int]) -> None:
    real = loop.take_step
    reported = {}

    def take(job: loop.Job) -> None:
        if job.step == 5:
            deadline = time.monotonic() + 20
            while not ended and time.monotonic() < deadline:
                time.sleep(0.01)
            reported.update(Run.open(tmp_path, "one").status())
        real(job)

    monkeypatch.setattr(loop, "take_step", take)
    start(tmp_path, "one", "guard.stall=0.2")
    assert set(ended) == {EXIT_STALLED}
    assert reported["status"] == "stalled" and "step 6 (samples 40 to 47) has not ended" in reported["error"]
    event = events(tmp_path, "one", "stall")[0]
    assert event["step"] == 6 and "test_drills.py" in event["where"]
    assert "in take" in (tmp_path / "one" / "stacks.txt").read_text()
    assert "seedbed resume one" in capsys.readouterr().err


def test_stall_watchdog_allows_long_evaluations(tmp_path: Path, monkeypatch, ended: list[int]) -> None:
    real = loop.evaluate

    def slow(job: loop.Job) -> None:
        with job.clock.timer("eval"):
            time.sleep(0.5)
        real(job)

    monkeypatch.setattr(loop, "evaluate", slow)
    assert start(tmp_path, "one", "guard.stall=0.1", "every.eval=6") == 0
    assert not ended and "stall" not in kinds(tmp_path, "one")


# ---- what is never saved ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model", "optim", "ema"])
@pytest.mark.parametrize("stopped", [False, True], ids=["last step", "signal"])
def test_non_finite_state_is_not_saved(tmp_path: Path, monkeypatch, file: str, stopped: bool) -> None:
    real = loop.take_step

    def take(job: loop.Job) -> None:
        real(job)
        if job.step == (10 if stopped else 12):
            spoil = next(t for n, t in job.engine.tensors()[file].items() if n.endswith("net.0.weight"))
            with torch.no_grad():
                spoil.view(-1)[0] = float("inf")
            job.stop_signal = signal.SIGTERM if stopped else 0

    monkeypatch.setattr(loop, "take_step", take)
    assert start(tmp_path, "one", "ema=0.9", "every.eval=0") == 1
    assert newest(tmp_path, "one").step == 8 and Run.open(tmp_path, "one").status()["status"] == "nan"
    assert events(tmp_path, "one", "spoiled")[0]["what"].startswith(f"{file}: ")
    monkeypatch.undo()
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    assert resume(tmp_path, "one") == 0


def test_non_finite_buffers_may_be_saved(tmp_path: Path, monkeypatch) -> None:
    real = Engine.__init__

    def init(self, system, *rest, **named) -> None:
        system.num_calls.fill_(float("-inf"))
        real(self, system, *rest, **named)

    monkeypatch.setattr(Engine, "__init__", init)
    assert start(tmp_path, "one") == 0


# ---- the table -------------------------------------------------------------------------------------------------------


def result(**facts) -> dict:
    known = {"drill": "signals", "injected": "a|b", "outcome": "passed", "num_faults": 3, "num_detected": 3, "steps_lost": 0}
    return {**known, "bit_exact": "yes", "messages": ["step 3: x", "step 4: x"], "seconds": 1.0, **facts}


@pytest.mark.parametrize(
    ("result", "outcome", "says"),
    [
        (DrillResult(3, 3), "passed", ""),
        (DrillResult(3, 2), "failed", "1 of 3 faults went unnoticed"),
        (DrillResult(3, 3, steps_lost=2), "failed", "2 steps lost"),
        (DrillResult(), "failed", "nothing was injected"),
    ],
)
def test_drill_result_decides_the_outcome(result: DrillResult, outcome: str, says: str) -> None:
    found, problem = table._outcome(result)
    assert found == outcome and says in problem


def test_drill_page_lists_failures_and_skipped_drills() -> None:
    text = table.markdown(
        [
            result(messages=None, said=["step 3: x"]),
            result(outcome="failed", problem="lost"),
            result(outcome="not run", problem="no /proc"),
        ]
    )
    assert "2 drills run, 6 faults injected, no steps lost, 1 failed, 1 not run" in text
    assert "a\\|b" in text and "FAILED: lost" in text and "not run: no /proc" in text
    assert text.count("step 3: x") == 3 and "step 4: x" not in text, "sentences that differ in numbers are shown once"


def test_drill_results_are_merged_and_written_into_a_page(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "preload", lambda: None)
    monkeypatch.setattr(table, "run_drill", lambda one, short: result(drill=one.name))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table._MARKS[0]}\nold\n{table._MARKS[1]}\nafter\n")
    assert table.drill(["clock"], short=True, as_json=False, page=page) == 0
    assert table.drill(["signals"], short=True, as_json=False, page=page) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.index("`signals`") < text.index("`clock`"), "in the order of the table, not of the runs"
    assert [one["drill"] for one in json.loads((tmp_path / "drills.json").read_text())["drills"]] == ["signals", "clock"]
    (tmp_path / "plain.md").write_text("no marks")
    with pytest.raises(UserError, match="lacks the lines"):
        table.drill(["clock"], short=True, as_json=False, page=tmp_path / "plain.md")


@pytest.mark.parametrize(
    ("words", "says"), [(["kill-saves"], "did you mean kill-save"), (["--write", "nowhere.md"], "there is no page nowhere.md")]
)
def test_mistake_is_one_line(words: list[str], says: str, tmp_path: Path, monkeypatch, capsys) -> None:
    from seedbed.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["drill", *words]) == 2
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_drill_page_lists_every_drill() -> None:
    text = (ROOT / "docs" / "drills.md").read_text()
    missing = [one.name for one in table.DRILLS if f"| `{one.name}` |" not in text]
    assert not missing and "FAILED" not in text, "renew it: seedbed drill --write docs/drills.md"
    assert all(one.about and len({d.name for d in table.DRILLS}) == len(table.DRILLS) for one in table.DRILLS)


# ---- the drills themselves -------------------------------------------------------------------------------------------

# Together in one process, which loads torch once; those in full are the counts that the docs promise.
FULL = ["kill-save", "kill-run"]
SHORT = [one.name for one in table.DRILLS if one.name not in FULL]
SHARES = {"full": FULL, "short, first half": SHORT[::2], "short, second half": SHORT[1::2]}


def command(tmp_path: Path, *words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """In a process without threads, as drills need it; `code` runs before."""
    call = f"{code}\nimport sys; from seedbed.cli import main; sys.exit(main({list(words)!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", call], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", SHARES)
def test_drills_lose_nothing(tmp_path: Path, share: str) -> None:
    done = command(tmp_path, "drill", *SHARES[share], "--json", *([] if share == "full" else ["--short"]))
    found = {one["drill"]: one for one in json.loads(done.stdout)}
    assert found.keys() == set(SHARES[share])
    wrong = [f"{name}: {one['problem']}" for name, one in found.items() if one["outcome"] == "failed"]
    assert not wrong and done.returncode == 0, "\n".join(wrong) + done.stderr[-2000:]
    for name, one in found.items():
        least = {"kill-save": 100, "kill-run": 20}.get(name, 1) if one["outcome"] == "passed" else 0
        assert one["steps_lost"] == 0 and one["num_detected"] == one["num_faults"] >= least


# Defects that the drills must not let pass, as edits of the functions that prevent them.
BROKEN = {
    "damaged-checkpoint": "from seedbed.train import checkpoint_loading as c; c._verified = lambda path, _: path.read_bytes()",
    "power-loss": "from seedbed.track.run import Run; Run.sync = lambda self: None",
    "kill-save": "from seedbed.train import checkpoint as c; c._make_aside = lambda folder, aside: "
    "(aside.mkdir(exist_ok=True), (folder / 'step-000016').exists() or aside.rename(folder / 'step-000016'), "
    "aside.exists() or aside.symlink_to('step-000016'))",
    "hang-up": "import signal; from seedbed.train import guard as g; g.STOPPING = (signal.SIGTERM, signal.SIGINT)",
    "slow-clients": "from seedbed.serve import slow_clients as s; s.BoundedProtocol._give_up = lambda self: None; "
    "from seedbed.drills import table as t; t.DRILLS[:] = [t.Drill(d.name, d.act, 25.0) for d in t.DRILLS]",
    "hang": "from seedbed.train import guard as g; g._watch = lambda *arguments: None; "
    "from seedbed.drills import table as t; t.DRILLS[:] = [t.Drill(d.name, d.act, 15.0) for d in t.DRILLS]",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BROKEN)
def test_drill_can_fail(tmp_path: Path, name: str) -> None:
    done = command(tmp_path, "drill", name, "--short", "--json", code=BROKEN[name])
    (found,) = json.loads(done.stdout)
    assert done.returncode == 1 and found["outcome"] == "failed" and found["problem"], found
