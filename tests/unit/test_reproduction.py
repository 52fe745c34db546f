"""The way to repeat a run, as its page tells it: commands that are true today, and what no command repeats. Events in words."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from track_samples import BASE, CODE, make

from seedbed import recipes
from seedbed.config import diff, flat, override, to_json
from seedbed.report.event_text import event_text
from seedbed.serve.reproduction import reproduction
from seedbed.track import code
from seedbed.track.run import Run

HERE = {"version": code.version(), "source": code.source_digest()}


def demo(root: Path, *settings: str, state: dict[str, Any] | None = None, **facts: Any) -> Run:
    """A run of the demo preset of gpt, as it is now unless `base` says otherwise."""
    base = facts.pop("base", recipes.find("gpt")[0].preset("demo"))
    config = override(base, settings)
    return Run.create(root, "gpt", "demo", config, code={**CODE, **HERE, **(state or {})}, base=base, name="one", **facts)


def trained(run: Run, outcome: str = "passed") -> Run:
    run.event(0, "preflight", outcome=outcome, errors=[], warnings=[])
    run.close()
    return run


def test_reproduction_of_a_plain_run_is_its_commit_and_its_command(tmp_path: Path):
    found = reproduction(trained(demo(tmp_path, "steps=7")))
    assert found == {"before": [f"git checkout {CODE['commit']}"], "command": "seedbed train gpt/demo steps=7", "remarks": []}


@pytest.mark.parametrize(("outcome", "flag"), [("skipped", " --no-check"), ("forced", " --force"), ("passed", "")])
def test_reproduction_starts_past_the_checks_as_the_run_did(tmp_path: Path, outcome: str, flag: str):
    run = trained(demo(tmp_path, "steps=7"), outcome)
    assert reproduction(run)["command"] == run.command() == f"seedbed train gpt/demo{flag} steps=7"


def test_reproduction_of_a_dirty_tree_applies_its_patch(tmp_path: Path):
    state = {"dirty": True, "patch": "+ a line\n", "patch_left_out": ["big.bin (over 500,000 bytes)"]}
    run = trained(demo(tmp_path / "my runs", state=state))
    found = reproduction(run)
    assert shlex.split(found["before"][1]) == ["git", "apply", str(run.path / "code.patch")]
    assert found["command"] == "seedbed train gpt/demo --dirty"
    assert found["remarks"] == ["left out of code.patch: big.bin (over 500,000 bytes)"]
    (run.path / "code.patch").unlink()
    assert "code.patch is missing" in reproduction(run)["remarks"][0] and len(reproduction(run)["before"]) == 1


def test_reproduction_restores_what_the_preset_was(tmp_path: Path):
    before = override(recipes.find("gpt")[0].preset("demo"), ["optim.lr=0.5", "batch=3"])
    found = reproduction(trained(demo(tmp_path, "steps=7", base=before)))
    command = shlex.split(found["command"])
    now = override(recipes.find("gpt")[0].preset("demo"), command[3:])
    kept = Run.open(tmp_path, "one").config_json()["config"]
    assert not diff(flat(to_json(now)), flat(kept)) and set(command[3:]) == {"optim.lr=0.5", "batch=3", "steps=7"}
    [remark] = found["remarks"]
    assert (
        remark.startswith("the preset has changed since") and "batch" in remark and "optim.lr" in remark and "steps" not in remark
    )


def test_reproduction_names_settings_that_no_version_has_together(tmp_path: Path):
    run = trained(demo(tmp_path))
    facts = json.loads((run.path / "config.json").read_text())
    facts["config"]["retired"] = 5
    del facts["config"]["batch"]
    (run.path / "config.json").write_text(json.dumps(facts))
    assert sorted(reproduction(run)["remarks"]) == ["not restored: batch, retired"]
    (run.path / "config.json").write_text(json.dumps({**facts, "preset": "gone"}))
    assert reproduction(run)["remarks"][0].startswith("its preset is gone: gpt has no preset 'gone'")


def test_reproduction_says_where_other_code_is_installed(tmp_path: Path):
    older = demo(tmp_path / "a", state={"version": "0.0.1"})
    edited = demo(tmp_path / "b", state={"source": "0" * 16})
    assert reproduction(trained(older))["remarks"] == [
        f"seedbed 0.0.1 trained it, and {code.version()} is installed: numbers may differ"
    ]
    assert "other sources than those" in reproduction(trained(edited))["remarks"][0]


def test_reproduction_of_a_resumed_run_stops_and_goes_on(tmp_path: Path):
    run = trained(demo(tmp_path, "steps=20", state={"resumed": [{"step": 5, "changed": {"commit": ["a", "b"]}}]}), "skipped")
    facts = json.loads((run.path / "config.json").read_text())
    facts["history"] = [{"step": 5, "changed": {"steps": [12, 20]}}]
    (run.path / "config.json").write_text(json.dumps(facts))
    first, then = reproduction(run)["command"].split(" && ")
    assert first == "seedbed train gpt/demo --no-check steps=12 --name one-again --until 5"
    assert then == "seedbed resume one-again steps=20"
    assert reproduction(run)["remarks"] == ["it was resumed with other code, which no command restores"]


def test_reproduction_says_what_no_command_repeats(tmp_path: Path):
    run = demo(tmp_path, "budget=5m")
    for kind in ("edited", "early_stop", "pack", "spike"):
        run.event(9, kind)
    text = "\n".join(reproduction(trained(run))["remarks"])
    assert (
        "edited by hand and accepted at step 9" in text and "--until 9" in text and "a pack" in text and "a time budget" in text
    )


def test_reproduction_of_a_users_recipe_points_at_the_copy_of_the_run(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("raise RuntimeError('not executed')")
    run = trained(make(tmp_path / "runs", recipe=str(file), preset="small", base=BASE, code={**CODE, **HERE}))
    (run.path / "mine.py").write_bytes(file.read_bytes())
    assert reproduction(run)["remarks"] == []
    file.write_text("# changed")
    assert reproduction(run)["remarks"] == [f"{file} has changed or is gone; the run's copy is {run.path / 'mine.py'}"]


EVENTS = {
    "done, wall time 1:08 (train 51 s, evaluation 14 s, start 2.7 s)": {
        **{"kind": "end", "status": "done", "step": 200, "time": 1795122012.395},
        "wall": {"start": 2.7163698480002267, "train": 50.99859715899993, "eval": 13.931997687999956, "compile": 0.0002695},
    },
    "device cpu, steps 200 -> 220, optim.lr 0.0015 -> 0.001": {
        **{"kind": "resume", "step": 5, "device": "cpu", "severity": "notice"},
        "changed": {"steps": [200, 220], "optim.lr": [0.0015, 0.001]},
    },
    "passed": {"kind": "preflight", "outcome": "passed", "errors": [], "warnings": []},
    "forced, errors D9, T2": {"kind": "preflight", "outcome": "forced", "errors": ["D9", "T2"]},
    "seconds per step 0.012 s, steps 20,000": {"kind": "budget", "seconds_per_step": 0.012345678, "steps": 20000},
    "the loss left its band, loss 9.9123, band 1.2346, 2.1000": {
        **{"kind": "spike", "what": "the loss left its band"},
        **{"loss": 9.912312312, "band": [1.2345678, 2.1]},
    },
    "path step-000150, best yes": {"kind": "checkpoint", "step": 150, "path": "step-000150", "best": True},
    "memory 1.2 GB": {"kind": "mine", "memory": 1.2e9, "nothing": None},
}


@pytest.mark.parametrize("text", EVENTS)
def test_event_is_told_as_people_read_it(text: str):
    assert event_text(EVENTS[text]) == text
