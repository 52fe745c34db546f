"""The report of a sweep: ranks over seeds, what is noise, tables, JSON, and a map from the fourth cell on."""

import io
import json
import random
import statistics
from pathlib import Path

import pytest
from sweep_samples import BASE, end, make

from seedbed.report import heatmap, notes
from seedbed.track import folders
from seedbed.track.run import Run
from seedbed.tune.sweep import report as reports
from seedbed.tune.sweep import suggest, verbs
from seedbed.tune.sweep.folder import Sweep, TrialStatus
from seedbed.tune.sweep.screen import Screen

PNG = b"\x89PNG"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def ended(root: Path, values: dict[float, list[float]], **named: str) -> Sweep:
    """A sweep over optim.lr whose seeds ended with these values."""
    sweep = make(root, f"optim.lr={','.join(map(str, values))}", seeds=max(map(len, values.values())), **named)
    left = {lr: list(found) for lr, found in values.items()}
    for trial in sweep.trials():
        end(sweep, trial, left[trial.settings["optim.lr"]].pop(0))
    return sweep


def test_settings_are_ranked_by_their_mean_over_the_seeds(root: Path):
    rng = random.Random(0)
    values = {lr: [rng.random() for _ in range(4)] for lr in (0.1, 0.2, 0.3, 0.4, 0.5)}
    found = reports.read_report(ended(root, values))
    assert [c.settings["optim.lr"] for c in found.cells] == sorted(values, key=lambda lr: statistics.mean(values[lr]))
    for cell in found.cells:
        mine = values[cell.settings["optim.lr"]]
        reported = cell.to_json()
        assert reported["mean"] == pytest.approx(statistics.mean(mine)) and reported["sd"] == pytest.approx(
            statistics.stdev(mine)
        )
        assert (reported["min"], reported["max"], reported["num_ended"]) == (min(mine), max(mine), 4)


def test_report_command_repeats_the_best_trial(root: Path):
    found = reports.read_report(ended(root, {0.1: [0.5, 0.1], 0.2: [0.2, 0.3]}))
    assert found.command() == "seedbed train gpt/demo optim.lr=0.2 seed=1"


NOISE = [
    ({0.1: [1.0, 1.1, 0.9], 0.2: [1.02, 1.12, 0.92]}, "not distinguishable from the best (seeds vary by ±0.1000): optim.lr=0.2"),
    ({0.1: [1.0, 1.1, 0.9], 0.2: [2.0, 2.1, 1.9]}, "the best setting is significant: seeds vary by ±0.1000"),
    ({0.1: [1.0], 0.2: [1.1]}, "one seed per setting"),
    ({0.1: [0.0], 0.2: [0.0], 0.3: [1.0]}, "2 settings share the best value"),
]


@pytest.mark.parametrize(("values", "printed"), NOISE, ids=[printed[:20] for _, printed in NOISE])
def test_report_notes_differences_within_noise(root: Path, values: dict, printed: str):
    (note,) = reports.read_report(ended(root, values)).notes()
    assert printed in note


def by_two_metrics(root: Path) -> Sweep:
    """Three settings, of which the last one has the lowest error and the first one the highest psnr."""
    sweep = make(root, "optim.lr=0.1,0.2,0.3", "batch=1..2")
    for trial in sweep.trials():
        rate = trial.settings["optim.lr"]
        metrics = {"error": 1.0 - rate, "psnr": 30.0 - 10 * rate}
        end(sweep, trial, 1.0 - rate, metrics=metrics, higher=["psnr"])
    return sweep


