"""Report and listings' numbers: right, short, and made from whatever is left of a run."""

import io
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from track_samples import make, train

from seedbed.report import facts, run_report, summaries
from seedbed.report.summaries import age
from seedbed.track import text
from seedbed.track.run import Run


def picture(run: Run) -> Image.Image:
    return Image.open(io.BytesIO((run.path / "plots" / "loss.png").read_bytes()))


def fact_lines(path: Path) -> dict[str, str]:
    lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("- ")]
    return dict(line.split(": ", 1) for line in lines)


def test_report_states_the_facts_of_a_run_in_fifteen_lines(tmp_path: Path):
    make(tmp_path, "mother")
    run = train(make(tmp_path, "first", "steps=400", why="to\nsee", parent="mother"))
    run.event(200, "spike", what="loss")
    run.event(210, "spike", what="loss")
    run.set_status("done", clock={"compile": 3.0, "train": 75.0}, verdict="bound by host launches")
    path = run_report.write(run)
    found = fact_lines(path)
    assert path.read_text().startswith("# first\n")
    assert len(found) <= 15
    assert found["status"] == "done at step 400 of 400"
    assert found["why"] == "to see" and found["parent"] == "mother" and found["changed"] == "steps=400"
    assert found["loss"] == "2.0030 ± 0.0097 over the last 20 rows"
    values = {e["step"]: e["valid_loss"] for e in run.events() if e["kind"] == "eval"}
    best = min(values, key=values.__getitem__)
    last = "the last" if best == 400 else f"the last {values[400]:.4f} at 400"
    assert found["evaluation"] == f"best valid_loss {values[best]:.4f} at step {best} ({last})"
    assert found["time"] == "compile 0:03, train 1:15"
    assert found["speed"] == "1.2k items/s, data wait 1.0%, memory 500 MB"
    assert found["incidents"] == "2 spike"
    assert found["verdict"] == "bound by host launches"
    assert found["reproduce"] == "`seedbed train gpt/demo steps=400`"
    assert found["code"] == "commit 0123456789 (main)"
    assert "    a falling\n    leaf\n" in path.read_text()


def test_noise_is_the_deviation_of_the_last_rows(tmp_path: Path):
    run = train(make(tmp_path))
    losses = [row["loss"] for row in run.rows()][-20:]
    mean = sum(losses) / 20
    sd = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / 19)
    assert facts.mean_and_sd(facts.last_losses(run.rows())) == pytest.approx((mean, sd))


@pytest.mark.parametrize(("num", "expected"), [(0, 0), (1, 1), (2, 1), (3, 1), (10, 5), (39, 19), (1000, 20)])
def test_last_rows_are_at_most_half_a_run(num: int, expected: int):
    assert len(facts.last_losses([{"loss": 1.0}] * num)) == expected


def test_rows_without_a_finite_loss_do_not_count():
    rows = [{"loss": 1.0}, {"loss": None}, {}, {"loss": "nan"}, {"loss": True}, {"loss": math.nan}, {"loss": 3.0}]
    assert facts.last_losses(rows) == [3.0]
    assert facts.median([{"v": 3}, {"v": None}, {"v": 1}, {"v": 2}], "v") == 2
    assert facts.median([], "v") is None


def test_first_metric_of_an_evaluation_decides(tmp_path: Path):
    run = make(tmp_path)
    run.event(0, "eval", weights="ema", best=True, valid_loss=2.0, other=0.1)
    run.event(10, "eval", valid_loss=math.nan, other=0.1)
    run.event(20, "eval", valid_loss=1.5, other=9.0)
    run.event(30, "eval")
    run.event(30, "sample", valid_loss=0.0)
    assert facts.evaluations(run.events()) == ("valid_loss", [(0, 2.0), (20, 1.5)])


def test_run_without_rows_has_a_report_without_a_picture(tmp_path: Path):
    run = make(tmp_path)
    path = run_report.write(run)
    assert "![" not in path.read_text()
    assert fact_lines(path)["status"] == "interrupted at step 0"
    assert not (run.path / "plots").exists()


def test_report_is_correct_while_its_process_holds_the_lock(tmp_path: Path):
    run = train(make(tmp_path))
    with run.lock():
        assert fact_lines(run_report.write(run))["status"].startswith("done")


ROWS: list[list[dict[str, Any]]] = [
    [{"step": 1, "loss": 2.0, "lr": 1e-3}],
    [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}],
    [{"step": n, "loss": 0.0, "lr": 0.0} for n in range(5)],
    [{"step": n, "loss": 1e30 if n == 50 else -1.0 / (n + 1), "lr": 1e-9} for n in range(100)],
    [{"step": n, "loss": None if n % 2 else 1.0, "lr": None} for n in range(9)],
    [{"loss": 1.0}, {"step": 3, "loss": 1.0}, {"step": "x", "loss": 2.0}],
]


