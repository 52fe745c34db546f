"""Suggestions: a pure function of the trial files, never a point twice, better than chance, and clear when a package lacks."""

import math
import sys
from pathlib import Path

import pytest
from sweep_samples import end, make

from seedbed.errors import UserError
from seedbed.tune.sweep import suggest
from seedbed.tune.sweep.folder import Sweep

try:
    import optuna  # noqa: F401

    INSTALLED = True
except ImportError:
    INSTALLED = False

SAMPLERS = ["random", pytest.param("optuna", marks=pytest.mark.skipif(not INSTALLED, reason="optuna is not installed"))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def finish(sweep: Sweep, num: int, best: float = 3e-3) -> None:
    """Take suggestions until there are `num`, each ended with its distance from the best rate, in factors of ten."""
    while added := suggest.add(sweep, num):
        for trial in added:
            end(sweep, trial, abs(math.log10(trial.settings["optim.lr"] / best)))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_suggestions_stay_in_their_ranges_and_never_repeat(root: Path, sampler: str):
    words = ["optim.lr=1e-4..1e-1", "batch=2..10..4", "optim.clip=0.5..1.5", "optim.kind=adamw,muon"]
    sweep = make(root, *words, seeds=2, sampler=sampler)
    finish(sweep, 14)
    trials = sweep.trials()
    assert len(trials) == 28 and [t.settings["seed"] for t in trials] == [1, 2] * 14
    points = [tuple(v for k, v in t.settings.items() if k != "seed") for t in trials[::2]]
    assert len(set(points)) == 14
    for trial in trials:
        found = trial.settings
        assert 1e-4 <= found["optim.lr"] <= 1e-1 and found["batch"] in (2, 6, 10)
        assert 0.5 <= found["optim.clip"] <= 1.5 and found["optim.kind"] in ("adamw", "muon")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_suggestion_follows_from_the_trial_files_alone(root: Path, sampler: str):
    one, other = (make(root, "optim.lr=1e-4..1e-1", name=name, sampler=sampler) for name in ("one", "other"))
    finish(one, 13)
    for trial in one.trials():
        end(other, other.add(trial.settings), one.status(trial).best)
    assert suggest.add(one, 14)[0].settings == suggest.add(other, 14)[0].settings


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_suggestions_end_when_a_finite_space_is_exhausted(root: Path, sampler: str):
    sweep = make(root, "batch=1,2,3", sampler=sampler)
    while added := suggest.add(sweep, 20):
        end(sweep, added[0], 1.0)
    assert sorted(t.settings["batch"] for t in sweep.trials()) == [1, 2, 3]


def test_running_and_diverged_points_are_distinguished(root: Path):
    sweep = make(root, "optim.lr=1e-4..1e-1", seeds=2, sampler="random")
    suggest.add(sweep, 3, 3)
    a, b, c, d, *_ = sweep.trials()
    end(sweep, a, 1.0)
    end(sweep, b, 2.0)
    end(sweep, c, 1.0)
    end(sweep, d, 0.1, "nan")
    values = [value for _, value in suggest.points(sweep.statuses())]
    assert values == [1.5, float("inf"), None]


@pytest.mark.skipif(not INSTALLED, reason="optuna is not installed")
def test_optuna_samples_near_good_points(root: Path):
    late = []
    for best in (1e-5, 1e-1):
        sweep = make(root, "optim.lr=1e-6..1", name=f"{best:g}", sampler="optuna")
        finish(sweep, 30, best=best)
        late += [s.best for s in sweep.statuses()[20:] if s.best is not None]
    # Who does not listen names the same points both times, and every point is four factors of ten from the two together.
    assert sum(late) / 10 < 0.5 * 4


@pytest.mark.skipif(not INSTALLED, reason="optuna is not installed")
def test_optuna_gets_diverged_and_running_points(root: Path):
    sweep = make(root, "optim.lr=1e-4..1e-1", sampler="optuna")
    for trial in suggest.add(sweep, 12, 12)[:11]:
        end(sweep, trial, None, "nan")
    assert len(suggest.add(sweep, 13)) == 1


def test_optuna_missing_is_a_one_line_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'seedbed\[search\]'") as problem:
        suggest.require("optuna")
    assert "\n" not in str(problem.value)
    suggest.require("random")