def test_sweep_ranks_by_any_metric_in_its_direction(root: Path, monkeypatch, capsys):
    sweep = by_two_metrics(root)
    plain, scored = reports.read_report(sweep), reports.read_report(sweep, "psnr")
    assert [c.settings["optim.lr"] for c in plain.cells] == [0.3, 0.3, 0.2, 0.2, 0.1, 0.1]
    assert [c.settings["optim.lr"] for c in scored.cells] == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
    assert (scored.goal, scored.to_json()["higher_is_better"]) == ("psnr, higher is better", True)
    assert "optim.lr=0.1" in str(scored.command()) and "optim.lr=0.3" in str(plain.command())
    assert [row[1] for row in reports.trial_rows(scored)[1]] == ["0.1", "0.1", "0.2", "0.2", "0.3", "0.3"]
    seen = panels(monkeypatch)
    reports.draw_map(scored, sweep.path / "heatmap.png")
    assert tuple(seen[-1][-1].values()) == (27.0, 29.0), "the best is bright"
    assert verbs.show(root, "some", False, "psnr") == 0
    assert "optim.lr=0.1" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("best: "))
    (note,) = reports.read_report(sweep, "fid").notes()
    assert note == "no trial has evaluated fid; there are: error, psnr"
    assert sorted(score or 0.0 for _, score in suggest.points(scored.statuses)) == [-29.0, -29.0, -28.0, -28.0, -27.0, -27.0]


def test_metric_of_a_sweep_is_kept_and_repeated(root: Path):
    sweep = by_two_metrics(root)
    sweep.facts["metric"] = "psnr"
    assert reports.read_report(sweep).metric == "psnr" and "--metric psnr" in sweep.command()


def test_metrics_of_trials_that_recorded_none_are_read_from_their_runs(root: Path):
    sweep = make(root, "optim.lr=0.1,0.2")
    for trial in sweep.trials():
        run = Run.create(root, "gpt", "demo", BASE, name=sweep.run_name(trial), code={}, base=BASE)
        for step in (1, 2):
            run.event(step, "eval", error=1.0 / step, reward=step * trial.settings["optim.lr"], higher_is_better=["reward"])
        run.close()
        end(sweep, trial, 0.5)
    found = reports.read_report(sweep, "reward")
    assert [cell.mean for cell in found.cells] == [0.4, 0.2] and found.cells[0].settings == {"optim.lr": 0.2}


def test_equal_settings_are_rarely_called_significant(root: Path):
    """Two equal settings with three seeds each, 200 times."""
    rng, called = random.Random(1), 0
    sweep = make(root, "optim.lr=0.1,0.2", seeds=3)
    for _ in range(200):
        statuses = tuple(TrialStatus(t, "done", "r", best=rng.gauss(1, 0.1), metric="error") for t in sweep.trials())
        cells = sorted(reports.cells_of(statuses), key=reports.Cell.rank)
        called += "significant" in reports.Report(sweep, statuses, tuple(cells)).notes()[0]
    assert called <= 10


def test_settings_with_a_diverged_seed_rank_last(root: Path):
    sweep = make(root, "optim.lr=0.1,0.2,0.3", seeds=2)
    for trial in sweep.trials():
        rate, seed = trial.settings["optim.lr"], trial.settings["seed"]
        if rate == 0.1:
            end(sweep, trial, 0.0, "nan" if seed == 2 else "done")
        else:
            end(sweep, trial, rate)
    found = reports.read_report(sweep)
    assert [c.settings["optim.lr"] for c in found.cells] == [0.2, 0.3, 0.1]
    assert reports.cell_rows(found, 24)[1][-1][-1] == "1 diverged"
    assert found.cells[-1].values == [0.0], "a spoiled seed counts for nothing"


def test_trial_table_is_complete_best_first(root: Path):
    sweep = make(root, "optim.lr=0.1,0.2,0.3,0.4,0.5")
    states = [("done", 0.3), ("failed", None), ("stopped early", 0.1), ("diverged", 0.01), None]
    for trial, state in zip(sweep.trials(), states, strict=True):
        if state:
            end(sweep, trial, state[1], state[0], "no such file" if state[0] == "failed" else "")
    _, rows, _ = reports.trial_rows(reports.read_report(sweep))
    assert [row[0] for row in rows] == ["0003", "0001", "0005", "0004", "0002"]
    assert "no such file" in rows[-1] and "stopped early" in rows[0]


