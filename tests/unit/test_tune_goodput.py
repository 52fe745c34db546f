"""plan --world N,N: the simulation of failures against the formulas of Young (1974) and Daly (2006)."""

import json
import math
from pathlib import Path

import pytest

from seedbed.cli import main
from seedbed.tune.goodput import GPU, INTERVALS, NUM_FAILURES, Failures

CASES = [Failures(between, 300.0, *rest) for between in (3600.0, 5e4, 3e6) for rest in ((0.5, 0.0), (0.5, 60.0), (20.0, 60.0))]


def daly(failures: Failures, interval: float) -> float:
    """The expected share of kept time under exponential failures; what is being written when a rank is lost is lost too."""
    late = math.exp(-(failures.restart + failures.write) / failures.between)
    return interval * late / math.expm1((interval + failures.pause) / failures.between) / failures.between


@pytest.mark.parametrize("failures", CASES)
def test_kept_time_is_that_of_dalys_formula(failures: Failures) -> None:
    for interval in INTERVALS[::20]:
        # The mean of exponential numbers has a deviation of 1 / sqrt(n); the share is a ratio of two sums of the same numbers.
        assert failures.kept(interval) == pytest.approx(daly(failures, interval), rel=4 / math.sqrt(NUM_FAILURES), abs=1e-3)


@pytest.mark.parametrize("failures", CASES)
def test_best_interval_is_youngs(failures: Failures) -> None:
    best, young = failures.best_interval(), max(math.sqrt(2 * failures.pause * failures.between), failures.write)
    step = INTERVALS[1] / INTERVALS[0]
    if INTERVALS[0] * step < young < INTERVALS[-1] / step:
        assert 1 / 1.6 < best / young < 1.6, "the optimum is flat"
    assert daly(failures, best) > (1 - 2e-3) * max(daly(failures, float(t)) for t in INTERVALS if t >= failures.write)


def test_several_worlds_are_simulated_on_every_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "gpt/demo", "dist.shard=2", "batch=64", "--world", "4,64", "--json", "--runs", str(tmp_path)]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["goodput"]
    assert [line["world"] for line in found] == [4] * 3 + [64] * 3
    assert all(0 < line["kept"] < 1 and 0 < line["efficiency"] <= 1 for line in found)
    assert found[3]["hours_between"] == pytest.approx(50_000 / 64)
    assert main(words[:-3]) == 0
    assert f"assumed: {GPU}" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "says"), [("4,x", "x is not a whole number"), ("4,0", "0 is not between 1 and 65536")])
def test_world_sizes_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str], given: str, says: str) -> None:
    assert main(["plan", "gpt/demo", "--world", given]) == 2
    assert says in capsys.readouterr().err
