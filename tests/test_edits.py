"""Edits of config.json, checkpoints of other runs, other code on resume, and what a resumption that is refused may touch."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import TOY, assert_same_end, newest, resume, start, stop_at

from seedbed import inference
from seedbed.checks.replay_context import open_replay
from seedbed.cli import main
from seedbed.errors import UserError
from seedbed.launch import code_changes, local, spawn
from seedbed.launch import resume as resuming
from seedbed.launch.resume import saved_config
from seedbed.recipes.saved import confirm_saved
from seedbed.report import top
from seedbed.track import code, edits
from seedbed.track.run import Run
from seedbed.train import checkpoint, loop


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


def events(root: Path, name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in Run.open(root, name).events() if event["kind"] == kind]


def edit(root: Path, name: str, key: str, value: Any, *, renew_hash: bool = False) -> None:
    """Change one value in config.json as a person with an editor does."""
    path = root / name / "config.json"
    facts = json.loads(path.read_text())
    *groups, last = key.split(".")
    inner = facts["config"]
    for group in groups:
        inner = inner[group]
    assert inner[last] != value
    inner[last] = value
    if renew_hash:
        facts["hash"] = edits._hash(facts)
    path.write_text(json.dumps(facts, indent=1))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped at step 5 of 12, and one that was left alone."""
    root = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.journal, "finish", lambda run, warn: None)
        start(root, "straight")
        stop_at(5, patch)
        start(root, "one")
    return root


@pytest.fixture
def root(tmp_path: Path, stopped: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "runs", symlinks=True)
    return tmp_path / "runs"


EDITS = [("optim.lr", 0.5), ("seed", 9), ("model.dropout", 0.5), ("data.num", 95), ("ema", 0.9), ("keep", 2), ("steps", 40)]


@pytest.mark.parametrize(("key", "value"), EDITS)
def test_edited_config_is_refused_by_every_verb(root: Path, key: str, value: Any) -> None:
    edit(root, "one", key, value)
    before = {p: p.read_bytes() for p in (root / "one").rglob("*") if p.is_file()}
    for act in (resume, inference.load, lambda root, name: open_replay(root, name, 3)):
        with pytest.raises(UserError, match=f"was edited or is damaged: {key}.*\n.*--accept-edits"):
            act(root, "one")
    assert spawn.to_resume(root, "one", []) == 0
    after = {p: p.read_bytes() for p in (root / "one").rglob("*") if p.is_file() and p.name not in ("lock", "console.log")}
    assert after == {p: data for p, data in before.items() if p.name not in ("lock", "console.log")}, "nothing is touched"


@pytest.mark.parametrize(("key", "value"), EDITS[:2])
def test_edited_config_with_a_new_hash_is_noticed_by_the_checkpoint(root: Path, key: str, value: Any) -> None:
    edit(root, "one", key, value, renew_hash=True)
    for act in (resume, inference.load):
        with pytest.raises(UserError, match=f"step-00000[45] was trained with other values.*: {key} "):
            act(root, "one")