@pytest.mark.parametrize("rows", ROWS, ids=range(len(ROWS)))
def test_plot_draws_any_curve(tmp_path: Path, rows: list[dict[str, Any]]):
    run = make(tmp_path)
    for row in rows:
        run.row(row)
    run.event(1, "eval", fid=3.0)
    run.event(1, "spike")
    run_report.write(run)
    assert picture(run).size[0] >= 800


def test_plot_has_a_panel_for_evaluations_that_are_no_loss(tmp_path: Path):
    heights = {}
    for metric in ("valid_loss", "fid"):
        run = train(make(tmp_path, metric), metric=metric)
        run_report.write(run)
        heights[metric] = picture(run).size[1]
    assert heights["fid"] > heights["valid_loss"]


def test_plot_scale_ignores_spikes():
    values = [2.0 + 0.001 * n for n in range(400)]
    spoiled = [*values[:200], 1e6, *values[200:]]
    assert max(run_report.smoothed(spoiled)) < 2.5
    assert run_report.smoothed(values) == pytest.approx(values, abs=0.01), "no lag behind a trend"


def test_plot_of_a_long_run_is_fast(tmp_path: Path):
    rows = [{"step": n, "loss": 2.0 + math.sin(n), "lr": 1e-3} for n in range(200_000)]
    start = time.process_time()
    assert run_report.draw("long", rows, [])
    assert time.process_time() - start < 10


def test_plot_is_written_as_svg_too_with_units(tmp_path: Path):
    """In the SVG text is drawn as paths, each with its words as a comment."""
    run = train(make(tmp_path, "units"), metric="psnr_4")
    run.event(400, "eval", nats=1.0, perplexity=2.7)
    run_report.write(run)
    drawn = (run.path / "plots" / "loss.svg").read_text()
    assert {"<!-- loss (nats) -->", "<!-- psnr_4 (dB) -->", "<!-- learning rate -->", "<!-- step -->"} <= set(
        re.findall("<!-- .*? -->", drawn)
    )


def test_plot_of_an_unknown_metric_has_no_unit(tmp_path: Path):
    run_report.write(run := train(make(tmp_path, "bare"), metric="fid"))
    drawn = (run.path / "plots" / "loss.svg").read_text()
    assert "<!-- fid -->" in drawn and "<!-- loss -->" in drawn


def test_plot_leaves_no_matplotlib_state(tmp_path: Path):
    before = "matplotlib.pyplot" in sys.modules
    run_report.write(train(make(tmp_path)))
    assert ("matplotlib.pyplot" in sys.modules) == before


# ---- the numbers of listings -----------------------------------------------------------------------------------------


def test_summary_reads_the_newest_of_rows_and_status(tmp_path: Path):
    run = train(make(tmp_path, why="to see"))
    short = summaries.summary(run)
    assert (short["name"], short["status"], short["step"], short["why"]) == ("first", "done", 400, "to see")
    assert short["loss"] == run.rows()[-1]["loss"]
    assert short["best"] == min(e["valid_loss"] for e in run.events() if e["kind"] == "eval")
    run.row({"step": 410, "loss": 0.25})
    assert (summaries.summary(run)["step"], summaries.summary(run)["loss"]) == (410, 0.25)
    assert 0 <= short["age"] < 60


def test_best_comes_from_events_without_a_status(tmp_path: Path):
    run = train(make(tmp_path))
    best = summaries.summary(run)["best"]
    (run.path / "status.json").unlink()
    assert summaries.summary(run)["best"] == best
    assert summaries.summary(run)["status"] == "interrupted"


@pytest.mark.parametrize(
    ("saved", "shown"),
    [
        ("running", "interrupted"),
        (None, "interrupted"),
        (5, "interrupted"),
        ("done", "done"),
        ("nan", "nan"),
        ("failed", "failed"),
    ],
)
def test_running_status_needs_the_lock(tmp_path: Path, saved: Any, shown: str):
    run = make(tmp_path)
    (run.path / "status.json").write_text(json.dumps({"status": saved}))
    assert summaries.summary(run)["status"] == shown
    with run.lock():
        assert summaries.summary(run)["status"] == "running"


