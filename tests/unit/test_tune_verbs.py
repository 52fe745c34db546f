"""The four verbs from names to exit codes: what is printed, what is written and where, and how each mistake is answered."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from tune_toys import Talker

from seedbed.errors import UserError
from seedbed.tune import batch, show, verbs

RECIPE = '''
from dataclasses import dataclass
from seedbed import Config, Data, number
from tune_toys import Hungry, Regression, Rows, Talker, Windows

@dataclass(frozen=True)
class Model:
    width: int = number(16, low=1)
    most: int = number(1000, low=0)

def plain() -> Config:
    """A toy."""
    return Config(model=Model(), data=None, batch=16, steps=200, device="cpu")

def talk() -> Config:
    """Another toy."""
    return Config(model=Model(), data=None, batch=8, steps=200, device="cpu", precision="bf16")

def open_data(config):
    source = Windows(64, 16, 48) if config.precision == "bf16" else Rows(512)
    return Data(train=source, valid=source, facts={})

def build(config, data):
    return Talker() if config.precision == "bf16" else Hungry(config.model.most, ValueError("odd shapes"))
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch, "TIMED_SECONDS", 0.0)
    return tmp_path


CALLS = {
    "find-lr": (verbs.find_lr, {"steps": 20}, {"result.json", "find-lr.png"}),
    "find-batch": (verbs.find_batch, {"most": 32}, {"result.json"}),
    "profile": (verbs.profile, {"steps": 5}, {"result.json", "trace.json"}),
    "plan": (verbs.plan, {}, {"result.json"}),
}


@pytest.mark.parametrize("preset", ["plain", "talk"])
@pytest.mark.parametrize("verb", CALLS)
def test_verbs_print_and_write_beside_the_runs(verb: str, preset: str, place: Path, capsys) -> None:
    act, options, files = CALLS[verb]
    assert act(f"toy.py:{preset}", ["seed=3"], root=place / "runs", **options) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{verb} toy.py:{preset}") and not shown.err
    assert max(map(len, shown.out.splitlines())) <= 100 or str(place) in shown.out
    assert not (place / "runs").exists(), "the runs folder belongs to runs"
    folder = place / "tune" / f"{verb}-toy.py-{preset}"
    assert {p.name for p in folder.iterdir()} == files
    assert (place / "tune" / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("verb", CALLS)
def test_json_output_is_only_json(verb: str, place: Path, capsys) -> None:
    act, options, _ = CALLS[verb]
    assert act("toy.py:talk", [], root=Path("runs"), json=True, **options) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["name"] == "toy.py:talk" and not shown.err
    assert result == json.loads((place / "tune" / f"{verb}-toy.py-talk" / "result.json").read_text())


def test_find_lr_prints_its_result(place: Path, capsys) -> None:
    verbs.find_lr("toy.py:plain", ["optim.lr=1e-2", "batch=64"], root=Path("runs"), steps=60)
    out = capsys.readouterr().out
    for words in ("a run of 200 steps", "x configured", "untrained", "find-lr.png", "\n"):
        assert words in out
    result = json.loads((place / "tune" / "find-lr-toy.py-plain" / "result.json").read_text())
    assert " ".join(result["advice"].split()) in " ".join(out.split()) and result["trial_steps"] == 60


def test_plan_shows_both_counts_and_marks_what_is_assumed(place: Path, capsys) -> None:
    (place / "prices.json").write_text('{"date": "2026-05-01", "H100 SXM": 2.5}')
    verbs.plan("toy.py:talk", [], root=Path("runs"), prices=Path("prices.json"))
    out = " ".join(capsys.readouterr().out.split())  # a cell wraps where the numbers beside it are long
    for words in (
        "by formula; torch counts",
        "difference +0.00%",
        "assumed",
        "Chinchilla",
        "prices of 2026-05-01",
        "H100 SXM",
        "fits",
    ):
        assert words in out
    assert f"{sum(p.numel() for p in Talker().parameters()):,}" in out


def test_crash_is_reported_with_its_message(place: Path, capsys) -> None:
    assert verbs.find_batch("toy.py:plain", ["model.most=8"], root=Path("runs")) == 1
    shown = capsys.readouterr()
    assert "batch 16 crashed, and not for lack of memory: ValueError: odd shapes" in shown.err
    assert "items/s" in shown.out, "what was measured before is not lost"


def test_trials_are_printed_as_they_end(place: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = batch.Attempts._try

    def attempt(self, size):
        seen.append(capsys.readouterr().out)
        return original(self, size)

    monkeypatch.setattr(batch.Attempts, "_try", attempt)
    assert verbs.find_batch("toy.py:plain", [], root=Path("runs"), most=16) == 0
    assert seen[0].startswith("find-batch toy.py:plain") and "peak memory" in seen[0], "before anything was tried"
    for size, row in zip((4, 8), seen[1:], strict=True):
        number, state, memory, unit, ms, items = row.split()
        assert (number, state, unit) == (str(size), "fits", "GiB") and float(memory) > 0 and float(ms) > 0
        assert float(items.replace(",", "")) > 0
    assert "largest that fits: 16 (measured)" in capsys.readouterr().out


def test_find_batch_where_nothing_fits(place: Path, capsys) -> None:
    assert verbs.find_batch("toy.py:plain", [], root=Path("runs"), limit=1e-6) == 1
    assert "not even one item fits" in capsys.readouterr().out


@pytest.mark.parametrize("act", [call[0] for call in CALLS.values()], ids=CALLS)
@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("nonsense/plain", [], "there is no recipe"),
        ("missing.py", [], "cannot be read"),
        ("toy.py:other", [], "no preset"),
        ("toy.py", [], "several presets"),
        ("toy.py:plain", ["btch=3"], "unknown key"),
        ("toy.py:plain", ["batch=0"], "out of range"),
        ("toy.py:plain", ["batch"], "not key=value"),
    ],
)
def test_mistakes_are_one_or_two_lines(act, name: str, settings: list[str], words: str, place: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        act(name, settings, root=Path("runs"))
    assert str(caught.value).count("\n") <= 1 and not (place / "tune").exists()


@pytest.mark.parametrize(
    ("options", "words"), [({"run": "ghost"}, "there is no run 'ghost'"), ({"prices": Path("none.json")}, "cannot be read")]
)
def test_plan_with_missing_files(options: dict, words: str, place: Path) -> None:
    with pytest.raises(UserError, match=words):
        verbs.plan("toy.py:plain", [], root=Path("runs"), **options)


def test_output_folder_that_cannot_be_written(place: Path) -> None:
    (place / "tune").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot be written"):
        verbs.plan("toy.py:plain", [], root=Path("runs"))


def test_markup_in_names_is_text(capsys) -> None:
    Console(width=100).print(show.grid(("op",), [("[bold]aten[/bold]",)]))
    assert "[bold]aten[/bold]" in capsys.readouterr().out


# ---- the gpt recipe ----------------------------------------------------------------------------------------------------

SMALL = ["model.depth=2", "model.width=32", "model.heads=4", "data.block=24", "batch=4"]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["model.tied=false", "model.mlp=gelu", "model.norm=layer", "model.positions=learned"],
        ["model.mlp=relu2", "model.kv_heads=2", "model.skips=true", "model.depth=3"],
        ["model.dropout=0.1", "model.softcap=15", "precision=bf16", "ema=0.99", "optim.kind=muon"],
        ["model.values_x0=true", "model.drop_path=0.1", "accum=2"],
    ],
    ids=" ".join,
)
def test_formula_of_gpt_agrees_with_the_count(settings: list[str], place: Path, capsys) -> None:
    assert verbs.plan("gpt/demo", SMALL + settings, root=Path("runs"), json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert abs(result["flops_difference"]) < 0.01 and result["estimate"]["fake_tensors"]
    assert result["tokens"]["per_item"] == 24


@pytest.mark.slow
def test_instruments_run_on_gpt(place: Path, capsys) -> None:
    assert verbs.find_lr("gpt/demo", SMALL, root=Path("runs"), steps=20) == 0
    assert verbs.find_batch("gpt/demo", SMALL, root=Path("runs"), most=16) == 0
    assert verbs.profile("gpt/demo", SMALL, root=Path("runs"), steps=5) == 0
    out = capsys.readouterr().out
    for words in ("untrained", "batch=4 accum=1", "verdict: bound by", "ui.perfetto.dev"):
        assert words in out
