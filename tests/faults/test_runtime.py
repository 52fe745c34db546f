"""Every fault of a live run raises its event, in time and once; clean runs of every recipe raise none."""

from pathlib import Path

import pytest
from catalogue_runtime import BEGIN, FAULTS, GPT, SMALL, path_of
from helpers import start
from patching import EXAMPLE, TOY, Fault

from seedbed.launch import local
from seedbed.track.events import is_at_least
from seedbed.track.run import Run
from seedbed.train import loop


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    monkeypatch.setattr(loop, "sample", lambda job: None)


def run(root: Path, fault: Fault) -> list[dict]:
    start(root, "one", *SMALL[fault.recipe], "steps=200", *fault.settings, recipe=path_of(fault.recipe))
    return Run.open(root, "one").events()


FAST = {"slow loader, demo", "leak on the host, toy_recipe.py"}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[] if f.recipe == TOY or f.id in FAST else pytest.mark.slow, id=f.id) for f in FAULTS],
)
def test_injected_fault_raises_its_event(tmp_path: Path, fault: Fault) -> None:
    with fault.apply():
        events = run(tmp_path, fault)
    (kind,) = fault.expected
    found = [e for e in events if e["kind"] == kind]
    assert found, f"{[e['kind'] for e in events if is_at_least('notice', e)]}"
    if kind in ("nonfinite", "spike"):
        assert BEGIN - 1 <= found[0]["step"] <= BEGIN + 2, "seen within two steps"
    if "fix" in found[0]:
        assert len(found) == 1, "an alarm is raised once"
        assert all(found[0][word] for word in ("what", "where", "why", "fix"))
    others = {e["kind"] for e in events if "fix" in e} - {kind, "dead", "floor", "exploding"}
    assert not others, "no watcher cries out for another's fault"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("recipe", [TOY, EXAMPLE, GPT])
def test_clean_runs_raise_nothing(tmp_path: Path, recipe: str, seed: int) -> None:
    batch = ["batch=16"] if recipe == GPT else []  # four lines of text, one of them a ruler of dashes, are a lawful spike
    start(tmp_path, "one", *SMALL[recipe], *batch, "guard.window=128", "steps=800", f"seed={seed}", recipe=path_of(recipe))
    assert not [e for e in Run.open(tmp_path, "one").events() if is_at_least("notice", e)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [["model.dropout=0.2"], ["optim.kind=adamw"], ["accum=4"], ["optim.lr=1e-3", "optim.muon_lr=3e-3"], ["model.depth=2"]],
)
def test_valid_variants_raise_nothing(tmp_path: Path, settings: list[str]) -> None:
    start(tmp_path, "one", *SMALL[GPT], "batch=16", "guard.window=128", "steps=400", *settings, recipe=GPT)
    assert not [e for e in Run.open(tmp_path, "one").events() if is_at_least("notice", e)]