DAMAGE = {
    "no config": lambda p: (p / "config.json").unlink(),
    "empty config": lambda p: (p / "config.json").write_text(""),
    "config of another kind": lambda p: (p / "config.json").write_text("[1]"),
    "config is a folder": lambda p: ((p / "config.json").unlink(), (p / "config.json").mkdir()),
    "binary config": lambda p: (p / "config.json").write_bytes(bytes(range(256))),
    "deep config": lambda p: (p / "config.json").write_text("[" * 100_000),
}
HARMLESS = {
    "binary rows": lambda p: (p / "rows.jsonl").write_bytes(bytes(range(256)) * 100),
    "rows is a folder": lambda p: ((p / "rows.jsonl").unlink(), (p / "rows.jsonl").mkdir()),
    "status of another kind": lambda p: (p / "status.json").write_text("[]"),
    "status with odd values": lambda p: (p / "status.json").write_text('{"status": [], "step": "x", "loss": {}, "best": "y"}'),
    "odd events": lambda p: (p / "events.jsonl").write_text('{"kind": "eval", "step": null, "time": 5}\n'),
    "odd time": lambda p: (p / "config.json").write_text(
        (p / "config.json").read_text().replace('"created": "', '"created": "x')
    ),
    "lock is a folder": lambda p: (p / "lock").mkdir(),
}


@pytest.mark.parametrize("name", [*DAMAGE, *HARMLESS])
def test_damaged_folder_is_listed_and_hides_no_other(tmp_path: Path, name: str):
    from seedbed.report.summaries import runs_table

    train(make(tmp_path, "good"))
    {**DAMAGE, **HARMLESS}[name](train(make(tmp_path, "hurt")).path)
    found = {s["name"]: s for s in summaries.summaries(tmp_path)}
    assert found["good"]["status"] == "done"
    assert (found["hurt"]["status"] == "damaged") == (name in DAMAGE)
    assert len(runs_table(list(found.values())).splitlines()) == 3
    json.dumps(found)


def test_listing_has_folders_only_newest_first(tmp_path: Path):
    for name, created in [
        ("b", "2026-01-02T00:00:00+00:00"),
        ("a", "2026-01-02T03:00:00+05:00"),
        ("c", "2026-01-03T00:00:00+00:00"),
    ]:
        path = make(tmp_path, name).path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "created": created}))
    (tmp_path / "file").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert [s["name"] for s in summaries.summaries(tmp_path)] == ["c", "b", "a"]
    assert summaries.summaries(tmp_path / "nowhere") == []


def test_listing_five_hundred_runs_is_fast(tmp_path: Path):
    first = train(make(tmp_path / "runs", "run-000"), num_rows=400)
    tail = (first.path / "rows.jsonl").read_bytes()
    (first.path / "rows.jsonl").write_bytes(tail * 20)
    for number in range(1, 500):
        folder = tmp_path / "runs" / f"run-{number:03d}"
        folder.mkdir()
        for name in os.listdir(first.path):
            if (first.path / name).is_file():
                os.link(first.path / name, folder / name)
    start = time.process_time()
    found = summaries.summaries(tmp_path / "runs")
    assert time.process_time() - start < 0.4
    assert len(found) == 500 and all(s["status"] == "done" for s in found)


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (5, "5"), (12345, "12,345"), (2.31459, "2.3146"), (0.0, "0.0000"), (1e-5, "1.00e-05"), (1e9, "1.00e+09"),
        (math.nan, "nan"), (-math.inf, "-inf"), (True, "True"), ("a\nb", "a b"), ([], "[]"), (-0.5, "-0.5000"),
    ],
)  # fmt: skip
def test_numbers_are_formatted_short(value: Any, shown: str):
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.5, "0.5"), (99.94, "99.9"), (99.96, "100"), (999.4, "999"), (999.6, "1k"), (12345, "12.3k"), (5.25e6, "5.25M"),
     (999.6e9, "1T"), (5e15, "5e+03T")],
)  # fmt: skip
def test_rates_in_three_digits(value: float, shown: str):
    assert text.scaled(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0:00"),
        (7.4, "0:07"),
        (59.6, "1:00"),
        (754, "12:34"),
        (3723, "1:02:03"),
        (200_000, "2d 07h"),
        (-5, "0:00"),
        (math.nan, "-"),
    ],
)
def test_durations_are_formatted(value: float, shown: str):
    assert text.duration(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0 kB"), (5e5, "500 kB"), (999.6e3, "1 MB"), (5e8, "500 MB"), (1.25e9, "1.2 GB"), (2e12, "2.0 TB")]
)
def test_byte_sizes_are_formatted(value: float, shown: str):
    assert text.size(value) == shown


def test_age_survives_a_clock_jump():
    assert age("2999-01-01T00:00:00+00:00") == "now"
    assert age("2020-01-01T00:00:00+00:00").endswith("d")
    for nonsense in ("yesterday", None, 5, "", []):
        assert age(nonsense) == "-"


def test_table_aligns_and_cuts_to_width():
    shown = text.table(["name", "why"], [["a", "because"], ["long name", "x" * 50]], max_width=20)
    assert shown.splitlines() == ["name       why", "a          because", "long name  " + "x" * 8 + "…"]
    assert text.table(["name", "n"], [["a", "5"], ["long", "12"]], right=(1,)).splitlines() == [
        "name   n",
        "a      5",
        "long  12",
    ]
