"""The preflight on real recipes: clean ones raise no alarm, a user's mistakes are named, train obeys, configs are read."""

import dataclasses
import io
import json
import os
import re
import time
from pathlib import Path

import pytest
from conftest import ROOT

from seedbed import config as configs
from seedbed.checks import preflight, runner
from seedbed.checks.subject import Subject
from seedbed.cli import main
from seedbed.errors import EXIT_FAILED
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.track import text
from seedbed.track.run import Run

TOY, EXAMPLE = ROOT / "tests" / "toy_recipe.py", ROOT / "examples" / "my_recipe.py"
OURS = ("A", "D", "M", "L", "C")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("SEEDBED_CACHE", str(folder))
    return folder


def alarms(name: str, *settings: str, only: tuple[str, ...] = OURS) -> list[str]:
    recipe, preset = find(name)
    subject = Subject(recipe, preset, configs.override(recipe.preset(preset), settings), Path("nowhere"))
    return ["\n".join(f.lines(subject.name)) for f in runner.run(subject, runner.select(only)).findings if f.alarm]


def text_for(preset: str) -> list[str]:
    """Small data in place of files that are not there."""
    if "124m" in preset:
        return ["data.text=random:200_000:50304"]
    return ["data.text=reference", *(["data.vocab=2048"] if preset == "gpt3-small" else [])]


CLEAN = [(f"gpt/{preset}", *text_for(preset)) for preset in find("gpt/demo")[0].presets]


@pytest.mark.parametrize("name", ["gpt/demo", str(TOY), str(EXAMPLE)], ids=["demo", "toy", "example"])
def test_clean_recipes_raise_no_alarm(name: str):
    assert alarms(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])  # with the first seed, all checks run in test_checks_presets.py and above
@pytest.mark.parametrize("subject", [*CLEAN, (str(TOY),), (str(EXAMPLE),)], ids=lambda subject: " ".join(subject).split("/")[-1])
def test_every_clean_preset_raises_no_alarm_with_other_seeds(subject: tuple[str, ...], seed: int):
    assert alarms(*subject, f"seed={seed}") == []


MINE = '''
"""A next-letter model of one's own."""
from dataclasses import dataclass
import numpy as np, torch
from torch import nn
from seedbed import Config, Data, Source, System, number

@dataclass(frozen=True)
class Model:
    width: int = number(16, low=1)

@dataclass(frozen=True)
class Letters:
    length: int = number(12, low=2)

def letters() -> Config:
    """Letters that count up."""
    return Config(model=Model(), data=Letters(), batch=8, steps=10)

class Rows(Source):
    def __init__(self, x):
        self.num_items, self.arrays, self.spans = len(x), {"x": x}, {"x": 0}

def open_data(config):
    rng = np.random.default_rng(0)
    x = (rng.integers(0, 20, (200, 1)) + np.cumsum(rng.integers(0, 3, (200, config.data.length)), 1)) % 20
    return Data(Rows(x[:160]), Rows(x[160:]), {"name": "letters", "fingerprint": "1"})

class Net(System):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, width), nn.Linear(width, 20)
        self.rnn = nn.GRU(width, width, batch_first=BATCH_FIRST)

    def loss(self, batch, engine):
        x = batch["x"]
        hidden, _ = self.rnn(self.embed(x[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), x[:, 1:].flatten()), {}

def build(config, data):
    return Net(config.model.width)
'''


