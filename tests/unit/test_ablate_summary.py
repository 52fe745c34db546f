"""What visits say: ratios against neighbours, noise, what to explain, losses at equal time, and the order of visits."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest

from seedbed.errors import UserError
from seedbed.tune.ablate import report, study
from seedbed.tune.ablate.axes import BASELINE, COMBINED, Row
from seedbed.tune.ablate.measure import Repeat
from seedbed.tune.ablate.predictions import Prediction
from seedbed.tune.ablate.study import ROUND, Entry, Study

BATCHES = {BASELINE: 8, "a=1": 8, "batch=16": 16, COMBINED: 8}


def repeat(seconds: float, *, outcome: str = "ok", losses: int = 20, **facts) -> Repeat:
    curve = [1.0 / (1 + k) for k in range(losses)]
    return Repeat(outcome, seconds=[seconds] * 10, losses=curve, reserved=2**30, num_params=10, **{"flops": 1e9, **facts})


def entry(axis: str, settings: dict | None = None, predicted: float = 1.0, **repeats: Repeat) -> Entry:
    found = {int(name[1:]): succeeded for name, succeeded in repeats.items()}
    return Entry(Row(axis, settings or {}), Prediction(predicted, "a reason"), found)


def made(path: Path, *rows: Entry, base: dict[int, Repeat], repeats: int = 2, spacing: int = 1, **facts) -> Study:
    baseline = Entry(Row(BASELINE), Prediction(1.0, "the baseline itself"), base)
    identity = {"recipe": "toy/plain", "axes": ["a=1"], "settings": [], "steps": None}
    return Study(path, identity, {"device": "a machine", **facts}, 10, repeats, spacing, [baseline, *rows])


def lines(found: Study, **options) -> dict[str, study.Line]:
    overheads, no_mfu = options.get("overheads", {}), options.get("no_mfu", {})
    return {line.label: line for line in study.summarise(found, BATCHES, overheads, no_mfu)}


def test_row_is_compared_with_the_baseline_around_it(tmp_path: Path) -> None:
    """The machine becomes twice as slow over the rounds; the ratio does not notice."""
    base = {0: repeat(1.0), 2: repeat(1.0), ROUND: repeat(2.0), ROUND + 2: repeat(2.0)}
    row = entry("a", {"a": 1}, v1=repeat(0.5), **{f"v{ROUND + 1}": repeat(1.0)})
    line = lines(made(tmp_path, row, base=base))["a=1"]
    assert (line.ratio, line.noise, line.verdict) == (2.0, study.LEAST_NOISE, "faster")
    assert line.items_per_s == pytest.approx(8 / 0.75)


def test_baseline_drift_between_repeats_is_noise(tmp_path: Path) -> None:
    base = {0: repeat(1.0), 2: repeat(1.5), ROUND: repeat(1.0), ROUND + 2: repeat(1.5)}
    row = entry("a", {"a": 1}, v1=repeat(1.1), **{f"v{ROUND + 1}": repeat(1.1)})
    line = lines(made(tmp_path, row, base=base))["a=1"]
    assert line.noise == pytest.approx(0.2) and line.verdict == "within noise"


def test_noise_is_the_spread_of_repeats_and_unknown_for_one(tmp_path: Path) -> None:
    base = {place: repeat(1.0) for place in (0, 2, ROUND, ROUND + 2)}
    row = entry("a", {"a": 1}, v1=repeat(0.8), **{f"v{ROUND + 1}": repeat(1.2)})
    line = lines(made(tmp_path, row, base=base))["a=1"]
    assert line.noise is not None and line.noise > 0.19 and line.verdict == "within noise"
    single = lines(made(tmp_path, entry("a", {"a": 1}, v1=repeat(0.96)), base=base, repeats=1))["a=1"]
    assert (single.noise, single.verdict) == (study.BLIND_NOISE, "within noise")


@pytest.mark.parametrize(("predicted", "explain"), [(1.0, True), (1.4, False), (2.0, False), (2.9, False), (3.1, True)])
def test_row_far_from_its_prediction_must_be_explained(tmp_path: Path, predicted: float, explain: bool) -> None:
    found = made(tmp_path, entry("a", {"a": 1}, predicted, v1=repeat(0.5)), base={0: repeat(1.0), 2: repeat(1.0)})
    assert lines(found)["a=1"].explain == explain
    reported = report.notes(list(lines(found).values()), found.num_repeats)
    assert any("a=1" in note and "to explain" in note for note in reported) == explain


def test_rates_count_items_and_not_steps(tmp_path: Path) -> None:
    found = made(tmp_path, entry("batch", {"batch": 16}, v1=repeat(1.0)), base={0: repeat(1.0), 2: repeat(1.0)})
    assert lines(found)["batch=16"].ratio == 2.0


def test_losses_are_compared_at_equal_steps_and_equal_time(tmp_path: Path) -> None:
    """The fast row takes 20 steps in 10 s; the baseline is then at step 10."""
    found = made(tmp_path, entry("a", {"a": 1}, v1=repeat(0.5)), base={0: repeat(1.0), 2: repeat(1.0)})
    assert study.equal_time(found) == pytest.approx(10.0)
    base, row = lines(found)[BASELINE], lines(found)["a=1"]
    assert base.loss == row.loss == row.loss_at_time == pytest.approx((1 / 19 + 1 / 20) / 2)
    assert base.loss_at_time == pytest.approx((1 / 9 + 1 / 10) / 2)


def test_non_finite_loss_is_reported(tmp_path: Path) -> None:
    spoiled = dataclasses.replace(repeat(1.0), losses=[1.0, math.nan])
    line = lines(made(tmp_path, entry("a", {"a": 1}, v1=spoiled), base={0: repeat(1.0), 2: repeat(1.0)}))["a=1"]
    assert line.loss is None and line.outcome == "ok"
    assert report._learned(line)[1] == "not finite"


def test_mfu_only_where_the_peak_is_known(tmp_path: Path) -> None:
    base, row = {0: repeat(1.0), 2: repeat(1.0)}, entry("a", {"a": 1}, v1=repeat(1.0))
    unknown = made(tmp_path, row, base=base)
    assert lines(unknown)["a=1"].mfu is None and "no MFU: the peak of a machine is not known" in report.peaks(unknown)
    known = made(tmp_path, row, base=base, nominal_peak=16e9, measured_peak=10e9)
    line = lines(known, overheads={"a=1": 1.25})["a=1"]
    assert (line.mfu, line.mfu_measured, line.hfu) == (pytest.approx(0.5), pytest.approx(0.8), pytest.approx(0.625))
    assert lines(known)[BASELINE].hfu is None
    assert lines(known, no_mfu={"a=1": "fp32"})["a=1"].mfu is None


def test_best_choices_leave_the_model_unchanged(tmp_path: Path) -> None:
    base = {place: repeat(1.0) for place in range(0, 14, 2)}
    rows = [
        entry("remat", {"remat": "full"}, v1=repeat(0.5)),
        entry("remat", {"remat": "selective"}, v3=repeat(0.4)),
        entry("compile", {"compile": "whole"}, v5=repeat(0.9)),
        entry("capture", {"capture": "off"}, v7=repeat(0.99)),
        entry("heads", {"model.heads": 2}, v9=repeat(0.1)),
        entry("dtype", {"precision": "bf16"}, v11=repeat(2.0)),
    ]
    found = made(tmp_path, *rows, base=base, repeats=1)
    sizes = dict.fromkeys((e.row.label for e in found.entries), 8)
    best = study.best_choices(found, study.summarise(found, sizes, {}, {}))
    assert [e.row.label for e in best] == ["remat=selective", "compile=whole"]


# ---- the order of visits -------------------------------------------------------------------------------------------------


def visit_all(found: Study, outcomes: dict[str, str] | None = None) -> list[str]:
    order = []
    while (waiting := next(found.waiting(), None)) is not None:
        place, chosen = waiting
        order.append(chosen.row.label)
        chosen.repeats[place] = repeat(1.0, outcome=(outcomes or {}).get(chosen.row.label, "ok"))
    return order


ROWS = ("b", "c", "d")


def test_baseline_is_repeated_between_rows_and_rounds_reverse(tmp_path: Path) -> None:
    found = made(tmp_path, *(entry(name, {name: 1}) for name in ROWS), base={})
    there = ["baseline", "b=1", "baseline", "c=1", "baseline", "d=1", "baseline"]
    assert visit_all(found) == [*there, *reversed(there)]
    spaced = made(tmp_path, *(entry(name, {name: 1}) for name in ROWS), base={}, spacing=2, repeats=1)
    assert visit_all(spaced) == ["baseline", "b=1", "c=1", "baseline", "d=1", "baseline"]


def test_row_that_failed_is_not_tried_again_nor_the_baseline_for_it(tmp_path: Path) -> None:
    found = made(tmp_path, *(entry(name, {name: 1}) for name in ROWS), base={})
    found.singles[2].row = Row("d", {"d": 1}, skip_reason="no such thing")
    order = visit_all(found, {"b=1": "oom"})
    assert order == ["baseline", "b=1", "baseline", "c=1", "baseline", "baseline", "c=1", "baseline"]
    assert found.singles[0].outcome == "oom" and found.singles[2].outcome == "not run"


def test_combination_is_measured_between_baselines(tmp_path: Path) -> None:
    found = made(tmp_path, entry("b", {"b": 1}), base={})
    visit_all(found)
    found.entries.append(entry(COMBINED, {"b": 1}))
    assert visit_all(found) == ["baseline", "combined", "baseline"] * 2
    assert len(list(found.pairs(found.entries[-1]))) == 2


def test_time_left_is_estimated_from_earlier_repeats(tmp_path: Path) -> None:
    found = made(tmp_path, entry("b", {"b": 1}), base={}, repeats=1)
    assert math.isnan(found.seconds_left())
    found.baseline.repeats[0] = dataclasses.replace(repeat(1.0), total_seconds=5.0)
    assert found.seconds_left() == 10.0
    assert "about 0:10 left" in report.progress(found, 1, found.singles[0])


# ---- the file ------------------------------------------------------------------------------------------------------------


def test_study_round_trips_through_its_file(tmp_path: Path) -> None:
    identity = {"recipe": "toy/plain", "axes": [], "settings": [], "steps": 3, "places": (1, 2)}
    rows = [Row("b", {"b": (1, 2)}), Row("shard", skip_reason="one device", value="shard=2")]
    first = study.open_study(tmp_path / "runs", None, identity, {}, rows, 2, 1)
    assert not first.steps
    first.steps = 7
    first.entries[1].repeats[1] = dataclasses.replace(repeat(0.5), losses=[1.0, math.nan])
    first.save()
    again = study.open_study(tmp_path / "runs", None, identity, {"device": "x"}, rows, 2, 1)
    assert again.steps == 7 and again.facts == {"device": "x"}
    assert [e.row for e in again.entries] == [e.row for e in first.entries]
    assert math.isnan(again.entries[1].repeats[1].losses[1])
    assert again.entries[1].repeats[1].seconds == [0.5] * 10
    kept = (first.path / "report.json").read_text()
    for key, now in study.RENAMED.items():  # a report of an earlier version
        kept = kept.replace(f'"{now}": ', f'"{key}": ') if now != "repeats" else kept.replace('"repeats": {', '"visits": {')
    (first.path / "report.json").write_text(kept)
    assert study.open_study(tmp_path / "runs", None, identity, {"device": "x"}, rows, 2, 1).to_json() == again.to_json()
    with pytest.raises(UserError, match=r"exists already with other settings: steps 3 there, 4 here"):
        study.open_study(tmp_path / "runs", first.path.name, identity | {"steps": 4}, {}, rows, 2, 1)
    (first.path / "report.json").write_text(json.dumps({"rows": [{}]}))
    with pytest.raises(UserError, match="damaged"):
        study.open_study(tmp_path / "runs", None, identity, {}, rows, 2, 1)


@pytest.mark.parametrize(("recipe", "name"), [("gpt/demo", "gpt-demo-"), ("some/where/mine.py:tiny", "mine-tiny-")])
def test_report_name_follows_from_the_arguments(recipe: str, name: str) -> None:
    assert study.default_name({"recipe": recipe}).startswith(name)
    assert study.default_name({"recipe": recipe, "steps": 1}) != study.default_name({"recipe": recipe, "steps": 2})


def test_figure_labels_do_not_overlap() -> None:
    values = [0.0, 0.01, 0.02, 0.9, 0.91, 0.5]
    heights = report._heights(values, 0.0, 1.0)
    order = sorted(range(len(values)), key=lambda i: values[i])
    placed = [heights[i] for i in order]
    assert all(b - a >= report.LABEL - 1e-9 for a, b in itertools.pairwise(placed))
    assert min(placed) >= 0 and max(placed) <= 1
    crowd = report._heights([1.0] * 50, 0.0, 1.0)
    assert len(set(crowd)) == 50 and min(crowd) >= -1e-9


def test_ablation_report_is_written_with_its_figures(tmp_path: Path) -> None:
    rows = [entry("a", {"a": 1}, 2.0, v1=repeat(0.5)), entry("batch", {"batch": 16}, v3=repeat(1.0, outcome="oom"))]
    rows.append(Entry(Row("shard", skip_reason="one | device", value="shard=2")))
    found = made(tmp_path, *rows, base={place: repeat(1.0) for place in (0, 2, 4)}, repeats=1)
    reported = list(study.summarise(found, BATCHES | {"shard=2": 8}, {}, {}))
    report.write(found, reported, report.notes(reported, found.num_repeats))
    text = (tmp_path / "report.md").read_text()
    for words in ("| a=1 | 16", "| batch=16 | oom", "one \\| device", "2.00: a reason", "one repeat per row", "seedbed ablate"):
        assert words in text, words
    for name in ("predicted.png", "waterfall.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and f"]({name})" in text
    kept = json.loads((tmp_path / "report.json").read_text())
    assert [row["outcome"] for row in kept["rows"]] == ["ok", "ok", "oom", "not run"]
    assert kept["summary"][1]["ratio"] == 2.0
    assert len(report.lines_of(found, reported, [])) == 2
