"""Every fault of the catalogues is caught by a check that should catch it, and named in the file that is wrong."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from catalogue import FAULTS
from catalogue_blind import FAULTS as BLIND
from catalogue_blind import BlindFault
from catalogue_later import FAULTS as LATER
from catalogue_runtime import FAULTS as RUNTIME
from catalogue_training import FAULTS as TRAINING
from catalogue_unseen import FAULTS as UNSEEN
from patching import EXAMPLE, GPT, ROOT, SRC, TOY, Fault, check, edited
from write_matrix import BEFORE, run_blind, taxonomy

from seedbed.checks.registry import all_checks

ALL = [*FAULTS, *TRAINING]
# Enough of gpt for every test run: one fault per check.
FAST = {
    "stale vocabulary", "modulo left in the lookup", "no causal mask", "batch and time swapped", "constant init", "unused module",
    "positions missing", "targets unshifted", "sum reduction", "softmax before cross-entropy", "detached trunk", "unit init",
}  # fmt: skip


def quick(fault: Fault) -> bool:
    return fault.recipe in (TOY, EXAMPLE) or fault.id in FAST


PARAMS = [pytest.param(f, marks=[] if quick(f) else pytest.mark.slow, id=f"{f.recipe}: {f.id}") for f in FAULTS]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("fault", PARAMS)
def test_injected_fault_is_caught(fault: Fault):
    with fault.apply():
        found = [f for f in check(fault.recipe, *fault.settings, only=sorted(fault.expected)).findings if f.alarm]
    assert found, f"none of {sorted(fault.expected)} minds: {fault.id}"
    for finding in found:
        assert finding.what and finding.why and finding.fix
        assert_there(finding.where)
    after = check(fault.recipe, *fault.settings, only=sorted(fault.expected))
    assert not [f.id for f in after.findings if f.alarm], "the fault outlived its patch, or the clean recipe alarms"


# Blind faults that cost little, one per mechanism that was added for them; the matrix holds all.
FEW = {
    "temperature multiplies the logits", "prompts of a batch share the longest length", "every micro-batch is the first one",
    "held-out images are trained on", "classes of the first rows for any images", "averaged weights are not loaded",
    "class dropout follows the time", "class tokens overlap", "rotary positions rounded to bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("fault", [pytest.param(f, marks=pytest.mark.slow, id=f.id) for f in BLIND if f.id in FEW])
def test_blind_fault_is_found_by_a_check_whose_definition_it_violates(fault: BlindFault):
    assert set(run_blind(fault, {})["found"]) & fault.expected


def test_blind_faults_expect_something_and_have_a_record_from_before():
    assert len(BLIND) == 60 and all(f.expected and f.difficulty and f.harm for f in BLIND)
    assert {f.id for f in BLIND} == set(json.loads(BEFORE.read_text()))


@pytest.mark.parametrize("fault", [*ALL, *RUNTIME, *BLIND, *UNSEEN, *LATER], ids=lambda f: f"{f.recipe}: {f.id}")
def test_fault_edits_apply_to_the_source(fault: Fault):
    with fault.apply():
        pass


def assert_there(where: str) -> None:
    """The place names a line of a file that exists."""
    match = re.match(r"(\S+\.py):(\d+)", where)
    assert match, where
    path = next((p for base in (SRC, ROOT, Path("/")) if (p := base / match[1]).is_file()), None)
    assert path, where
    assert 1 <= int(match[2]) <= len(path.read_text().splitlines())


def test_catalogue_is_wide_enough():
    recipes = Counter(f.recipe for f in ALL)
    assert len(ALL) >= 40
    assert recipes[GPT] >= 20 and min(recipes.values()) >= 6
    places = Counter("evaluation" if f.place == "inference" else f.place for f in ALL)
    assert min(places[p] for p in ("data", "model", "objective", "optimizer", "loop", "evaluation")) >= 4, places
    names = Counter(f.id for f in FAULTS)
    assert max(names.values()) == 1


def test_expected_checks_exist():
    known = {check.id for check in all_checks()}
    assert not {id for fault in ALL for id in fault.expected} - known


def test_taxonomy_of_faults_is_covered():
    """Humbatova et al. (2020) name 15 categories; at least one check answers to 14 of them."""
    covered = {category for check in all_checks() for category in check.humbatova}
    assert len(covered) >= 14, sorted(set(range(1, 16)) - covered)


def test_preflight_page_lists_every_check_and_the_taxonomy():
    page = (ROOT / "docs" / "preflight.md").read_text()
    assert [c.id for c in all_checks() if f"### {c.id} {c.title}\n" not in page] == []
    assert taxonomy(all_checks()) in page, "run tests/faults/write_matrix.py"
    matrix = (ROOT / "docs" / "detection-matrix.md").read_text()
    assert [f.id for f in ALL if f"| {f.id} |" not in matrix] == []


def test_detection_matrix_meets_its_limits():
    matrix = (ROOT / "docs" / "detection-matrix.md").read_text()
    shares = [float(share) for share in re.findall(r"\(([\d.]+)%\)", matrix)]
    caught, meant, named = shares[:3]
    assert caught >= 95 and meant >= 90 and named >= 90
    assert "alarms on the clean recipes: demo 0, toy_recipe 0, my_recipe 0" in matrix


def test_edit_must_match_and_is_undone():
    from seedbed.nn import layers

    file, before = "seedbed/nn/layers.py", layers.MLP.forward.__code__
    with edited(file, "h = self.up(x)", "h = self.up(-x)"):
        assert layers.MLP.forward.__code__ is not before
        assert layers.MLP.forward.__code__.co_filename == before.co_filename
    assert layers.MLP.forward.__code__ is before
    with pytest.raises(AssertionError, match="0 times"), edited(file, "no such text", ""):
        pass
    with pytest.raises(AssertionError, match="changes no function"), edited(file, '"""Layers of a', '"""A layer of a'):
        pass