def test_swapped_axes_in_a_users_file_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("BATCH_FIRST", "False"))
    assert main(["check", str(path), "--only", "M", "--only", "L"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL M4" in shown and "batch and time are swapped" in shown
    where = next(line for line in shown.split("FAIL M4")[1].splitlines() if line.strip().startswith("where"))
    assert "first module that moves: rnn" in where
    path.write_text(MINE.replace("BATCH_FIRST", "True"))
    assert main(["check", str(path), "--only", "M", "--only", "L"]) == 0, capsys.readouterr().out


def test_command_prints_json_and_keeps_a_full_verdict_only(capsys: pytest.CaptureFixture[str], cache: Path, tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("BATCH_FIRST", "True"))
    kept = len(list((cache / "preflight").glob("*.json")))
    assert main(["check", str(path), "--only", "A", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["exit_code"] == 0 and {f["id"] for f in summary["findings"]} == {"A1", "A2", "A3", "A4"}
    assert len(list((cache / "preflight").glob("*.json"))) == kept


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["gpt/demo", "learning_rate=1"], 1, r"FAIL A1[\s\S]*unknown key `learning_rate`; nearest"),
        (["gpt/demo", "--only", "Q9"], 2, r"no check 'Q9'"),
        (["gpt/nonesuch"], 2, r"demo"),
        (["nowhere.py"], 2, r"nowhere\.py"),
    ],
)
def test_wrong_check_arguments_are_one_line(words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check", *words]) == status
    shown = capsys.readouterr()
    assert re.search(says, shown.out + shown.err)


def test_unread_field_is_named(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("BATCH_FIRST", "True").replace("    width: int", "    dropout: float = 0.0\n    width: int"))
    (found,) = alarms(str(path), "model.dropout=0.5", only=("A2",))
    assert "model.dropout=0.5 is read by nothing" in found
    assert alarms(str(path), only=("A2",)) == []


def test_preset_that_promises_another_size_is_named(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("BATCH_FIRST", "True").replace("Letters that count up.", "Letters, 10 M parameters."))
    (found,) = alarms(str(path), only=("A4",))
    assert "promises 10 M" in found


def test_preset_that_cannot_be_made_is_named(tmp_path: Path):
    path = tmp_path / "mine.py"
    extra = "\ndef broken() -> Config:\n    return Config(model=Model(widht=3), data=Letters())\n"
    path.write_text(MINE.replace("BATCH_FIRST", "True") + extra)
    (found,) = alarms(f"{path}:letters", only=("A1",))
    assert "preset broken cannot be made" in found and "widht" in found


def test_mistake_in_the_source_is_named(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("BATCH_FIRST", "True").replace('x = batch["x"]', 'x = batch["x"]; float(x.sum().item())'))
    (found,) = alarms(str(path), only=("A3",))
    assert ".item() inside loss()" in found and "mine.py:" in found


def start(root: Path, path: Path, check: str) -> tuple[int, Run]:
    status = local.train(str(path), ["steps=2"], root=root, run_name=check, dirty=True, check=check)  # type: ignore[arg-type]
    return status, Run.open(root, check)


def outcome(run: Run) -> str:
    return next(e["outcome"] for e in run.events() if e["kind"] == "preflight")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A recipe with a mistake that the quick checks find."""
    path = tmp_path / "broken.py"
    bad = TOY.read_text().replace("x = x.astype(np.float32)", "x = x.astype(np.float32)\n    x[:, 3] = np.inf")
    path.write_text(bad)
    return path


def test_train_stops_at_a_failed_check_unless_forced(tmp_path: Path, broken: Path):
    runs = tmp_path / "runs"
    status, run = start(runs, broken, "quick")
    assert status == EXIT_FAILED and outcome(run) == "failed"
    assert run.status()["status"] == "failed" and "D5" in run.status()["error"]
    assert not run.rows() and json.loads((run.path / "preflight.json").read_text())["exit_code"] == 1
    _, forced = start(runs, broken, "force")
    assert outcome(forced) == "forced"
    assert "preflight: forced past D5" in (tmp_path / "JOURNAL.md").read_text()


def test_train_runs_the_quick_checks_or_says_that_it_did_not(tmp_path: Path):
    runs = tmp_path / "runs"
    status, run = start(runs, TOY, "quick")
    assert status == 0 and outcome(run) == "passed"
    verdict = json.loads((run.path / "preflight.json").read_text())
    assert verdict["exit_code"] == 0 and {f["id"] for f in verdict["findings"]} == {c.id for c in runner.select(quick=True)}
    status, run = start(runs, TOY, "skip")
    assert status == 0 and outcome(run) == "skipped" and not (run.path / "preflight.json").exists()
    assert "preflight: skipped" in (tmp_path / "JOURNAL.md").read_text()


def test_train_uses_a_valid_full_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    recipe, preset = find(str(TOY))
    config = configs.override(recipe.preset(preset), ["steps=2"])
    subject = Subject(recipe, preset, config, tmp_path)
    report = runner.run(subject, runner.select(["D5", "M7"]))
    report.key = runner.key_of(recipe, config, subject.real_data.facts["fingerprint"])
    runner.save_verdict(preflight.verdict_folder(), report)
    _, run = start(tmp_path / "runs", TOY, "quick")
    assert {f["id"] for f in json.loads((run.path / "preflight.json").read_text())["findings"]} == {"D5", "M7"}


MASKED = """
    def probe(self, batch):
        return Probe(
            batch={k: batch[k] for k in ("x", "y", "keep")},
            predict=lambda b: self.net(b["x"])[:, 0],
            objective=lambda guess, b: ((guess - b["y"]) ** 2 * b["keep"]).sum() / b["keep"].sum().clamp_min(1),
            inputs="x",
            targets="y",
            mask="keep",
        )

    def num_targets("""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", "", ""),
        ('** 2 * b["keep"]', "** 2", "masked targets change the loss"),
        ('(guess - b["y"])', '(guess - 0 * b["y"])', "do not change the loss"),
        ('batch["keep"].sum().clamp_min(1)', 'batch["keep"].sum()', "costs nan"),
        ('return batch["keep"].sum()', 'return batch["keep"].numel()', "num_targets says"),
    ],
)
def test_masked_recipes_are_checked(old: str, new: str, says: str, tmp_path: Path):
    source = TOY.read_text().replace("\n    def num_targets(", MASKED).replace("Optim,", "Optim, Probe,")
    assert old in source
    path = tmp_path / "masked.py"
    path.write_text(source.replace(old, new) if old else source)
    found = alarms(str(path), only=("L3",))
    assert len(found) == bool(says) and says in "".join(found)


# ---- kept verdicts ---------------------------------------------------------------------------------------------------


def keep_verdict(recipe_path: Path, *ids: str, spoiled: str = "") -> Path:
    """A kept verdict of these checks on the recipe as `start` trains it; one of them, or `all`, may claim an error."""
    recipe, preset = find(str(recipe_path))
    config = configs.override(recipe.preset(preset), ["steps=2"])
    subject = Subject(recipe, preset, config, recipe_path.parent)
    report = runner.run(subject, runner.select(ids))
    wrong = {"status": "fail", "severity": "err", "what": "a claim of the past", "where": "here.py:1", "why": "-", "fix": "-"}
    report.findings = [dataclasses.replace(f, **wrong) if spoiled in (f.id, "all") else f for f in report.findings]
    report.key = runner.key_of(recipe, config, subject.real_data.facts["fingerprint"])
    runner.save_verdict(preflight.verdict_folder(), report)
    return preflight.verdict_folder() / f"{report.key}.json"


def test_stored_error_is_tried_again_before_it_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    kept = keep_verdict(TOY, "D5", "M7", spoiled="D5")
    tried: list[str] = []
    real = runner._run_one
    monkeypatch.setattr(
        runner, "_run_one", lambda subject, check, reported: tried.append(check.id) or real(subject, check, reported)
    )
    status, run = start(tmp_path / "runs", TOY, "quick")
    assert status == 0 and outcome(run) == "passed" and tried == ["D5"]
    assert re.search(
        r"seedbed check of \d{4}-\d\d-\d\d \d\d:\d\d found errors \(D5\); the quick checks were tried again",
        capsys.readouterr().out,
    )
    mended = json.loads(kept.read_text())
    assert mended["exit_code"] == 0 and {f["id"] for f in mended["findings"]} == {"D5", "M7"}


def test_stored_error_of_a_slow_check_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The quick set would let the run start, and whoever wants to stop at all errors can join the two commands by &&."""
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    kept = keep_verdict(TOY, "D5", "M7", spoiled="M7")
    status, run = start(tmp_path / "runs", TOY, "quick")
    event = next(e for e in run.events() if e["kind"] == "preflight")
    assert status == 0 and event["outcome"] == "passed" and (event["errors"], event["warnings"]) == ([], ["M7"])
    assert "a claim of the past" in capsys.readouterr().out
    assert json.loads(kept.read_text())["exit_code"] == 1, "seedbed check said so, and says so"
    assert json.loads((run.path / "preflight.json").read_text())["exit_code"] == 3


def test_stored_errors_of_all_checks_stop_no_run_that_the_quick_set_lets_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    kept, quick = keep_verdict(TOY, spoiled="all"), {check.id for check in runner.select(quick=True)}
    assert {f["id"] for f in json.loads(kept.read_text())["findings"]} == {check.id for check in runner.select()}
    status, run = start(tmp_path / "runs", TOY, "quick")
    event = next(e for e in run.events() if e["kind"] == "preflight")
    assert status == 0 and event["outcome"] == "passed" and event["errors"] == []
    assert set(event["warnings"]) == {check.id for check in runner.select()} - quick


def test_repeated_error_stops_a_run(tmp_path: Path, broken: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    keep_verdict(broken, "D5", "O1")
    status, run = start(tmp_path / "runs", broken, "quick")
    assert status == EXIT_FAILED and outcome(run) == "failed" and "D5" in run.status()["error"]


def test_verdict_of_an_older_version_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    kept = keep_verdict(TOY, "D5")
    old = json.loads(kept.read_text())
    del old["made"]
    kept.write_text(json.dumps(old))
    status, run = start(tmp_path / "runs", TOY, "quick")
    assert status == 0 and len(json.loads((run.path / "preflight.json").read_text())["findings"]) > 1


def test_verdict_holds_for_its_torch_and_kind_of_device_only(monkeypatch: pytest.MonkeyPatch):
    recipe, preset = find(str(TOY))
    config = configs.override(recipe.preset(preset), ["device=auto"])
    keys = [runner.key_of(recipe, config, "data")]
    monkeypatch.setattr(runner.torch, "__version__", "9.9.9")
    keys.append(runner.key_of(recipe, config, "data"))
    monkeypatch.setattr(runner, "pick_device", lambda name: runner.torch.device("cuda"))
    keys.append(runner.key_of(recipe, config, "data"))
    assert len(set(keys)) == 3


# ---- the progress line -----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that is a terminal, or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("words", "is_terminal", "shown"),
    [(["--only", "A1"], True, True), (["--only", "A1"], False, False), (["--only", "A1", "--json"], True, False)],
)
def test_check_shows_progress_on_a_terminal(words: list[str], is_terminal: bool, shown: bool, monkeypatch, capsys):
    stream = Terminal(is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream)
    assert main(["check", str(TOY), *words]) == 0
    assert ("check 1 of 1: A1 config keys" in stream.getvalue()) == shown
    assert stream.getvalue() == "" or stream.getvalue().endswith("\r\x1b[2K"), "a line is left behind"
    assert "check 1 of 1" not in capsys.readouterr().out


def test_preflight_of_training_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stream = Terminal(True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream)
    assert start(tmp_path / "runs", TOY, "quick")[0] == 0
    total = len(runner.select(quick=True))
    assert f"check {total} of {total}: O1 param groups" in stream.getvalue()


def test_progress_clock_runs(monkeypatch: pytest.MonkeyPatch):
    stream = Terminal(True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(preflight, "TICK", 0.01)
    with preflight.Progress(stream) as line:
        line.say("check 1 of 2: A1 config keys")
        deadline = time.monotonic() + 5
        while stream.getvalue().count("A1 config keys") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue().count("A1 config keys") >= 3


def test_closed_terminal_does_not_stop_checks(monkeypatch: pytest.MonkeyPatch):
    stream = Terminal(True)
    monkeypatch.setenv("TERM", "xterm")
    with preflight.Progress(stream) as line:
        stream.close()
        line.say("check 1 of 2: A1 config keys")
        assert not line.live


def test_progress_on_a_terminal_of_unknown_width(monkeypatch: pytest.MonkeyPatch):
    """Some terminals say that they have 0 columns; nothing but an ellipsis would fit into that."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda *given: os.terminal_size((0, 0)))
    monkeypatch.setattr("sys.stdout", type("Stream", (), {"fileno": lambda self: 1})())
    assert text.width() == 120