def test_report_exists_before_any_trial_has_ended(root: Path):
    found = reports.read_report(make(root, "optim.lr=0.1,0.2"))
    assert (found.best, found.command(), found.notes(), found.counts) == (None, None, [], {"waiting": 2})
    assert [p.name for p in reports.write(found)] == ["report.md", "report.json"]


def test_heatmap_is_drawn_from_the_fourth_cell_on(root: Path):
    sweep = make(root, "optim.lr=0.1,0.2,0.3", "batch=1..3")
    for num, trial in enumerate(sweep.trials()[:4], start=1):
        end(sweep, trial, 0.5 / num)
        names = [p.name for p in reports.write(reports.read_report(sweep))]
        assert ("heatmap.png" in names) == (num == 4)
    assert (sweep.path / "heatmap.png").read_bytes()[:4] == PNG
    assert "heatmap.png" in (sweep.path / "report.md").read_text()


def panels(monkeypatch) -> list:
    seen: list = []
    monkeypatch.setattr(
        reports, "draw_panels", lambda path, panels, labels, title, **scale: seen.append((panels, labels, title, scale))
    )
    return seen


def test_heatmap_cell_is_the_mean_of_its_seeds(root: Path, monkeypatch):
    seen = panels(monkeypatch)
    sweep = make(root, "optim.lr=0.1,0.2", "batch=1..3", seeds=2)
    for trial in sweep.trials():
        rate, batch, seed = trial.settings.values()
        diverged = (rate, batch) == (0.2, 3)
        end(sweep, trial, rate * batch + seed, "nan" if diverged else "done")
    reports.draw_map(reports.read_report(sweep), sweep.path / "heatmap.png")
    ((found, labels, title, scale),) = seen
    (panel,) = found
    assert labels == (["0.1", "0.2"], ["1", "2", "3"], "optim.lr", "batch")
    assert panel.values == [
        [pytest.approx(0.1 * b + 1.5) for b in (1, 2, 3)],
        [pytest.approx(0.2 * b + 1.5) for b in (1, 2)] + [None],
    ]
    assert panel.hatched == [[False] * 3, [False, False, True]]
    assert "mean of 2 seeds; spread over the seeds of a cell 1.0000 .. 1.0000" in title
    assert scale == {"low": pytest.approx(1.9), "high": pytest.approx(1.6)}, "less is better: the largest is the dullest"


@pytest.mark.parametrize(
    ("words", "num_panels", "shape"),
    [
        (["batch=1..3"], 1, (1, 3)),
        (["batch=1..3", "steps=1..4", "keep=1,2"], 2, (3, 4)),
        (["batch=1..3", "steps=1..4", "keep=1,2", "accum=1"], 2, (3, 4)),
        (["batch=1..5", "steps=1..5", "keep=1..4", "every.log=1..4"], 4, (5, 5)),
    ],
)
def test_heatmap_of_further_axes_has_small_multiples(root: Path, monkeypatch, words: list[str], num_panels: int, shape: tuple):
    seen = panels(monkeypatch)
    sweep = make(root, *words)
    for trial in sweep.trials():
        end(sweep, trial, float(trial.settings["batch"]))
    assert reports.draw_map(reports.read_report(sweep), sweep.path / "heatmap.png")
    ((found, (rows, cols, *_), title, _),) = seen
    assert len(found) == num_panels and (len(rows), len(cols)) == shape
    assert all(value is not None for panel in found for row in panel.values for value in row)
    assert ("values of" in title) == (num_panels == 4)


def test_report_json_is_valid_and_complete(root: Path):
    sweep = ended(root, {0.1: [float("inf"), 1.0], 0.2: [2.0, 2.5]})
    reports.write(reports.read_report(sweep), draw=False)
    reported = json.loads((sweep.path / "report.json").read_text())
    assert {"name", "recipe", "axes", "fixed", "counts", "best", "cells", "trials", "notes", "metric"} <= reported.keys()
    assert len(reported["trials"]) == 4 and reported["trials"][0]["settings"] == {"optim.lr": 0.1, "seed": 1}