def test_accepted_edit_is_used_and_recorded(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(root, "one", "optim.lr", 0.5)
    assert main(["--runs", str(root), "resume", "one", "--accept-edits"]) == 0
    assert "accepted: optim.lr 0.01 -> 0.5" in capsys.readouterr().out
    (event,) = events(root, "one", "edited")
    assert event["changed"] == {"optim.lr": [0.01, 0.5]} and event["step"] == 5
    facts = Run.open(root, "one").config_json()
    assert facts["config"]["optim"]["lr"] == 0.5 and facts["hash"] == edits._hash(facts)
    assert newest(root, "one").step == 12 and newest(root, "one").origin["config"]["optim"]["lr"] == 0.5
    inference.load(root, "one")
    assert edits.accept(Run.open(root, "one")) == "", "there is nothing more to accept"


def test_accepted_edit_holds_when_the_run_is_killed_before_its_next_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(root, "one", "optim.lr", 0.5)
    assert edits.accept(Run.open(root, "one"))
    monkeypatch.setattr(loop, "take_step", lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resume(root, "one")
    monkeypatch.undo()
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    assert resume(root, "one") == 0


def test_checkpoint_of_another_run_is_refused(root: Path) -> None:
    start(root, "other", "optim.lr=0.02")
    for path in checkpoint.steps_in(root / "one" / "checkpoints"):
        checkpoint.remove(path)
    shutil.copytree(root / "other" / "checkpoints" / "step-000008", root / "one" / "checkpoints" / "step-000008")
    for act in (resume, lambda root, name: inference.load(root, name, "step-000008")):
        with pytest.raises(UserError, match="step-000008 was written by run other, not by run one"):
            act(root, "one")
    assert (root / "one" / "checkpoints" / "step-000008" / "manifest.json").exists(), "and left where it lies"
    assert "a checkpoint of run other" in edits.accept(Run.open(root, "one"))
    assert resume(root, "one") == 0 and events(root, "one", "resume")[-1]["step"] == 8


def test_run_folder_may_be_renamed_and_copied(root: Path) -> None:
    shutil.copytree(root / "one", root / "copy", symlinks=True)
    (root / "one").rename(root / "two")
    assert resume(root, "copy") == resume(root, "two") == 0
    for name in ("copy", "two"):
        assert_same_end(root, "straight", name)


def test_runs_of_older_versions_still_load(root: Path) -> None:
    """Neither an id in config.json, nor a run or a checksum in manifests."""
    path = root / "one" / "config.json"
    facts = json.loads(path.read_text())
    del facts["id"]
    path.write_text(json.dumps(facts))
    for folder in checkpoint.steps_in(root / "one" / "checkpoints"):
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["run"], manifest["hash"]
        (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    code_facts = json.loads((root / "one" / "code.json").read_text())
    del code_facts["source"]
    (root / "one" / "code.json").write_text(json.dumps(code_facts))
    inference.load(root, "one")
    assert resume(root, "one") == 0
    assert_same_end(root, "straight", "one")
    inference.load(root, "one")


def test_flipped_bits_of_config_json_are_never_taken_silently(root: Path) -> None:
    """600 bits: a flip is refused in words, or the run is the same."""
    path, rng, noticed = root / "one" / "config.json", random.Random(3), 0
    good, run = bytearray(path.read_bytes()), Run.open(root, "one")
    _, wanted = saved_config(run)
    for _ in range(600):
        bit = rng.randrange(len(good) * 8)
        path.write_bytes(good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :])
        try:
            recipe, config = saved_config(run)
            assert config == wanted and recipe.name == TOY
        except UserError:
            noticed += 1
    assert noticed > 300


# ---- other code ------------------------------------------------------------------------------------------------------


def test_other_code_is_said_and_recorded(root: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    real = code.state

    def other(folder: Path, base: Path | None = None) -> dict[str, Any]:
        found = real(folder, base)
        packages = {**found["packages"], "torch": "9.9.9"}
        return {**found, "version": "77.0", "source": "feed", "packages": packages, "commit": "f" * 40}

    monkeypatch.setattr(code, "state", other)
    code_changes._now.cache_clear()
    stop_at(8, monkeypatch)
    assert resume(root, "one") == 143
    said = capsys.readouterr().out
    for words in (
        "resumed with other code",
        "seedbed ",
        "-> 77.0",
        "torch ",
        "-> 9.9.9",
        "commit",
        "ffffffffff",
        "sources of seedbed",
    ):
        assert words in said, words
    (event,) = events(root, "one", "resume")
    assert event["code"]["torch"][1] == "9.9.9" and event["code"]["seedbed"][1] == "77.0"
    facts = Run.open(root, "one").code_json()
    assert facts["packages"]["torch"] != "9.9.9", "the start stays as it was"
    assert facts["resumed"][0]["step"] == 5 and facts["resumed"][0]["changed"] == event["code"]
    assert resume(root, "one") == 0
    assert "code" not in events(root, "one", "resume")[-1] and "other code" not in capsys.readouterr().out, "told once"
    code_changes._now.cache_clear()


def test_code_change_is_reported_only_if_there_is_one(root: Path, capsys) -> None:
    code_changes._now.cache_clear()
    assert resume(root, "one") == 0
    assert "other code" not in capsys.readouterr().out and "resumed" not in Run.open(root, "one").code_json()


def test_edited_recipe_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    mine = tmp_path / "mine.py"
    shutil.copy(TOY, mine)
    stop_at(5, monkeypatch)
    start(tmp_path / "runs", "one", recipe=str(mine))
    mine.write_text(mine.read_text() + "\n# a thought\n")
    confirm_saved(Run.open(tmp_path / "runs", "one").config_json())
    assert resume(tmp_path / "runs", "one") == 0
    assert "recipe mine.py changed" in capsys.readouterr().out
    assert list(events(tmp_path / "runs", "one", "resume")[0]["code"]) == ["recipe mine.py"]


# ---- refused resumptions, changed settings, status -------------------------------------------------------------------


def test_refused_resume_leaves_a_finished_run_unchanged(root: Path) -> None:
    before = {p.name: p.read_bytes() for p in (root / "straight").glob("*.json*")}
    names = [p.name for p in checkpoint.steps_in(root / "straight" / "checkpoints")]
    with pytest.raises(UserError, match="is before step 12"):
        resume(root, "straight", "steps=5")
    with pytest.raises(UserError, match="cannot change on resume"):
        resume(root, "straight", "seed=4")
    assert Run.open(root, "straight").status()["status"] == "done"
    assert {p.name: p.read_bytes() for p in (root / "straight").glob("*.json*")} == before
    assert [p.name for p in checkpoint.steps_in(root / "straight" / "checkpoints")] == names


def test_refused_resume_keeps_newer_damaged_checkpoints(root: Path) -> None:
    (root / "one" / "checkpoints" / "step-000005" / "manifest.json").unlink()
    with pytest.raises(UserError, match="is before step 4"):
        resume(root, "one", "steps=3")
    assert (root / "one" / "checkpoints" / "step-000005").is_dir()


def test_settings_changed_on_resume_are_in_the_event_and_in_the_command(root: Path, tmp_path: Path) -> None:
    assert resume(root, "one", "steps=20", "keep=2") == 0
    (event,) = events(root, "one", "resume")
    assert event["changed"] == {"steps": [12, 20], "keep": [3, 2]}
    run = Run.open(root, "one")
    assert run.config_json()["history"] == [{"step": 5, "changed": event["changed"]}]
    first, then = run.command().split(" && ")
    assert first.startswith("seedbed train ") and first.endswith("steps=12 keep=3 --name one-again --until 5")
    assert then == "seedbed resume one-again steps=20 keep=2"


def test_printed_command_repeats_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    assert resume(root, "one", "steps=20") == 0
    for command in Run.open(root, "one").command().split(" && "):
        words = command.split()[1:]
        assert main([*words, "--dirty", *(["--no-check"] if words[0] == "train" else [])]) == 0
    assert_same_end(root, "one", "one-again")


def test_setting_without_effect_is_not_in_the_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "take_step", lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resume(root, "one", "steps=99")
    monkeypatch.undo()
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    assert resume(root, "one", "steps=12") == 0
    assert "history" not in Run.open(root, "one").config_json() or Run.open(root, "one").config_json()["history"] == []
    assert "--until" not in Run.open(root, "one").command()
    assert_same_end(root, "straight", "one")


def test_until_stops_at_the_step_and_ends_well(root: Path) -> None:
    assert local.train(TOY, [], root=root, run_name="two", dirty=True, until=7) == 0
    assert newest(root, "two").step == 7 and Run.open(root, "two").status()["status"] == "interrupted"
    assert resuming.resume(root, "two", [], until=9) == 0 and newest(root, "two").step == 9
    assert resume(root, "two") == 0
    assert_same_end(root, "straight", "two")


def test_status_has_a_step_before_the_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    real = loop.take_step

    def take(job: loop.Job) -> None:
        if job.step in (0, 2):
            (one,) = top.training(tmp_path)
            seen.append({**Run.open(tmp_path, "one").status(), "top": (one["step"], one["last_step"])})
        real(job)

    monkeypatch.setattr(loop, "take_step", take)
    start(tmp_path, "one", "every.save=0", "every.eval=0")
    assert [(s["step"], s["last_step"]) for s in seen] == [(0, 12), (0, 12)]
    assert [s["top"] for s in seen] == [(0, 12), (1, 12)], "measurements arrive one step late"


# ---- settings --------------------------------------------------------------------------------------------------------

CONFLICTS = [
    (["steps=3", "steps=4"], "steps is given twice"),
    (["optim.lr=1", "seed=2", "optim.lr=1"], "optim.lr is given twice"),
    (["steps=6", "budget=5s"], "both say how long"),
    (["steps=9223372036854775808"], "out of range"),
    (["steps=1e30"], "out of range"),
    (["steps=4611686018427387904", "batch=64"], "out of range"),
]


@pytest.mark.parametrize(("words", "says"), CONFLICTS)
def test_settings_that_contradict_are_refused(tmp_path: Path, monkeypatch, capsys, words: list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", TOY, *words, "--dirty", "--no-check"]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err and not (tmp_path / "runs").exists()


def test_steps_do_not_go_with_a_budget_that_decides(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"budget=30s says how long to train, not steps.*budget=none"):
        local.train("gpt/shakespeare", ["steps=5"], root=tmp_path / "none", run_name="x", dirty=True)
    assert not (tmp_path / "none").exists()
    start(root, "timed", "budget=0.5s")
    with pytest.raises(UserError, match="add budget=none"):
        resume(root, "timed", "steps=100000")
    with pytest.raises(UserError, match="cannot be set on resume"):
        resume(root, "timed", "budget=9s")
    step = newest(root, "timed").step
    assert resume(root, "timed", f"steps={step + 3}", "budget=none") == 0 and newest(root, "timed").step == step + 3
