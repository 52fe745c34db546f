"""Faults of samplers, players, rollouts, curricula and evaluations are caught, in the file that is wrong, and nothing else is."""

from pathlib import Path

import pytest
from catalogue_families import FAULTS
from patching import GPT, Fault, check
from test_catalogue import assert_there

from seedbed.checks.registry import all_checks

FAST = {"patches come back transposed", "evaluation in training mode", "time grid ends before the image"}
# The place of the loss is named, and not the function that it calls.
PARAMS = [pytest.param(f, marks=[] if f.id in FAST else pytest.mark.slow, id=f"{f.recipe}: {f.id}") for f in FAULTS]
FAMILIES = ("D1", "L4", "C5", "C8", "C9", "T5", "V5", "V6", "V7", "I3", "I4", "I5", "I8")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("fault", PARAMS)
def test_fault_of_a_family_is_caught_in_its_file(fault: Fault):
    with fault.apply():
        found = [f for f in check(fault.recipe, *fault.settings, only=sorted(fault.expected)).findings if f.alarm]
    assert {f.id for f in found} == fault.expected
    for finding in found:
        assert finding.what and finding.why and finding.fix
        assert_there(finding.where)
    assert any(Path(fault.file).name in f.where for f in found)
    after = check(fault.recipe, *fault.settings, only=sorted(fault.expected)).findings
    assert [f.status for f in after] == ["pass"] * len(after), "the fault outlived its patch, or the clean recipe is not tested"


def test_every_family_has_a_fault():
    assert {id for fault in FAULTS for id in fault.expected} == set(FAMILIES)
    assert set(FAMILIES) <= {check.id for check in all_checks()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("recipe", [GPT, "flow/demo", "thinker/demo", "world/demo", "ebt/demo", "examples/my_recipe.py"])
def test_families_raise_no_alarm_on_clean_recipes(recipe: str, seed: int):
    report = check(recipe, f"seed={seed}", only=FAMILIES)
    assert [f.lines(recipe) for f in report.findings if f.alarm] == []
