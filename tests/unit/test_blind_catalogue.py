"""The faults of catalogue_blind.py still apply to the sources, and each is described completely."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from catalogue import FAULTS as EARLIER
from catalogue_blind import FAULTS
from catalogue_training import FAULTS as TRAINING
from patching import ROOT, SRC, Fault

from seedbed import config as configs
from seedbed.recipes import find

PLACES = {"model", "objective", "optimizer", "loop", "runtime", "data", "inference", "evaluation"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_blind_fault_edit_applies_to_the_source_once(fault: Fault):
    with fault.apply():
        pass


def test_blind_fault_names_are_unique():
    names = Counter(fault.id for fault in (*FAULTS, *EARLIER, *TRAINING))
    assert [fault.id for fault in FAULTS if names[fault.id] > 1] == []


def test_blind_faults_are_described_completely():
    for fault in FAULTS:
        assert fault.place in PLACES, fault.id
        assert fault.difficulty in ("easy", "medium", "hard"), fault.id
        assert fault.harm.endswith("."), fault.id
        assert (SRC / fault.file).is_file() or (ROOT / fault.file).is_file(), fault.id


def test_blind_fault_settings_are_valid():
    for fault in FAULTS:
        recipe, preset = find(fault.recipe)
        configs.override(recipe.preset(preset), fault.settings)


def test_blind_catalogue_covers_recipes_places_and_difficulties():
    assert len(FAULTS) == 60
    assert set(Counter(fault.recipe.partition("/")[0] for fault in FAULTS)) == {"gpt", "flow", "ebt", "thinker", "world"}
    assert {fault.place for fault in FAULTS} == PLACES
    assert Counter(fault.difficulty for fault in FAULTS) == {"easy": 20, "medium": 24, "hard": 16}