def test_journal_entry_of_a_sweep_takes_notes(root: Path):
    sweep = ended(root, {0.1: [0.5], 0.2: [0.25]})
    reports.record(reports.read_report(sweep))
    notes.note(root, "some", "the larger rate")
    reports.record(reports.read_report(sweep))
    (entry,) = notes.entries(root)
    assert entry["run"] == "some" and "sweep of 2: best error 0.2500" in entry["title"]
    assert "to see" in entry["text"] and "seedbed sweep gpt/demo" in entry["text"] and "the larger rate" in entry["text"]


# ---- the drawing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [(100.0, "100"), (99.996, "100.0"), (99.97, "99.97"), (0.5, "0.5"), (1.23456, "1.235"), (0.0, "0"), (1e-6, "1e-06")],
)
def test_heatmap_rounding_never_improves_a_value(value: float, shown: str):
    assert heatmap.short(value) == shown


def test_heatmap_pixels_match_its_cells(tmp_path: Path):
    from matplotlib.image import imread

    path = tmp_path / "map.png"

    def draw(values: list[list[float | None]], hatched: list[list[bool]] | None = None, box=None):
        labels = ([4, 8], [1, 2, 3], "latents", "steps")
        heatmap.draw_panels(path, [heatmap.Panel("", values, hatched)], labels, "title", low=0, high=100, box=box)
        return imread(path)

    plain = draw([[0, 50, 100], [None, float("nan"), 100]])
    hatched = draw([[0, 50, 100], [None, float("nan"), 100]], hatched=[[False] * 3, [True, False, False]])
    boxed = draw([[0, 50, 100], [None, float("nan"), 100]], box=(0, 1, 0, 1))
    other = draw([[0, 50, 99], [None, float("nan"), 100]])
    assert plain.shape == hatched.shape and (plain != hatched).any() and (plain != boxed).any() and (plain != other).any()
    assert (draw([[0, 50, 100], [None, float("nan"), 100]]) == plain).all()
    with pytest.raises(AssertionError):
        draw([[0, 50], [1, 2]])


def test_heatmap_colours_follow_the_order_of_low_and_high():
    assert [heatmap._share(v, 0, 10) for v in (-1, 0, 5, 10, 11)] == [0, 0, 0.5, 1, 1]
    assert [heatmap._share(v, 10, 0) for v in (-1, 0, 5, 10, 11)] == [1, 1, 0.5, 0, 0]
    assert heatmap._share(3, 3, 3) == 1


# ---- the screen ------------------------------------------------------------------------------------------------------


def test_live_table_shows_running_trials_and_the_best(root: Path):
    from rich.console import Console

    sweep = make(root, "optim.lr=0.1,0.2,0.3,0.4,0.5")
    first, second, third, *_ = sweep.trials()
    for trial, best in ((first, 0.5), (second, 0.25)):
        end(sweep, trial, best)
    fd = sweep.claim(third)
    assert fd is not None
    out = Console(record=True, width=100, file=io.StringIO())
    out.print(Screen(sweep, quiet=False)._table(max_rows=2))
    lines = out.export_text().splitlines()
    assert "2 done, 1 running, 2 waiting" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["0003", "0002", "0001"] and "running" in lines[2]
    folders.release(fd)


def test_events_are_lines_without_a_terminal_and_silent_with_quiet(root: Path, capsys):
    sweep = make(root, "optim.lr=0.1,0.2")
    first, second = sweep.trials()
    end(sweep, first, None, "failed", "no such file")
    for quiet in (False, True):
        screen = Screen(sweep, quiet)
        with screen.showing():
            screen.on_start([second])
            screen.on_start([first, second])
            screen.on_end(sweep.status(first))
        lines = capsys.readouterr().out.splitlines()
        printed = ["trial 0002 begins: optim.lr=0.2", "trials 0001, 0002 begin as one pack"]
        assert lines == ([] if quiet else [*printed, "trial 0001 failed: optim.lr=0.1 at step 8 (no such file)"])
    assert (sweep.path / "report.json").is_file()
