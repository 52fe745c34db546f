"""Recipes in a user's own file: samples as they are, and errors with their line."""

from pathlib import Path
from typing import Any

import pytest

from seedbed.cli import main
from seedbed.report import facts
from seedbed.track.run import Run

RECIPE = """
import numpy as np
import torch
from torch import nn
from seedbed import Config, Data, Every, Sample, Source, System

def tiny() -> Config:
    return Config(model=None, data=None, every=Every(log=1, eval=2, sample=0, save=2), steps=4, batch=8)

class Points(Source):
    def __init__(self):
        self.num_items, self.arrays = 64, {"x": np.ones((64, 4), np.float32)}
        self.spans = {"x": 0}

def open_data(config):
    return Data(Points(), Points(), {"name": "points"})

class Own(System):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def loss(self, batch, engine):
        error = self.net(batch["x"]).square().mean()
        return error, {METRICS}

    def evaluate(self, source, engine):
        return {EVALUATED}

    def sample(self, request, engine):
        return SAMPLE

def build(config, data):
    return Own()
"""
PLAIN = {"METRICS": "", "EVALUATED": '"error": 1.0', "SAMPLE": "Sample()"}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a recipe with other parts than the plain ones; the working directory is its folder."""
    monkeypatch.chdir(tmp_path)

    def put(**parts: str) -> str:
        text = RECIPE
        for name, value in {**PLAIN, **parts}.items():
            text = text.replace(name, value)
        (tmp_path / "own.py").write_text(text)
        return "own.py"

    return put


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(Path("own.py").read_text().splitlines(), 1) if text in line)


# ---- metrics ---------------------------------------------------------------------------------------------------------

RISING = '"accuracy": 0.5 + 0.1 * float(engine.progress), "error": 0.5'


@pytest.mark.parametrize("name", ["accuracy", "valid_accuracy", "psnr", "exact", "psnr_out"])
def test_score_that_would_be_minimised_is_refused_before_the_first_step(write: Any, capsys: Any, name: str):
    write(EVALUATED=RISING.replace("accuracy", name))
    status, _, err = ask(capsys, "train", "own.py", "--no-check", "--dirty", "--run", "s")
    assert status == 2 and f"evaluate: {name} decides `best`" in err and f'higher_is_better = ("{name}",)' in err
    assert not Path("runs/s/rows.jsonl").exists() and not list(Path("runs/s").glob("checkpoints/step-*"))


def test_missing_evaluation_is_said_before_training(write: Any, capsys: Any):
    text = Path(write()).read_text()
    Path("own.py").write_text(text.replace("def evaluate(", "def not_there("))
    for check in ("--force", "--no-check"):
        status, _, err = ask(capsys, "train", "own.py", "--dirty", check, "--run", f"s{check}")
        assert status == 2 and len(err.splitlines()) == 1 and "Own has no evaluate(self, source, engine)" in err
        assert not Path(f"runs/s{check}/rows.jsonl").exists()


def test_best_follows_a_metric_of_which_more_is_better(write: Any, capsys: Any):
    text = Path(write(EVALUATED=RISING)).read_text()
    Path("own.py").write_text(text.replace("class Own(System):", 'class Own(System):\n    higher_is_better = ("acc*",)\n'))
    status, _, err = ask(capsys, "train", "own.py", "--no-check", "--dirty", "--run", "s")
    assert status == 0, err
    run = Run(Path("runs/s"))
    evaluated = [e for e in run.events() if e["kind"] == "eval"]
    assert [e["best"] for e in evaluated] == [True] * len(evaluated) and len(evaluated) > 1
    assert all(e["higher_is_better"] == ["accuracy"] for e in evaluated)
    state = run.status()
    assert (state["metric"], state["higher_is_better"]) == ("accuracy", True)
    assert state["best"] == max(e["accuracy"] for e in evaluated) and run.checkpoints()[1] == run.checkpoints()[0][-1]
    shown = ask(capsys, "runs", "show", "s")[1]
    assert "best         0.6" in shown and facts.best(run.events()) == (4, state["best"])


def test_metric_may_be_a_python_number(write: Any, capsys: Any):
    write(METRICS='"seen": 2.5, "count": 3, "half": error.detach() / 2')
    for accum in (1, 2):
        status, _, err = ask(capsys, "train", "own.py", f"accum={accum}", "--no-check", "--dirty", "--run", f"s{accum}")
        rows = Run(Path(f"runs/s{accum}")).rows()
        assert status == 0 and len(rows) == 4, err
        assert all((row["seen"], row["count"]) == (2.5, 3.0) for row in rows)


@pytest.mark.parametrize("value", ['"much"', "None", "[1.0]"])
def test_metric_of_another_type_is_named(write: Any, capsys: Any, value: str):
    write(METRICS=f'"seen": {value}')
    status, _, err = ask(capsys, "train", "own.py", "--no-check", "--dirty", "--run", "s")
    assert status == 2 and "the metric `seen` is of type" in err


SAMPLES = {
    'Sample(text="some text")': ["some text"],
    'Sample(text="t", facts={"right": 0.5, "kinds": [1, 2]})': ["t", "right 0.5", "kinds 1,2"],
    'Sample(files=(request.folder / "a.txt",))': ["runs/s/samples/asked/a.txt"],
    "Sample()": ["the recipe of run s returned nothing: its `sample` gives no text, facts or files"],
    'Sample(text="said", facts={"n": 1}) if not request.write else (request.write("said\\n"), Sample(text="said"))[1]': ["said"],
}


@pytest.mark.parametrize("made", SAMPLES)
def test_sample_prints_all_that_a_recipe_returns(write: Any, capsys: pytest.CaptureFixture[str], made: str):
    write(SAMPLE=made)
    assert ask(capsys, "train", "own.py", "--no-check", "--dirty", "--run", "s")[0] == 0
    status, out, err = ask(capsys, "sample", "s")
    assert (status, err) == (0, "")
    assert [line.removeprefix(f"{Path.cwd()}/") for line in out.splitlines()] == SAMPLES[made]


# ---- errors ----------------------------------------------------------------------------------------------------------

HELPER = "def double(x):\n    return x.reshape(5)\n"
# The change of a recipe, the words of its line, and whether the line is of what was called (else of what returned).
BROKEN = {
    "a name": ('return error, {"a": nothing}', True),
    "inside torch": ("return (batch['x'] @ batch['x']).mean(), {}", True),
    "a missing key": ('return batch["y"].mean(), {}', True),
    "a float": ("return float(error), {}", False),
    "no dictionary": ("return error", False),
    "no gradient": ("return error.detach(), {}", False),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_error_of_a_recipe_is_shown_with_its_line(write: Any, capsys: pytest.CaptureFixture[str], name: str):
    changed, is_there = BROKEN[name]
    path = Path(write())
    path.write_text(path.read_text().replace("return error, {}", changed))
    status, _, err = ask(capsys, "train", "own.py", "--no-check", "--dirty")
    source = changed if is_there else "def loss(self, batch, engine):"
    who = "your recipe" if is_there else "what `loss` of your recipe returned"
    assert status == 1 and "bug in seedbed" not in err
    assert err.endswith(f"raised by {who}, {path.resolve()}:{line_of(source)}, in loss\n    {source}\n")


def test_error_in_a_file_beside_the_recipe_names_that_file(write: Any, capsys: pytest.CaptureFixture[str]):
    path = Path(write())
    Path("helping.py").write_text(HELPER)
    path.write_text("from helping import double\n" + path.read_text().replace("return error,", "return double(error),"))
    err = ask(capsys, "train", "own.py", "--no-check", "--dirty")[2]
    assert err.endswith(f"raised by your recipe, {Path('helping.py').resolve()}:2, in double\n    return x.reshape(5)\n")


def test_error_around_a_recipe_is_no_bug_of_ours_alone(write: Any, capsys: pytest.CaptureFixture[str]):
    path = Path(write())
    path.write_text(path.read_text().replace("return Data(Points(), Points(), {", "return dict(a={"))
    err = ask(capsys, "train", "own.py", "--no-check", "--dirty")[2]
    assert "bug in seedbed" not in err and f"while seedbed used your recipe {path.resolve()}: look at what its functions" in err
