"""overfit, data show, --anomaly and limit: the small instruments, on recipes that can and cannot do what is asked."""

import json
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from _sources import WindowSource
from conftest import ROOT
from helpers import TOY, kinds, resume, start, stop_at

from seedbed.checks import data_show
from seedbed.checks.overfit import Curve
from seedbed.cli import main
from seedbed.config import Limit
from seedbed.data.feed import Data, Feed, Source
from seedbed.data.limiting import limited
from seedbed.data.text import TextSource, windows
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.track.run import Run

EXAMPLE = str(ROOT / "examples" / "my_recipe.py")


def broken(tmp_path: Path, old: str, new: str) -> str:
    """The toy recipe with one edit, as a file of its own."""
    text = Path(TOY).read_text()
    assert text.count(old) == 1
    (tmp_path / "broken.py").write_text(text.replace(old, new))
    return str(tmp_path / "broken.py")


# ---- overfit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[TOY], [TOY, "--batches", "3", "--steps", "300"], [EXAMPLE, "batch=32", "model.width=32"]])
def test_overfit_memorises_a_sound_recipe(words: list[str], capsys) -> None:
    assert main(["overfit", *words]) == 0
    printed = capsys.readouterr().out
    assert ("memorised" in printed or "learning" in printed) and "round     1" in printed


