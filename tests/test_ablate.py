"""`seedbed ablate` from end to end: predictions before measurements, failures as rows, and reports that go on where they were."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from seedbed.cli import main
from seedbed.tune.ablate import measure, predictions, verbs

TOY = str(ROOT / "tests" / "toy_recipe.py")
QUICK = ("--steps", "3", "--repeats", "2")
TINY_GPT = [
    word for key in ("model.depth=2", "model.width=32", "model.heads=2", "data.block=16", "batch=4") for word in ("--set", key)
]


@pytest.fixture
def ablate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The verb in an empty folder: exit status, standard output and error. Rates are measured roughly, which is quick."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(predictions, "TIMED", 0.0)
    monkeypatch.setitem(predictions.MOST, "cpu", 1 << 16)

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(["ablate", *words]), *capsys.readouterr()

    return call


def kept(name: str) -> dict[str, Any]:
    return json.loads(Path("ablations", name, "report.json").read_text())


def by_label(name: str) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in kept(name)["rows"]}


def test_every_row_is_predicted_before_it_is_measured(ablate, monkeypatch: pytest.MonkeyPatch) -> None:
    real, measured = measure.measure_repeat, set()
    labels = {(8, 16): "baseline", (4, 16): "batch=4", (32, 16): "batch=32", (8, 64): "model.width=64"}

    def repeat(workload, config, data_of, num_steps):
        label = labels[config.batch, config.model.width]
        row = by_label("one")[label]
        assert row["prediction"], f"{label} is measured and nothing was written down"
        assert bool(row["repeats"]) == (label in measured)
        measured.add(label)
        return real(workload, config, data_of, num_steps)

    monkeypatch.setattr(measure, "measure_repeat", repeat)
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = ablate(TOY, "batch=4,32", "model.width=64", "shard=2", *QUICK, "--name", "one")
    assert status == 0, out + err
    assert measured == set(labels.values())
    rows = by_label("one")
    assert list(rows) == ["baseline", "batch=4", "batch=32", "model.width=64", "shard=2", "combined"]
    assert rows["batch=32"]["prediction"]["ratio"] > 1 > rows["batch=4"]["prediction"]["ratio"] > 0
    assert all(row["prediction"]["basis"] for row in rows.values() if row["outcome"] == "ok")
    assert rows["shard=2"]["outcome"] == rows["combined"]["outcome"] == "not run"
    for word in ("report.md", "predicted.png", "waterfall.png", "not run: one device", "no MFU"):
        assert word in out, word
    assert Path("ablations", ".gitignore").read_text() == "*\n"


def test_rows_of_a_round_begin_with_the_same_weights(ablate, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    real = measure._steps

    def steps(rig, first, num, timestamps):
        if first == 0:
            weights = torch.cat([p.detach().flatten().clone() for p in rig.engine.system.parameters()])
            found.setdefault((rig.engine.config.seed, len(weights)), []).append(weights)
        return real(rig, first, num, timestamps)

    monkeypatch.setattr(measure, "_steps", steps)
    assert ablate(TOY, "batch=4", "accum=2", *QUICK, "--name", "same")[0] == 0
    assert len(found) == 2 and len({seed for seed, _ in found}) == 2
    for weights in found.values():
        assert len(weights) >= 4 and all(torch.equal(weights[0], other) for other in weights)
    losses = {label: row["repeats"] for label, row in by_label("same").items()}
    halves = [repeat["losses"] for repeat in losses["accum=2"].values()], [losses["baseline"]["0"]["losses"]]
    assert halves[0][0] == pytest.approx(halves[1][0], rel=1e-4), "parts of a step equal the whole"


def fail_on(monkeypatch: pytest.MonkeyPatch, **errors: Exception) -> list[int]:
    """Let batches of these sizes fail; the sizes that were tried."""
    real, tried = measure._measure, []

    def fake(workload, config, data, num_steps):
        tried.append(config.batch)
        if f"b{config.batch}" in errors:
            raise errors[f"b{config.batch}"]
        return real(workload, config, data, num_steps)

    monkeypatch.setattr(measure, "_measure", fake)
    return tried


def test_failed_rows_are_reported(ablate, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"b16": torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "b4": RuntimeError("first\nthe last line")}
    tried = fail_on(monkeypatch, **errors)
    status, out, err = ablate(TOY, "batch=4,16,32", "model.width=4", "remat=full", *QUICK, "--name", "bad")
    assert status == 0, out + err
    rows = by_label("bad")
    outcomes = {label: row["outcome"] for label, row in rows.items()}
    expected = {"batch=4": "crash", "batch=16": "oom", "batch=32": "skipped", "model.width=4": "ok", "remat=full": "not run"}
    assert expected.items() <= outcomes.items()
    assert tried.count(16) == tried.count(4) == 1 and 32 not in tried
    assert rows["batch=4"]["repeats"]["1"]["why"] == "RuntimeError: the last line"
    assert "compile_units" in rows["remat=full"]["repeats"]["0"]["why"]
    assert "batch=16 was out of memory already" in Path("ablations/bad/report.md").read_text()


def test_failing_baseline_ends_the_ablation(ablate, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on(monkeypatch, b8=RuntimeError("no"))
    status, _, err = ablate(TOY, "batch=4", *QUICK)
    assert status == 2 and "the baseline itself does not run (crash): RuntimeError: no" in err


def test_interrupted_ablation_is_continued(ablate, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = measure.measure_repeat, [0]

    def repeat(*args):
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(measure, "measure_repeat", repeat)
    words = (TOY, "batch=4,16", *QUICK, "--name", "go")
    assert ablate(*words)[0] == 130
    before = by_label("go")
    assert [len(row["repeats"]) for row in before.values()] == [2, 1, 0]
    status, out, err = ablate(*words)
    assert status == 0, out + err
    after = by_label("go")
    for label, row in before.items():
        assert row["repeats"].items() <= after[label]["repeats"].items(), "what was measured stays"
        assert row["prediction"] in (None, after[label]["prediction"])
    total = count[0]
    assert ablate(*words)[0] == 0 and count[0] == total, "nothing is measured twice"
    status, _, err = ablate(TOY, "batch=4", *QUICK, "--name", "go")
    assert status == 2 and "exists already with other settings" in err


def test_best_choices_are_measured_in_combination(ablate, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that says what each switch gives, the combination is predicted as their product."""

    def repeat(workload, config, data_of, num_steps):
        seconds = (0.5 if config.attention == "math" else 1.0) * (0.8 if config.precision == "bf16" else 1.0)
        return measure.Repeat("ok", seconds=[seconds] * num_steps, losses=[1.0] * num_steps, reserved=1, num_params=1)

    monkeypatch.setattr(measure, "measure_repeat", repeat)
    status, out, err = ablate("gpt/demo", "attention=math", "dtype=bf16", "heads=1", *TINY_GPT, *QUICK, "--name", "sum", "--json")
    assert status == 0, out + err
    reported = {row["label"]: row for row in json.loads(out)["rows"]}
    assert reported["combined"]["predicted"] == pytest.approx(1 / (0.5 * 0.8))
    assert reported["combined"]["ratio"] == pytest.approx(reported["combined"]["predicted"])
    assert by_label("sum")["combined"]["settings"] == {"attention": "math", "precision": "bf16"}


