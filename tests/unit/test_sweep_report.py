"""The report of a sweep: ranks over seeds, what is noise, tables, JSON, and a map from the fourth cell on."""

import io
import json
import random
import statistics
from pathlib import Path

import pytest
from sweep_samples import end, make

from seedbed.track import heatmap, journal, locks
from seedbed.tune.sweep import report as reports
from seedbed.tune.sweep.folder import Sweep
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
    dice = random.Random(0)
    values = {lr: [dice.random() for _ in range(4)] for lr in (0.1, 0.2, 0.3, 0.4, 0.5)}
    found = reports.look(ended(root, values))
    assert [c.settings["optim.lr"] for c in found.cells] == sorted(values, key=lambda lr: statistics.mean(values[lr]))
    for cell in found.cells:
        mine = values[cell.settings["optim.lr"]]
        told = cell.to_json()
        assert told["mean"] == pytest.approx(statistics.mean(mine)) and told["sd"] == pytest.approx(statistics.stdev(mine))
        assert (told["min"], told["max"], told["num_ended"]) == (min(mine), max(mine), 4)


def test_the_command_repeats_the_best_seed_of_the_best_setting(root: Path):
    found = reports.look(ended(root, {0.1: [0.5, 0.1], 0.2: [0.2, 0.3]}))
    assert found.command() == "seedbed train gpt/demo optim.lr=0.2 seed=1"


NOISE = [
    ({0.1: [1.0, 1.1, 0.9], 0.2: [1.02, 1.12, 0.92]}, "not told apart from the best (seeds scatter by ±0.1000): optim.lr=0.2"),
    ({0.1: [1.0, 1.1, 0.9], 0.2: [2.0, 2.1, 1.9]}, "the best setting stands apart: seeds scatter by ±0.1000"),
    ({0.1: [1.0], 0.2: [1.1]}, "one seed per setting"),
    ({0.1: [0.0], 0.2: [0.0], 0.3: [1.0]}, "2 settings share the best value"),
]


@pytest.mark.parametrize(("values", "said"), NOISE, ids=[said[:20] for _, said in NOISE])
def test_differences_of_the_size_of_noise_are_said_to_be(root: Path, values: dict, said: str):
    (note,) = reports.look(ended(root, values)).notes()
    assert said in note


def test_a_setting_that_spoils_a_seed_comes_after_those_that_do_not(root: Path):
    sweep = make(root, "optim.lr=0.1,0.2,0.3", seeds=2)
    for trial in sweep.trials():
        rate, seed = trial.settings["optim.lr"], trial.settings["seed"]
        if rate == 0.1:
            end(sweep, trial, 0.0, "nan" if seed == 2 else "done")
        else:
            end(sweep, trial, rate)
    found = reports.look(sweep)
    assert [c.settings["optim.lr"] for c in found.cells] == [0.2, 0.3, 0.1]
    assert "1 diverged" in reports.cell_table(found)
    assert found.cells[-1].values == [0.0], "a spoiled seed counts for nothing"


def test_every_trial_is_in_the_table_best_first(root: Path):
    sweep = make(root, "optim.lr=0.1,0.2,0.3,0.4,0.5")
    states = [("done", 0.3), ("failed", None), ("stopped early", 0.1), ("diverged", 0.01), None]
    for trial, state in zip(sweep.trials(), states, strict=True):
        if state:
            end(sweep, trial, state[1], state[0], "no such file" if state[0] == "failed" else "")
    lines = reports.trial_table(reports.look(sweep), 200).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["0003", "0001", "0005", "0004", "0002"]
    assert "no such file" in lines[-1] and "stopped early" in lines[0]


def test_before_anything_has_ended_there_is_a_report(root: Path):
    found = reports.look(make(root, "optim.lr=0.1,0.2"))
    assert (found.best, found.command(), found.notes(), found.counts) == (None, None, [], {"waiting": 2})
    assert [p.name for p in reports.write(found)] == ["report.md", "report.json"]


def test_the_map_is_drawn_from_the_fourth_cell_on(root: Path):
    sweep = make(root, "optim.lr=0.1,0.2,0.3", "batch=1..3")
    for num, trial in enumerate(sweep.trials()[:4], start=1):
        end(sweep, trial, 0.5 / num)
        names = [p.name for p in reports.write(reports.look(sweep))]
        assert ("heatmap.png" in names) == (num == 4)
    assert (sweep.path / "heatmap.png").read_bytes()[:4] == PNG
    assert "heatmap.png" in (sweep.path / "report.md").read_text()


def panels(monkeypatch) -> list:
    seen: list = []
    monkeypatch.setattr(
        reports, "draw_panels", lambda path, panels, labels, title, **scale: seen.append((panels, labels, title, scale))
    )
    return seen