@pytest.mark.parametrize(
    ("old", "new"),
    [('self.net(batch["x"])', 'self.net(batch["x"]).detach().requires_grad_()'), ('(batch["x"])', '(batch["x"] * 0)')],
    ids=["detached", "blank"],
)
def test_overfit_fails_on_a_broken_recipe(tmp_path: Path, capsys, old: str, new: str) -> None:
    assert main(["overfit", broken(tmp_path, old, new), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert not shown["ok"] and "cannot even memorise" in shown["verdict"]


def test_overfit_reports_a_diverging_rate(tmp_path: Path, capsys) -> None:
    path = broken(tmp_path, "error.sum()", "error.sum() / (error.sum() > 1).float()")
    assert main(["overfit", path, "--json"]) == 1
    assert "not finite" in json.loads(capsys.readouterr().out)["verdict"]


def test_overfit_refuses_too_few_steps(capsys) -> None:
    assert main(["overfit", TOY, "--batches", "9", "--steps", "8"]) == 2
    assert "at least 9" in capsys.readouterr().err


@pytest.mark.parametrize(("losses", "bound", "left"), [([4.0, 1.0], 0.0, 0.25), ([4.0, 2.0], 1.0, 1 / 3), ([1.0, 0.5], 1.0, 0.0)])
def test_overfit_counts_loss_above_the_bound(losses: list[float], bound: float, left: float) -> None:
    assert Curve(losses, bound, 1).left == pytest.approx(left)


# ---- data show -------------------------------------------------------------------------------------------------------


def test_data_show_prints_the_training_batch(tmp_path: Path, capsys) -> None:
    assert main(["data", "show", TOY, "--batch", "2", "--json", "--runs", str(tmp_path / "runs")]) == 0
    shown = json.loads(capsys.readouterr().out)
    entry = {e["name"]: e for e in shown["entries"]}
    assert entry["x"]["shape"] == [8, 4] and entry["x"]["dtype"] == "float32" and entry["index"]["low"] == 16
    recipe, _ = local.find(TOY)
    data = recipe.open_data(recipe.preset("toy"))
    raw = data.train.arrays["x"][shown["items"]]
    assert entry["x"]["high"] == pytest.approx(raw[:, :4].max()) and entry["x"]["mean"] == pytest.approx(
        raw[:, :4].mean(), abs=1e-6
    )


def test_data_show_counts_non_finite_values(tmp_path: Path, capsys) -> None:
    assert main(["data", "show", TOY, "data.poison=7", "batch=96", "--runs", str(tmp_path / "runs")]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.split()[:1] == ["x"]]
    assert line.split()[-1] == "1", "one number of x"
    assert data_show.facts("x", torch.tensor([1.0, float("nan"), float("inf")]))["not_finite"] == 2
    assert data_show.facts("x", torch.tensor([float("nan")]))["low"] is None


def test_data_show_decodes_text(tmp_path: Path, capsys) -> None:
    assert main(["data", "show", "gpt/demo", "--num", "2", "--json", "--runs", str(tmp_path / "runs")]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 and all(len(row) > 40 for row in rows)


@pytest.mark.parametrize(
    ("shape", "dtype", "is_image"),
    [
        ((5, 3, 16, 24), torch.float32, True),
        ((5, 16, 24, 1), torch.uint8, True),
        ((5, 16, 24), torch.float32, True),
        ((2, 4, 3, 16, 16), torch.float32, True),
        ((5, 64), torch.int64, False),
        ((5, 64, 64), torch.int64, False),
        ((5, 4, 16, 24), torch.float32, False),
        ((5, 3, 4, 4), torch.float32, False),
    ],
)
def test_data_show_draws_images(tmp_path: Path, shape: tuple, dtype: torch.dtype, is_image: bool) -> None:
    value = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    assert (data_show.images(value) is not None) == is_image
    if is_image:
        from PIL import Image

        with Image.open(data_show.draw("x", value, tmp_path)) as picture:
            assert picture.size[0] % 16 == 0 or picture.size[0] % 24 == 0


# ---- anomaly ---------------------------------------------------------------------------------------------------------


def test_anomaly_mode_names_the_forward_line(tmp_path: Path, capsys, monkeypatch) -> None:
    path = broken(tmp_path, "error.sum()", "(error * 0).sqrt().sum()")
    (line,) = [i for i, text in enumerate(Path(path).read_text().splitlines(), 1) if ".sqrt()" in text]
    monkeypatch.chdir(tmp_path)
    assert main(["train", path, "--anomaly", "--run", "one", "--no-check"]) == 2
    assert "returned nan values" in (printed := capsys.readouterr().err) and f"broken.py:{line} loss" in printed
    (event,) = [e for e in Run.open(tmp_path / "runs", "one").events() if e["kind"] == "anomaly"]
    assert event["step"] == 1 and f":{line}" in event["where"]
    assert Run.open(tmp_path / "runs", "one").status()["status"] == "failed"
    assert not torch.is_anomaly_enabled()


def test_anomaly_mode_does_not_change_the_numbers(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    start(tmp_path, "plain")
    local.train(TOY, [], root=tmp_path, run_name="watched", dirty=True, anomaly=True)
    losses = [[row["loss"] for row in Run.open(tmp_path, name).rows()] for name in ("plain", "watched")]
    assert losses[0] == losses[1]


# ---- limit -----------------------------------------------------------------------------------------------------------


def test_anomaly_mode_is_not_left_on(tmp_path: Path, monkeypatch) -> None:
    """Nothing is collected between steps; a run of days must not keep what each of its evaluations left in a circle."""
    from seedbed.train import loop

    class Circle:
        def __init__(self) -> None:
            self.me = self

    real, left, alive = loop.evaluate, [], []

    def evaluate(job: loop.Job) -> None:
        real(job)
        alive.append(sum(circle() is not None for circle in left))
        left.append(weakref.ref(Circle()))

    monkeypatch.setattr(loop, "evaluate", evaluate)
    assert start(tmp_path, "a", "steps=30", "every.eval=5", "every.save=0", "every.sample=0") == 0
    assert len(alive) >= 5 and set(alive) == {0}


def drawn(source: Source, num: int) -> list[float]:
    feed = Feed(source, batch=num, parts=1, seed=1, device=torch.device("cpu"))
    feed.load(0)
    return sorted(feed.part(0)["x"].flatten().tolist())


class Plain(Source):
    def __init__(self, num: int) -> None:
        self.num_items, self.arrays, self.spans = num, {"x": np.arange(num, dtype=np.float32)}, {"x": 0}


class Endless(Source):
    def batch(self, raw):
        return {"x": raw["index"].float()}


@pytest.mark.parametrize(("limit", "items"), [(3, [0, 1, 2]), (10, list(range(10))), (99, list(range(10)))])
def test_limit_keeps_the_first_items(limit: int, items: list[int]) -> None:
    part = Plain(10).first(limit)
    assert part.num_items == len(items) == len(part.arrays["x"])
    assert drawn(part, 2 * len(items)) == sorted(2 * items), "two epochs of just these"


def test_limit_of_windows_keeps_their_rows() -> None:
    source = WindowSource({"x": np.arange(20, dtype=np.float32)}, {"x": 4}, episodes=np.array([0, 6]))
    part = source.first(5)
    assert part.num_items == 5 and list(part.arrays["x"]) == list(range(11)), "three windows of episode one, two of the other"


def test_limit_of_a_generator_repeats_its_first_samples() -> None:
    assert drawn(Endless().first(3), 7) == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("mode", ["blocks", "phase", "random"])
def test_limit_of_text_ends_after_its_blocks(mode: str) -> None:
    part = TextSource(np.arange(100, dtype=np.uint16), 8, mode, seed=1).first(4)
    assert part.num_items == 4 and len(part.tokens) == (40 if mode == "phase" else 33)
    if mode == "blocks":
        assert sum(w[:, 1:].numel() for w in windows(part, 3)) == 32


def test_limit_none_returns_the_data_itself() -> None:
    data = Data(Plain(4), Plain(4), {"name": "x"})
    assert limited(data, Limit()) is data
    part = limited(data, Limit(valid=2))
    assert part.train is data.train and part.valid.num_items == 2 and part.facts["limit"] == {"train": 0, "valid": 2, "test": 0}
    assert data.valid.num_items == 4 and "limit" not in data.facts, "the data itself is as it was"


@pytest.mark.slow
def test_limit_holds_over_a_resumed_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    stop_at(5, monkeypatch)
    start(tmp_path, "one", "limit.train=8", "limit.valid=4")
    assert Run.open(tmp_path, "one").rows()[-1]["epoch"] == 5.0
    with pytest.raises(UserError, match=r"limit.train cannot change on resume"):
        resume(tmp_path, "one", "limit.train=9")
    assert resume(tmp_path, "one") == 0 and "eval" in kinds(tmp_path, "one")


def test_limit_works_for_the_example_recipe(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    settings = ["limit.train=64", "limit.valid=16", "batch=32", "steps=4", "every.sample=0"]
    assert start(tmp_path, "one", *settings, recipe=str(tmp_path / "mine.py")) == 0


# ---- the journal -----------------------------------------------------------------------------------------------------


def test_journal_lists_incidents(tmp_path: Path) -> None:
    path = broken(tmp_path, "        super().__init__()\n", "        super().__init__()\n        self.spare = nn.Linear(2, 2)\n")
    start(tmp_path / "runs", "one", "data.poison=7", recipe=path)
    journal = (tmp_path / "JOURNAL.md").read_text()
    assert "- incidents: 1 nonfinite, 1 unused" in journal and "spare.weight, spare.bias" in journal
    report = (tmp_path / "runs" / "one" / "report.md").read_text()
    assert "1 nonfinite, 1 unused" in report


def test_journal_of_a_clean_run_has_no_incidents(tmp_path: Path) -> None:
    start(tmp_path / "runs", "one")
    assert "incidents" not in (tmp_path / "JOURNAL.md").read_text()
