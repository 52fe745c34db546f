"""Sweeps end to end: each trial is the ordinary run of its settings, whoever trains it, however often it was stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import TOY, assert_same_end, kinds, rows, start, stop_at

from seedbed.cli import main
from seedbed.launch import local, trials
from seedbed.launch.resume import resume
from seedbed.report import notes
from seedbed.track.run import Run
from seedbed.tune.sweep.folder import Sweep

PACKABLE = str(Path(__file__).parent / "packable_recipe.py")
GRID = ("optim.lr=1e-3,1e-2", "model.width=3,4", "steps=8")
Answer = tuple[int, str, str]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Pictures are tested elsewhere, and power cuts too: they would be most of the time here.
    monkeypatch.setattr("seedbed.report.run_report.draw", lambda *given: None)
    monkeypatch.setattr("seedbed.tune.sweep.report.draw_panels", lambda path, *given, **named: path.write_bytes(b"map"))
    monkeypatch.setattr("seedbed.track.files.fsync", lambda fd: None)
    monkeypatch.setattr("gc.collect", lambda: 0)
    return tmp_path / "runs"


@pytest.fixture
def sweep(root: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`seedbed sweep RECIPE ... --name grid` in this process: status, output, errors."""

    def call(*words: str, recipe: str = TOY, name: str = "grid", check: bool = False) -> Answer:
        capsys.readouterr()
        more = () if check else ("--no-check",)
        status = main(["sweep", recipe, *words, "--name", name, "--dirty", *more])
        return status, *capsys.readouterr()

    return call


def states(root: Path, name: str = "grid") -> list[str]:
    return [s.state for s in Sweep.open(root, name).statuses()]


# ---- trials are runs -------------------------------------------------------------------------------------------------


def test_trial_equals_the_run_of_its_settings(sweep, root: Path):
    status, out, err = sweep(*GRID, "-m", "which is best?")
    assert (status, err) == (0, ""), out + err
    found = Sweep.open(root, "grid")
    assert states(root) == ["done"] * 4
    assert [entry["run"] for entry in notes.entries(root)] == ["grid"], "one entry for the sweep, none for its runs"
    for trial in found.trials():
        words = [f"{key}={value}" for key, value in trial.settings.items()]
        assert start(root, f"plain-{trial.number}", *words, "steps=8") == 0
        assert_same_end(root, f"plain-{trial.number}", found.run_name(trial))
        facts = Run.open(root, found.run_name(trial)).config_json()
        assert facts["sweep"] == "grid" and facts["why"] == f"which is best?: {' '.join(words)}"
    assert {"sweep.json", "report.md", "report.json", "heatmap.png"} <= {p.name for p in found.path.iterdir()}
    command = re.search(r"^best: (.*)$", out, re.M)
    best = min(found.statuses(), key=lambda s: s.best or 9.0)
    assert command and all(f"{key}={value}" in command[1] for key, value in best.trial.settings.items())
    assert "one by one: 4 trials (the recipe does not offer a packed objective)" in out


