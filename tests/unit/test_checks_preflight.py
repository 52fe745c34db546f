"""The preflight on real recipes: clean ones raise no alarm, a user's mistakes are named, train obeys, configs are read."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT

from seedbed import config as configs
from seedbed.checks import preflight, runner
from seedbed.checks.case import Case
from seedbed.cli import main
from seedbed.launch import local
from seedbed.recipes import find
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
    case = Case(recipe, preset, configs.override(recipe.preset(preset), settings), Path("nowhere"))
    return ["\n".join(f.lines(case.name)) for f in runner.run(case, runner.choose(only)).findings if f.alarm]


def text_for(preset: str) -> list[str]:
    """Small data in place of files that are not there."""
    if "124m" in preset:
        return ["data.text=random:200_000:50304"]
    return ["data.text=reference", *(["data.vocab=2048"] if preset == "gpt3-small" else [])]


CLEAN = [(f"gpt/{preset}", *text_for(preset)) for preset in find("gpt/demo")[0].presets]
VARIANTS = [
    ("gpt/demo", *setting.split())
    for setting in (
        "model.dropout=0.2", "model.tied=false", "optim.lr=1e-3", "accum=4", "batch=1", "model.norm=layer", "model.softcap=15",
        "model.kv_heads=2", "model.mlp=relu2", "data.mode=random", "data.mode=blocks", "ema=0.99",
        "model.gate=true model.skips=true",
    )
]  # fmt: skip


@pytest.mark.parametrize("name", ["gpt/demo", str(TOY), str(EXAMPLE)], ids=["demo", "toy", "example"])
def test_clean_recipes_raise_no_alarm(name: str):
    assert alarms(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "case", [*CLEAN, *VARIANTS, (str(TOY),), (str(EXAMPLE),)], ids=lambda case: " ".join(case).split("/")[-1]
)
def test_every_clean_preset_and_variant_raises_no_alarm(case: tuple[str, ...], seed: int):
    assert alarms(*case, f"seed={seed}") == []


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
    dice = np.random.default_rng(0)
    x = (dice.integers(0, 20, (200, 1)) + np.cumsum(dice.integers(0, 3, (200, config.data.length)), 1)) % 20
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


def test_batch_and_sequence_exchanged_in_a_users_own_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("BATCH_FIRST", "False"))
    assert main(["check", str(path), "--only", "M", "--only", "L"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL M4" in shown and "batch and time are swapped" in shown
    where = next(line for line in shown.split("FAIL M4")[1].splitlines() if line.strip().startswith("where"))
    assert "first module that moves: rnn" in where
    path.write_text(MINE.replace("BATCH_FIRST", "True"))
    assert main(["check", str(path), "--only", "M", "--only", "L"]) == 0, capsys.readouterr().out


def test_the_command_prints_json_and_keeps_a_full_verdict_only(capsys: pytest.CaptureFixture[str], cache: Path, tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("BATCH_FIRST", "True"))
    kept = len(list((cache / "preflight").glob("*.json")))
    assert main(["check", str(path), "--only", "A", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == 0 and {f["id"] for f in told["findings"]} == {"A1", "A2", "A3", "A4"}
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
def test_wrong_words(words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["check", *words]) == status
    shown = capsys.readouterr()
    assert re.search(says, shown.out + shown.err)


def test_a_field_that_nobody_reads_is_named(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("BATCH_FIRST", "True").replace("    width: int", "    dropout: float = 0.0\n    width: int"))
    (found,) = alarms(str(path), "model.dropout=0.5", only=("A2",))
    assert "model.dropout=0.5 is read by nothing" in found
    assert alarms(str(path), only=("A2",)) == []


def test_a_preset_that_promises_another_size_is_named(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("BATCH_FIRST", "True").replace("Letters that count up.", "Letters, 10 M parameters."))
    (found,) = alarms(str(path), only=("A4",))
    assert "promises 10 M" in found


def test_a_preset_that_cannot_be_made_is_named(tmp_path: Path):
    path = tmp_path / "mine.py"
    extra = "\ndef broken() -> Config:\n    return Config(model=Model(widht=3), data=Letters())\n"
    path.write_text(MINE.replace("BATCH_FIRST", "True") + extra)
    (found,) = alarms(f"{path}:letters", only=("A1",))
    assert "preset broken cannot be made" in found and "widht" in found


def test_a_mistake_in_the_source_is_named(tmp_path: Path):
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


def test_train_stops_at_an_error_unless_forced_and_tells(tmp_path: Path, broken: Path):
    runs = tmp_path / "runs"
    status, run = start(runs, broken, "quick")
    assert status == local.EXIT_FAILED and outcome(run) == "failed"
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
    assert verdict["exit_code"] == 0 and {f["id"] for f in verdict["findings"]} == {c.id for c in runner.choose(quick=True)}
    status, run = start(runs, TOY, "skip")
    assert status == 0 and outcome(run) == "skipped" and not (run.path / "preflight.json").exists()
    assert "preflight: skipped" in (tmp_path / "JOURNAL.md").read_text()


def test_train_takes_a_full_verdict_that_still_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    recipe, preset = find(str(TOY))
    config = configs.override(recipe.preset(preset), ["steps=2"])
    case = Case(recipe, preset, config, tmp_path)
    report = runner.run(case, runner.choose(["D5", "M7"]))
    report.key = runner.key_of(recipe, config, case.real_data.facts["fingerprint"])
    runner.store(preflight.verdicts(), report)
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
def test_masks(old: str, new: str, says: str, tmp_path: Path):
    source = TOY.read_text().replace("\n    def num_targets(", MASKED).replace("Optim,", "Optim, Probe,")
    assert old in source
    path = tmp_path / "masked.py"
    path.write_text(source.replace(old, new) if old else source)
    found = alarms(str(path), only=("L3",))
    assert len(found) == bool(says) and says in "".join(found)
