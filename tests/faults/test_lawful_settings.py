"""No alarm on any of sixty lawful settings. Each is checked on one of three seeds; `lawful_settings.py` runs all, and
benchmarks/results/lawful-settings.json has what it found."""

import os

import pytest
from lawful_settings import LAWFUL, SEEDS, settings_of
from patching import check

from seedbed import config as configs
from seedbed.recipes import find, names

# Save, resume and crash are the loop's own, and these settings hardly reach it: a few of each recipe.
LOOP, EVERY = "T", 5
GROUPS = list("ADMLCOHEVGI")
ALL_SEEDS = bool(os.environ.get("SEEDBED_ALL_SEEDS"))
CASES = [
    pytest.param(
        *(name, settings, seed, [*GROUPS, LOOP] if n % EVERY == 0 else GROUPS),
        id=f"{name} {' '.join(settings)} {seed}",
    )
    for n, (name, settings) in enumerate(LAWFUL)
    for seed in (SEEDS if ALL_SEEDS else [SEEDS[n % len(SEEDS)]])
]


def test_settings_are_lawful_and_of_every_recipe():
    assert len(set(LAWFUL)) == 60 and {name.partition("/")[0] for name, _ in LAWFUL} == set(names())
    for name, settings in LAWFUL:
        recipe, preset = find(name)
        base = recipe.preset(preset)
        assert configs.override(base, settings_of(name, settings)) != base
    assert sum(len(settings) > 1 for _, settings in LAWFUL) >= 58, "switches are tried in pairs"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "seed", "groups"), CASES)
def test_lawful_settings_raise_no_alarm(name: str, settings: tuple[str, ...], seed: int, groups: list[str]):
    report = check(name, *settings_of(name, settings, seed), only=groups)
    assert ["\n".join(f.lines(report.name)) for f in report.findings if f.alarm] == []
