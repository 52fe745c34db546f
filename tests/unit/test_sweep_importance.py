"""How much each setting of a sweep explains, against functions whose shares are known."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from sweep_samples import end, make

from seedbed.tune.sweep import importance
from seedbed.tune.sweep.folder import Trial, TrialStatus

GRID = np.array(list(itertools.product(range(4), range(5), range(2))))
LEVELS = list(GRID.T)
# An additive function of the first two factors; the third does nothing.
FIRST, SECOND = np.array([0.0, 1.0, 2.0, 5.0]), np.array([0.0, 0.5, 0.2, 0.1, 1.0])
ADDITIVE = FIRST[GRID[:, 0]] + SECOND[GRID[:, 1]]
TOTAL = FIRST.var() + SECOND.var()


def test_shares_of_an_additive_function_are_its_variances():
    found = importance.explained(ADDITIVE, LEVELS)
    assert found == pytest.approx([FIRST.var() / TOTAL, SECOND.var() / TOTAL, 0.0], abs=1e-12)
    assert importance.explained(1e-6 * ADDITIVE + 3, LEVELS) == pytest.approx(found, abs=1e-6), "units and origin do not matter"
    order = np.random.default_rng(0).permutation(len(GRID))
    assert importance.explained(ADDITIVE[order], [one[order] for one in LEVELS]) == pytest.approx(found, abs=1e-12)


def test_share_of_a_setting_is_not_another_ones_where_trials_are_missing():
    """In a grid with holes the means of the levels are confounded; the share of what does nothing stays 0."""
    kept = np.random.default_rng(0).random(len(GRID)) < 0.5
    found = importance.explained(ADDITIVE[kept], [one[kept] for one in LEVELS])
    assert found[2] == pytest.approx(0.0, abs=1e-12) and found[0] > found[1] > 0


def test_noise_explains_nothing_on_average_and_the_error_covers_the_truth():
    rng, noise, num = np.random.default_rng(0), 0.5, 150
    true = np.array([FIRST.var(), SECOND.var(), 0.0]) / (TOTAL + noise**2)
    shares, inside = np.zeros(3), np.zeros(3)
    for _ in range(num):
        values = ADDITIVE + rng.normal(0, noise, len(GRID))
        share, error = importance.explained(values, LEVELS), importance.jackknife(values, LEVELS)
        shares, inside = shares + share / num, inside + (np.abs(share - true) <= 2 * error) / num
    assert shares == pytest.approx(true, abs=0.01)
    assert inside.min() > 0.9


def test_interaction_is_left_to_the_rest():
    pure = np.where(GRID[:, 2] == GRID[:, 0] % 2, 1.0, -1.0)  # no setting does anything alone
    assert importance.explained(pure, LEVELS) == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def statuses(values: list[float | None], settings: list[dict], state: str = "done") -> list[TrialStatus]:
    return [
        TrialStatus(Trial(n, one), state, f"t{n}", best=value)
        for n, (value, one) in enumerate(zip(values, settings, strict=True), 1)
    ]


def test_importance_of_trials_is_sorted_and_leaves_out_seeds_and_failures(tmp_path: Path):
    sweep = make(tmp_path / "runs", "optim.lr=0.1,0.2,0.3", "batch=8,16", "seed=0,1")
    for trial in sweep.trials():
        lr, batch = trial.settings["optim.lr"], trial.settings["batch"]
        failed = trial.number == 5
        end(sweep, trial, 1e9 if failed else 10 * lr + batch / 100 + trial.settings["seed"] / 1000, "nan" if failed else "done")
    found = importance.of_axes(sweep.statuses())
    assert [one["key"] for one in found] == ["optim.lr", "batch"]
    assert found[0]["share"] > 0.98 and found[1]["share"] < 0.02 and all(one["error"] >= 0 for one in found)


def test_suggested_numbers_count_by_their_quartile():
    rng = np.random.default_rng(0)
    rates = (10 ** rng.uniform(-4, -2, 60)).tolist()
    settings = [{"optim.lr": rate, "kind": "ab"[i % 2]} for i, rate in enumerate(rates)]
    found = importance.of_axes(statuses([np.log10(rate).item() for rate in rates], settings))
    assert found[0]["key"] == "optim.lr" and found[0]["share"] > 0.8 and found[1]["share"] < 0.1


TOO_LITTLE = [
    [],
    statuses([1.0, 2.0], [{"a": 1}, {"a": 2}]),
    statuses([1.0, None, 3.0], [{"a": 1}, {"a": 2}, {"a": 2}]),
    statuses([1.0, 2.0, 3.0, 4.0], [{"a": 1, "seed": s} for s in range(4)]),
    statuses([1.0, 2.0, 3.0, float("inf")], [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 3}]),
]


@pytest.mark.parametrize("given", TOO_LITTLE)
def test_importance_is_empty_with_too_few_results(given: list[TrialStatus]):
    assert importance.of_axes(given) == []


@pytest.mark.parametrize("value", [1.0, 0.1, 0.0, -1e30])
def test_equal_results_have_no_important_setting(value: float):
    (found,) = importance.of_axes(statuses([value] * 6, [{"a": n % 2} for n in range(6)]))
    assert (found["share"], found["error"]) == pytest.approx((0.0, 0.0), abs=1e-6)