@pytest.mark.parametrize(
    ("name", "settings", "attention"),
    [
        ("gpt/demo", TINY_GPT, {"flash", "math"}),
        pytest.param("thinker/demo", ["--set", "model.width=8", "--set", "batch=4"], {"own"}, marks=pytest.mark.slow),
    ],
)
def test_recipes_are_measured_end_to_end(ablate, name: str, settings: list[str], attention: set[str]) -> None:
    axes = ("remat=selective", "attention=math") if "gpt" in name else ("remat=full", "heads=2")
    status, out, err = ablate(name, *axes, *settings, "--steps", "2", "--repeats", "1", "--name", "real", "--json")
    assert status == 0, out + err
    rows = {row["label"]: row for row in json.loads(out)["rows"]}
    base = rows.pop("baseline")
    rows.pop("combined", None)
    assert {row["attention"] for row in (base, *rows.values())} == attention
    for row in rows.values():
        assert row["outcome"] == "ok" and row["items_per_s"] > 0 and row["predicted"] > 0 and row["mfu"] is None
        assert row["low"] <= row["items_per_s"] <= row["high"]
    recomputed = next(row for label, row in rows.items() if "remat" in label)
    assert recomputed["loss"] == base["loss"], "recomputing changes nothing"


WRONG = [
    ((TOY, "widht=4"), r"unknown axis `widht`; nearest: model.width"),
    ((TOY, "batch=8"), r"batch=8 is the baseline itself"),
    ((TOY, "model.width=0"), r"the row model.width=0 cannot be run: model.width=0 is out of range"),
    ((TOY, "batch=4", "--steps", "0"), r"--steps: 0 is not at least 1"),
    ((TOY, "batch=4", "--repeats", "0"), r"--repeats: 0 is not at least 1"),
    ((TOY, "batch=4", "--set", "bacth=2"), r"unknown key `bacth`"),
    ((TOY, "batch=4", "--name", "a/b"), r"cannot name"),
    (("gpt/nonesuch", "batch=4"), r"demo"),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[" ".join(words[1:]) for words, _ in WRONG])
def test_ablate_errors_are_one_line_and_leave_nothing(ablate, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    status, _, err = ablate(*words)
    assert status == 2 and says in err, err
    assert len(err.strip().splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []


def test_steps_per_repeat_follow_from_time(ablate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(measure, "FEWEST", 2)
    assert ablate(TOY, "batch=4", "--repeats", "1", "--name", "auto")[0] == 0
    assert kept("auto")["steps"] == 2


def test_data_cache_reopens_data_only_where_it_may_differ() -> None:
    workload = verbs.Workload.open(TOY, [])
    cache = verbs.DataCache(workload)
    assert cache(workload.config) is workload.data
    other = dataclasses.replace(workload.config, seed=5)
    assert cache(other) is cache(dataclasses.replace(other, batch=4)) is not workload.data