def test_a_cell_of_the_map_is_the_mean_of_its_seeds_and_hatched_where_one_diverged(root: Path, monkeypatch):
    seen = panels(monkeypatch)
    sweep = make(root, "optim.lr=0.1,0.2", "batch=1..3", seeds=2)
    for trial in sweep.trials():
        rate, batch, seed = trial.settings.values()
        spoiled = (rate, batch) == (0.2, 3)
        end(sweep, trial, rate * batch + seed, "nan" if spoiled else "done")
    reports.draw_map(reports.look(sweep), sweep.path / "heatmap.png")
    ((found, labels, title, scale),) = seen
    (panel,) = found
    assert labels == (["0.1", "0.2"], ["1", "2", "3"], "optim.lr", "batch")
    assert panel.values == [
        [pytest.approx(0.1 * b + 1.5) for b in (1, 2, 3)],
        [pytest.approx(0.2 * b + 1.5) for b in (1, 2)] + [None],
    ]
    assert panel.hatched == [[False] * 3, [False, False, True]]
    assert "mean of 2 seeds; seeds of a cell lie 1.0000 .. 1.0000 apart" in title
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
def test_further_axes_make_small_multiples_or_are_averaged(
    root: Path, monkeypatch, words: list[str], num_panels: int, shape: tuple
):
    seen = panels(monkeypatch)
    sweep = make(root, *words)
    for trial in sweep.trials():
        end(sweep, trial, float(trial.settings["batch"]))
    assert reports.draw_map(reports.look(sweep), sweep.path / "heatmap.png")
    ((found, (rows, cols, *_), title, _),) = seen
    assert len(found) == num_panels and (len(rows), len(cols)) == shape
    assert all(value is not None for panel in found for row in panel.values for value in row)
    assert ("values of" in title) == (num_panels == 4)


def test_the_json_is_valid_and_complete(root: Path):
    sweep = ended(root, {0.1: [float("inf"), 1.0], 0.2: [2.0, 2.5]})
    reports.write(reports.look(sweep), draw=False)
    told = json.loads((sweep.path / "report.json").read_text())
    assert {"name", "recipe", "axes", "fixed", "counts", "best", "cells", "trials", "notes", "metric"} <= told.keys()
    assert len(told["trials"]) == 4 and told["trials"][0]["settings"] == {"optim.lr": 0.1, "seed": 1}


def test_a_sweep_is_one_entry_of_the_journal_that_takes_notes(root: Path):
    sweep = ended(root, {0.1: [0.5], 0.2: [0.25]})
    reports.record(reports.look(sweep))
    journal.note(root, "some", "the larger rate")
    reports.record(reports.look(sweep))
    (entry,) = journal.entries(root)
    assert entry["run"] == "some" and "sweep of 2: best error 0.2500" in entry["title"]
    assert "to see" in entry["text"] and "seedbed sweep gpt/demo" in entry["text"] and "the larger rate" in entry["text"]


# ---- the drawing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [(100.0, "100"), (99.996, "100.0"), (99.97, "99.97"), (0.5, "0.5"), (1.23456, "1.235"), (0.0, "0"), (1e-6, "1e-06")],
)
def test_a_number_in_a_cell_never_looks_better_than_it_is(value: float, shown: str):
    assert heatmap.short(value) == shown


def test_a_map_is_a_picture_of_its_cells(tmp_path: Path):
    from matplotlib.image import imread

    path = tmp_path / "map.png"

    def draw(values: list[list[float | None]], **more):
        heatmap.draw_heatmap(path, values, [4, 8], [1, 2, 3], "title", "latents", "steps", low=0, high=100, **more)
        return imread(path)

    plain = draw([[0, 50, 100], [None, float("nan"), 100]])
    hatched = draw([[0, 50, 100], [None, float("nan"), 100]], hatched=[[False] * 3, [True, False, False]])
    boxed = draw([[0, 50, 100], [None, float("nan"), 100]], box=(0, 1, 0, 1))
    other = draw([[0, 50, 99], [None, float("nan"), 100]])
    assert plain.shape == hatched.shape and (plain != hatched).any() and (plain != boxed).any() and (plain != other).any()
    assert (draw([[0, 50, 100], [None, float("nan"), 100]]) == plain).all()
    with pytest.raises(AssertionError):
        draw([[0, 50], [1, 2]])


def test_colours_follow_the_order_of_low_and_high():
    assert [heatmap._share(v, 0, 10) for v in (-1, 0, 5, 10, 11)] == [0, 0, 0.5, 1, 1]
    assert [heatmap._share(v, 10, 0) for v in (-1, 0, 5, 10, 11)] == [1, 1, 0.5, 0, 0]
    assert heatmap._share(3, 3, 3) == 1


# ---- the screen ------------------------------------------------------------------------------------------------------


def test_the_live_table_shows_who_works_and_who_is_best(root: Path):
    from rich.console import Console

    sweep = make(root, "optim.lr=0.1,0.2,0.3,0.4,0.5")
    first, second, third, *_ = sweep.trials()
    for trial, best in ((first, 0.5), (second, 0.25)):
        end(sweep, trial, best)
    fd = sweep.claim(third)
    assert fd is not None
    out = Console(record=True, width=100, file=io.StringIO())
    out.print(Screen(sweep, quiet=False)._table(room=2))
    lines = out.export_text().splitlines()
    assert "2 done, 1 running, 2 waiting" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["0003", "0002", "0001"] and "running" in lines[2]
    locks.release(fd)


def test_without_a_terminal_every_event_is_a_line_and_quiet_means_none(root: Path, capsys):
    sweep = make(root, "optim.lr=0.1,0.2")
    first, second = sweep.trials()
    end(sweep, first, None, "failed", "no such file")
    for quiet in (False, True):
        screen = Screen(sweep, quiet)
        with screen.showing():
            screen.began([second])
            screen.began([first, second])
            screen.ended(sweep.standing(first))
        lines = capsys.readouterr().out.splitlines()
        said = ["trial 0002 begins: optim.lr=0.2", "trials 0001, 0002 begin as one pack"]
        assert lines == ([] if quiet else [*said, "trial 0001 failed: optim.lr=0.1 at step 8 (no such file)"])
    assert (sweep.path / "report.json").is_file()
