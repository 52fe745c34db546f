"""The Python interface: train, sweep, read and load runs, as a script or a notebook would."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

import seedbed
from seedbed import api
from seedbed.launch import local
from seedbed.report import notebook

SMALL = {"model.depth": 1, "model.width": 32, "data.block": 32, "batch": 4, "every.log": 2, "every.eval": 4, "every.save": 4}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(run: str = "one", *settings: str, **values: object) -> api.Run:
    return seedbed.train("gpt/demo", *settings, run=run, check=False, **{**SMALL, "steps": 4, **values})


def test_train_returns_the_run_that_the_command_would_make(here: Path):
    run = small("one", "optim.lr=1e-3", seed=3)
    assert run.path == Path("runs/one") and run.status == "done"
    assert (run.settings["optim.lr"], run.settings["seed"], run.settings["steps"]) == (1e-3, 3, 4)
    for name in ("config.json", "rows.jsonl", "report.md"):
        assert (here / run.path / name).is_file()
    assert "one" in (here / "JOURNAL.md").read_text()


def test_train_gives_the_numbers_of_the_command_line(here: Path):
    words = [f"{key}={value}" for key, value in SMALL.items()]
    command = [sys.executable, "-m", "seedbed", "train", "gpt/demo", *words, "steps=4", "--run", "typed", "--no-check"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert api.Run(here / "runs" / "typed").rows()["loss"] == small("called").rows()["loss"]


def test_columns_have_one_length_and_a_value_for_every_line():
    run = small()
    for columns in (run.rows(), run.events(), run.evals()):
        assert len({len(values) for values in columns.values()}) == 1
    assert run.rows()["step"] == [2, 4] and run.evals()["step"] == [4]
    assert "loss" in run.evals() and "kind" not in run.evals()
    assert set(run.events()["kind"]) >= {"start", "eval", "end"}
    assert api.columns([{"a": 1}, {"b": {"c": 2}}]) == {"a": [1, None], "b.c": [None, 2]}


def test_runs_lists_what_the_folder_holds():
    assert seedbed.runs() == []
    small()
    Path("runs/two").mkdir()
    assert [(run.name, run.status) for run in seedbed.runs()] == [("one", "done"), ("two", "unknown")]


def test_load_takes_a_run_a_name_and_a_path(here: Path):
    run = small()
    texts = {seedbed.load(which).sample(tokens=12).text for which in (run, "one", "runs/one", here / "runs" / "one")}
    assert len(texts) == 1 and texts.pop()


def test_sweep_returns_its_runs_and_continues(capsys: pytest.CaptureFixture[str]):
    grid = {**SMALL, "steps": 2, "every.save": 0, "optim.lr": [1e-3, 2e-3]}
    found = seedbed.sweep("gpt/demo", check=False, **grid)
    assert [run.settings["optim.lr"] for run in found] == [1e-3, 2e-3] and {run.status for run in found} == {"done"}
    before = [run.rows() for run in found]
    assert [run.rows() for run in seedbed.sweep("gpt/demo", check=False, **grid)] == before


def test_interrupted_training_returns_a_run_that_can_be_resumed(here: Path):
    def interrupt() -> None:
        while not (here / "runs" / "long" / "rows.jsonl").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    run = small("long", steps=100_000)
    assert run.status == "interrupted" and run.rows()["step"][-1] < 100_000
    assert list((run.path / "checkpoints").glob("step-*"))


WRONG = [
    (lambda: seedbed.train("gpt/demo", stps=3), "steps"),
    (lambda: seedbed.train("gpt/demo", **{"dist.replicate": 2, "steps": 2}), "several ranks"),
    (lambda: seedbed.train("gtp/demo"), "gpt"),
    (lambda: seedbed.load("nothing"), "no run"),
    (lambda: seedbed.load("no/such/folder"), "there is no folder"),
    (lambda: seedbed.sweep("gpt/demo", steps=2), "single trial"),
]


@pytest.mark.parametrize(("call", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_call_raises_a_user_error_and_leaves_nothing(call, says: str, here: Path):
    with pytest.raises(seedbed.UserError, match=says):
        call()
    assert list(here.iterdir()) == []


def test_run_that_fails_raises_with_the_place_of_its_log(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "fit", lambda job: "nan")
    with pytest.raises(seedbed.UserError, match=r"ended as 'nan'; .*console\.log"):
        small("bad")


def test_train_is_a_function_and_a_package():
    import seedbed.train.loop as loop

    assert callable(seedbed.train) and loop.fit.__module__ == "seedbed.train.loop"


def test_live_curve_is_redrawn_in_a_notebook_only(here: Path, monkeypatch: pytest.MonkeyPatch):
    shown: list[bytes] = []
    handle = SimpleNamespace(update=lambda image: shown.append(image.data))
    display = ModuleType("IPython.display")
    display.display, display.Image = lambda display_id: handle, lambda data: SimpleNamespace(data=data)
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(notebook, "SECONDS", 0.05)
    small("silent")
    assert shown == []
    shell.kernel = object()
    small("shown")
    assert shown and Image.open(io.BytesIO(shown[-1])).size[0] >= 600
    assert not [t for t in threading.enumerate() if t.name == "live curve"]