def test_finished_sweep_is_shown_and_not_trained_again(sweep, root: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    words = ("optim.lr=1e-3,1e-2", "steps=4")
    assert sweep(*words)[0] == 0
    monkeypatch.setattr(trials, "train", lambda *given: pytest.fail("trained again"))
    status, out, _ = sweep(*words)
    assert status == 0 and "2 done" in out
    assert main(["sweep", "--join", "grid", "--dirty"]) == 0
    capsys.readouterr()
    assert main(["sweep", "--show", "grid", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (
        reported["counts"] == {"done": 2}
        and len(reported["trials"]) == 2
        and reported["best"]["command"].startswith("seedbed train")
    )
    assert main(["runs", "list"]) == 0
    shown = capsys.readouterr().out
    assert "grid-*" in shown and "2 done" in shown and "grid-0001" not in shown
    assert main(["runs", "list", "--json"]) == 0
    assert {run["sweep"] for run in json.loads(capsys.readouterr().out)} == {"grid"}


def test_json_output_is_only_json(sweep, root: Path):
    status, out, err = sweep("optim.lr=1e-3,1e-2", "steps=4", "--json")
    assert (status, err) == (0, "") and json.loads(out)["counts"] == {"done": 2}


def test_show_never_loads_torch(sweep, seedbed, root: Path):
    assert sweep("optim.lr=1e-3,1e-2", "steps=4")[0] == 0
    done = seedbed("sweep", "--show", "grid", python=("-X", "importtime"))
    assert done.returncode == 0 and "2 done" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "seedbed.tune.sweep.report" in loaded and not loaded & {"torch", "numpy", "matplotlib", "rich"}


def test_quick_checks_run_once_per_sweep_and_a_failure_stops_it(sweep, root: Path, monkeypatch: pytest.MonkeyPatch):
    status, out, _ = sweep("optim.lr=1e-3,1e-2", "data.poison=3", check=True)
    assert status == 1 and "not started" in out and states(root) == ["waiting"] * 2
    status, out, _ = sweep("optim.lr=1e-3,1e-2", "steps=4", name="good", check=True)
    assert status == 0 and out.count("preflight: ") == 1
    monkeypatch.setattr(trials, "check", lambda *given: pytest.fail("checked twice"))
    (root.parent / "sweeps" / "good" / "results" / "0001.json").unlink()
    assert sweep("optim.lr=1e-3,1e-2", "steps=4", name="good", check=True)[0] == 0


# ---- what goes wrong -------------------------------------------------------------------------------------------------

WRONG = [
    (["optm.lr=1,2"], "unknown key `optm.lr`; nearest: optim.lr"),
    (["optim.lr="], "names no values"),
    (["optim.lr=1..x"], "is not a range"),
    (["optim.lr=1e-3,1e-2", "--seeds", "0"], "--seeds 0 leaves nothing"),
    (["steps=4"], "that is a single trial and no sweep"),
    (["optim.lr=1e-3,99"], "the cell optim.lr=99.0 cannot be trained: optim.lr=99.0 is out of range"),
    (["optim.lr=1e-3,1e-2", "--sampler", "cleverest"], "invalid choice"),
    (["steps=4", "--suggest", "3"], "there is nothing to suggest"),
    (["optim.lr=1e-3..99", "--suggest", "3", "--sampler", "random"], "the cell optim.lr=99.0 cannot be trained"),
]


@pytest.mark.parametrize(("words", "printed"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_sweep_errors_are_one_line_before_anything_starts(sweep, root: Path, words: list[str], printed: str):
    status, out, err = sweep(*words)
    assert (status, out) == (2, "") and printed in err and len(err.splitlines()) == 1
    assert list(root.parent.iterdir()) == []


def test_sweep_name_in_use_names_the_differences(sweep, root: Path):
    assert sweep("optim.lr=1e-3,1e-2", "steps=4")[0] == 0
    status, _, err = sweep("optim.lr=1e-3,1e-1", "steps=4")
    assert status == 2 and "optim.lr 0.001,0.01 there, 0.001,0.1 here" in err and "choose another --name" in err


def test_sweep_without_recipe_or_name_is_refused(root: Path, capsys):
    assert main(["sweep"]) == 2
    assert "name a RECIPE/PRESET" in capsys.readouterr().err


def test_failing_and_diverging_trials_do_not_stop_the_others(sweep, root: Path, monkeypatch: pytest.MonkeyPatch):
    real = local.run_training

    def execute(launch, data):
        if launch.run.name == "grid-0001":
            raise RuntimeError("the dog\nate it")
        return real(launch, data)

    monkeypatch.setattr(local, "run_training", execute)
    words = ("data.poison=5,-1", "model.width=3,4", "steps=16", "guard.policy=stop")
    status, out, _ = sweep(*words)
    assert status == 1 and states(root) == ["failed", "nan", "done", "done"]
    assert "RuntimeError: the dog" in out and "Traceback" in (root / "grid-0001" / "console.log").read_text()
    monkeypatch.setattr(local, "run_training", real)
    assert sweep(*words)[0] == 1, "a failed trial is not tried again unless it is asked for"
    assert sweep(*words, "--retry")[0] == 0
    assert states(root) == ["nan", "nan", "done", "done"]


def test_patience_ends_trials_early(sweep, root: Path):
    words = ("optim.lr=0,1e-2", "steps=40", "every.eval=2", "optim.weight_decay=0")
    assert sweep(*words, "--patience", "2")[0] == 0
    still, moving = Sweep.open(root, "grid").statuses()
    assert (still.state, still.step) == ("stopped early", 6)
    assert moving.state in ("done", "stopped early") and (moving.step or 0) > 6
    assert kinds(root, "grid-0001")[-3:] == ["checkpoint", "early_stop", "end"]
    status, _, err = sweep(*words, "--patience", "3")
    assert status == 2 and "patience 2 there, 3 here" in err


# ---- stopped, killed, shared -----------------------------------------------------------------------------------------


def test_interrupted_sweep_resumes_to_the_same_end(sweep, root: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("optim.lr=1e-3,1e-2", "steps=8")
    assert sweep(*words, name="straight")[0] == 0
    stop_at(6, monkeypatch)
    status, out, _ = sweep(*words)
    assert status == 128 + signal.SIGTERM and "seedbed sweep --join grid" in out
    assert states(root) == ["waiting"] * 2 and kinds(root, "grid-0001")[-1] == "end"
    assert sweep(*words)[0] == 0
    for number in (1, 2):
        assert_same_end(root, f"straight-000{number}", f"grid-000{number}")
    assert "resume" in kinds(root, "grid-0001") and "resume" not in kinds(root, "grid-0002")


def worker(root: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "seedbed", "--runs", str(root), "sweep", *words, "--no-check", "--dirty"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root.parent)


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_workers_trial_is_resumed_by_another(sweep, root: Path):
    grid = ("optim.lr=1e-3,1e-2", "steps=300", "every.log=10", "every.eval=150", "every.save=10")
    first = worker(root, TOY, *grid, "--name", "grid")
    try:
        wait_until(lambda: any((root / "grid-0001" / "checkpoints").glob("step-*")), first)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert states(root) == ["waiting"] * 2, "a dead worker's claim is free at once"
    status, out, err = sweep(*grid)
    assert status == 0, out + err
    assert states(root) == ["done"] * 2
    (resumed,) = [e for e in Run.open(root, "grid-0001").events() if e["kind"] == "resume"]
    assert resumed["step"] >= 10, "it was resumed, not restarted"
    assert start(root, "straight", *grid[1:], "optim.lr=1e-3") == 0
    assert_same_end(root, "straight", "grid-0001")


@pytest.mark.slow
def test_two_workers_share_a_sweep_and_train_nothing_twice(root: Path):
    grid = ("optim.lr=1e-3..1e-2x6", "steps=100", "every.eval=50", "every.save=0")
    first = worker(root, TOY, *grid, "--name", "grid")
    wait_until(lambda: (root / "grid-0001").is_dir(), first)
    second = worker(root, "--join", "grid")
    printed = [process.communicate(timeout=100)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), printed
    assert states(root) == ["done"] * 6
    begun = [set(re.findall(r"trial (\d+) begins", text)) for text in printed]
    assert begun[0] | begun[1] == {f"{n:04d}" for n in range(1, 7)} and not begun[0] & begun[1]
    assert all(kinds(root, f"grid-{n:04d}").count("start") == 1 for n in range(1, 7))
    assert "6 trials: 6 done" in (root.parent / "sweeps" / "grid" / "report.md").read_text()


def test_run_that_ended_before_its_result_was_written_is_not_trained_again(sweep, root: Path, monkeypatch: pytest.MonkeyPatch):
    assert sweep("optim.lr=1e-3,1e-2", "steps=4")[0] == 0
    (root.parent / "sweeps" / "grid" / "results" / "0002.json").unlink()
    assert states(root) == ["done", "waiting"]
    monkeypatch.setattr(local, "run_training", lambda *given, **named: pytest.fail("trained again"))
    assert sweep("optim.lr=1e-3,1e-2", "steps=4")[0] == 0
    assert states(root) == ["done"] * 2


# ---- packed ----------------------------------------------------------------------------------------------------------


def packs(root: Path, name: str = "grid") -> dict[str, int]:
    """How many runs each trial was packed with."""
    names = sorted(path.name for path in root.glob(f"{name}-*"))
    events = {run: [e for e in Run.open(root, run).events() if e["kind"] == "pack"] for run in names}
    return {run: found[0]["replicas"] if found else 0 for run, found in events.items()}


PACK = ("optim.lr=1e-3,1e-2", "model.prototypes=2,3", "steps=12")


def test_packed_trials_equal_single_runs(sweep, root: Path):
    status, out, err = sweep(*PACK, recipe=PACKABLE)
    assert status == 0, out + err
    assert "packed: 4 trials train as one stacked model on cpu; --no-pack" in out and "begin as one pack" in out
    assert set(packs(root).values()) == {4} and states(root) == ["done"] * 4
    status, out, _ = sweep(*PACK, "--no-pack", recipe=PACKABLE, name="alone")
    assert status == 0 and out.count("one by one: packs were declined (--no-pack)") == 1
    assert set(packs(root, "alone").values()) == {0}
    for number in range(1, 5):
        together, alone = (Run.open(root, f"{name}-{number:04d}") for name in ("grid", "alone"))
        assert together.config_json()["config"] == alone.config_json()["config"]
        losses = [[row["loss"] for row in rows(root, run.name)] for run in (together, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert resume(root, "grid-0001", ["steps=14"]) == 0


def test_packs_are_split_by_shape(sweep, root: Path):
    status, out, _ = sweep("model.width=4,8", "optim.lr=1e-3,1e-2", "steps=6", recipe=PACKABLE)
    assert status == 0 and "packed: 4 trials train as stacked models of 2 + 2" in out
    assert set(packs(root).values()) == {2}


def test_unpackable_trials_are_trained_one_by_one_with_a_reason(sweep, root: Path):
    status, out, _ = sweep("optim.lr=1e-3,1e-2", "accum=2", "steps=4", recipe=PACKABLE)
    assert status == 0 and "one by one: 2 trials (accum=2)" in out and set(packs(root).values()) == {0}


def test_pack_size_is_limited_and_claimed_trials_are_left_out(sweep, root: Path):
    words = ("optim.lr=1e-3..1e-2x5", "steps=4")
    assert sweep(*words, "--pack", "2", recipe=PACKABLE)[0] == 0
    assert sorted(packs(root).values()) == [0, 2, 2, 2, 2]


def test_pack_size_is_limited_by_memory(sweep, root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trials, "room", lambda device: 0)
    status, out, _ = sweep("optim.lr=1e-3,1e-2", "steps=4", recipe=PACKABLE)
    assert status == 0 and "memory for 1 of 2 runs at a time" in out and set(packs(root).values()) == {0}


def test_pack_leaves_out_trials_of_another_worker(sweep, root: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("optim.lr=1e-3..1e-2x4", "steps=4")
    real, groups = trials.train, trials.groups
    taken: list[int] = []

    def take_one_first(workspace, found, most):
        taken.append(workspace.sweep.claim(workspace.sweep.trials()[1]))
        return groups(workspace, found, most)

    monkeypatch.setattr(trials, "groups", take_one_first)
    trained: list[list[int]] = []
    monkeypatch.setattr(
        trials, "train", lambda workspace, given: trained.append([t.number for t in given]) or real(workspace, given)
    )
    status, out, _ = sweep(*words, recipe=PACKABLE)
    assert status == 0 and trained == [[1, 3, 4]]
    assert "1 trials are still being worked on elsewhere" in out
    os.close(taken[0])


def test_pack_is_split_where_most_work_would_be_masked(sweep, root: Path, monkeypatch: pytest.MonkeyPatch):
    from seedbed.recipes import find

    system = find(PACKABLE)[0]._module("system").Packable
    monkeypatch.setattr(system, "flops_per_item", lambda self: float(self.config.model.prototypes), raising=False)
    status, out, _ = sweep("model.prototypes=2,3,4,8,9", "steps=2", recipe=PACKABLE)
    assert status == 0 and "stacked models of 2 + 3" in out
    assert list(packs(root).values()) == [2 if n in (8, 9) else 3 for n in _prototypes(root)]


def _prototypes(root: Path) -> list[int]:
    return [trial.settings["model.prototypes"] for trial in Sweep.open(root, "grid").trials()]


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError()], ids=["bug", "memory"])
def test_pack_that_fails_is_split(sweep, root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    real, sizes = trials.train_packed, []

    def train_packed(runs, **named):
        sizes.append(len(runs))
        if len(runs) == 4:
            raise error
        return real(runs, **named)

    monkeypatch.setattr(trials, "train_packed", train_packed)
    status, out, _ = sweep(*PACK, recipe=PACKABLE)
    assert status == 0 and "the pack of 4 did not train" in out and states(root) == ["done"] * 4
    assert sizes == ([4, 2, 2] if isinstance(error, MemoryError) else [4])


def test_pack_with_a_diverging_trial_continues_without_it(sweep, root: Path):
    status, out, err = sweep("data.poison=-1,9", "optim.lr=1e-3,1e-2", "steps=12", "guard.policy=stop", recipe=PACKABLE)
    assert status == 0, out + err
    found = {(s.trial.settings["data.poison"], s.state) for s in Sweep.open(root, "grid").statuses()}
    assert found == {(-1, "done"), (9, "nan")}


@pytest.mark.slow
def test_pack_that_is_interrupted_resumes_as_one(root: Path):
    words = (PACKABLE, "optim.lr=1e-3,1e-2", "steps=600", "every.log=10", "every.eval=300", "every.save=50", "--name", "grid")
    first = worker(root, *words)
    wait_until(lambda: all((root / f"grid-000{n}" / "checkpoints" / "step-000050").is_dir() for n in (1, 2)), first)
    first.send_signal(signal.SIGTERM)
    printed = first.communicate(timeout=60)[0]
    assert first.returncode == 128 + signal.SIGTERM and "seedbed sweep --join grid" in printed, printed
    second = worker(root, *words)
    printed = second.communicate(timeout=100)[0]
    assert second.returncode == 0, printed
    assert states(root) == ["done"] * 2 and all("resume" in kinds(root, f"grid-000{n}") for n in (1, 2))
    assert all(e["step"] >= 50 for e in Run.open(root, "grid-0001").events() if e["kind"] == "resume")


# ---- suggested -------------------------------------------------------------------------------------------------------


def test_suggested_trials_are_trained_and_more_can_be_added(sweep, root: Path, capsys):
    words = ("optim.lr=1e-4..1e-1", "model.width=3,4", "steps=4", "--sampler", "random")
    status, out, err = sweep(*words, "--suggest", "3")
    assert status == 0 and "3 trials: 3 done" in out, out + err
    status, out, _ = sweep(*words, "--suggest", "5", "--seeds", "1")
    assert status == 2, "--seeds 1 sets the seed, which is another sweep"
    status, out, _ = sweep(*words, "--suggest", "5")
    assert status == 0 and "5 trials: 5 done" in out
    rates = [t.settings["optim.lr"] for t in Sweep.open(root, "grid").trials()]
    assert len(set(rates)) == 5


def test_suggestions_are_packed_too(sweep, root: Path):
    status, out, err = sweep("optim.lr=1e-4..1e-1", "steps=4", "--sampler", "random", "--suggest", "3", recipe=PACKABLE)
    assert status == 0 and set(packs(root).values()) == {3}, out + err


def test_optuna_missing_is_reported_before_the_start(sweep, root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    status, out, err = sweep("optim.lr=1e-4..1e-1", "--suggest", "3")
    assert (status, out) == (2, "") and "pip install 'seedbed[search]'" in err and list(root.parent.iterdir()) == []
