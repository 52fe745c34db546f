"""Jobs on a real Slurm of one node: requeued, signalled, cancelled, as an array; nothing is lost and no bit differs."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from helpers import TOY, assert_same_end, kinds

from seedbed.track.run import Run
from seedbed.tune.sweep.folder import Sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
SMALL = ("model.depth=1", "model.width=32", "batch=8")
# Nothing is saved but at the end and on a signal: where a run goes on tells what the signal did.
RARELY = ("every.log=1", "every.eval=0", "every.save=0", "every.sample=0", "device=cpu")


@pytest.fixture(scope="session")
def cluster() -> None:
    done = subprocess.run([str(ROOT / "tests" / "slurm" / "setup.sh")], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(done.stderr.strip() or "slurm cannot be set up here")


@pytest.fixture
def root(cluster: None, tmp_path: Path) -> Path:
    return tmp_path / "runs"


def call(*words: str, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def seedbed(root: Path, *words: str) -> str:
    return call(sys.executable, "-m", "seedbed", *words, "--dirty", cwd=root.parent)


def submit(root: Path, *words: str) -> str:
    """The number of the job."""
    return json.loads(seedbed(root, *words, "--on", "slurm", "--json"))["job"]


def job_facts(job: str, key: str) -> str:
    done = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, timeout=20, check=False)
    found = re.search(rf"\b{key}=(\S+)", done.stdout)
    return found[1] if found else ""


def wait(what: str, is_so: Callable[[], Any], root: Path) -> None:
    deadline = time.monotonic() + 130
    while not is_so():
        if time.monotonic() > deadline:
            printed = "\n".join(p.read_text()[-2000:] for p in root.parent.rglob("slurm-*.out"))
            pytest.fail(f"{what}: waited in vain\n{call('squeue', cwd=root.parent)}\n{printed}")
        time.sleep(0.2)


def wait_for_step(root: Path, name: str, step: int) -> None:
    def reached() -> bool:
        path = root / name / "rows.jsonl"
        return path.exists() and any(row["step"] >= step for row in Run(root / name).rows()[-1:])

    wait(f"{name} at step {step}", reached, root)


def wait_for_end(root: Path, name: str, job: str) -> None:
    wait(f"{name} done", lambda: Run(root / name).status().get("status") == "done", root)
    wait(f"job {job} out of the queue", lambda: job_facts(job, "JobState") in ("COMPLETED", ""), root)


def start_again(root: Path, job: str) -> None:
    """Slurm lets a requeued job rest for two minutes; here nobody has them."""

    def started() -> bool:
        if job_facts(job, "JobState") in ("RUNNING", "COMPLETED"):
            return True
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True, timeout=20, check=False)
        return False

    wait(f"job {job} requeued", lambda: job_facts(job, "JobState") == "PENDING" and job_facts(job, "Restarts") == "1", root)
    time.sleep(4)  # started in the same second, it would be refused with the credential of its first life
    wait(f"job {job} started again", started, root)


def resumed_at(root: Path, name: str) -> list[int]:
    return [event["step"] for event in Run(root / name).events() if event["kind"] == "resume"]


def test_requeued_job_resumes_and_ends_bitwise_equal(root: Path):
    settings = (*SMALL, *RARELY, "steps=200")
    job = submit(root, "train", "gpt/demo", *settings, "--run", "queued")
    assert (root / "queued" / "job.sbatch").is_file() and (root / "queued" / "code" / "seedbed" / "cli").is_dir()
    wait_for_step(root, "queued", 40)
    (seen,) = json.loads(seedbed(root, "runs", "list", "--json"))
    assert (seen["status"], seen["queue"]) == ("running", f"{job}: RUNNING")
    call("scontrol", "requeue", job, cwd=root.parent)
    start_again(root, job)
    seedbed(root, "train", "gpt/demo", *settings, "--run", "straight", "--no-check")
    wait_for_end(root, "queued", job)
    (step,) = resumed_at(root, "queued")
    assert 40 <= step < 200, "it went on where the signal had found it"
    assert_same_end(root, "straight", "queued")
    assert kinds(root, "queued").count("preflight") == 1, "checked before its first step, and not again"


def test_time_limit_signal_saves_and_requeues(root: Path):
    settings = (*RARELY, "steps=1500")
    job = submit(root, "train", TOY, *settings, "slurm.time=10m", "--run", "timed", "--no-check")
    wait_for_step(root, "timed", 20)
    # What Slurm itself does two minutes before the end of the time (--signal=B:USR1@120).
    call("scancel", "--signal=USR1", "--batch", job, cwd=root.parent)
    start_again(root, job)
    seedbed(root, "train", TOY, *settings, "--run", "straight", "--no-check")
    wait_for_end(root, "timed", job)
    assert len(resumed_at(root, "timed")) == 1 and resumed_at(root, "timed")[0] >= 20
    assert_same_end(root, "straight", "timed")


def test_cancelled_run_can_be_resumed(root: Path):
    job = submit(root, "train", TOY, *RARELY, "steps=1000000", "--run", "long", "--no-check")
    wait_for_step(root, "long", 20)
    done = subprocess.run(
        [sys.executable, "-m", "seedbed", "resume", "long", "--on", "slurm"],
        cwd=root.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and f"already in the queue as job {job}" in done.stderr
    assert f"cancelled job {job}" in seedbed(root, "cancel", "long")
    wait(f"job {job} cancelled", lambda: job_facts(job, "JobState") == "CANCELLED", root)
    wait("the run interrupted", lambda: Run(root / "long").status().get("status") == "interrupted", root)
    saved = int(Run(root / "long").status()["step"])
    assert saved >= 20
    again = submit(root, "resume", "long", f"steps={saved + 40}")
    wait_for_end(root, "long", again)
    assert resumed_at(root, "long") == [saved]
    assert Run(root / "long").rows()[-1]["step"] == saved + 40


def test_sweep_array_uses_the_submitted_code(root: Path):
    recipe = root.parent / "mine.py"
    shutil.copy(TOY, recipe)
    words = (
        "optim.lr=1e-3,3e-3,1e-2",
        "model.width=3,4",
        "steps=8",
        "--name",
        "grid",
        "--no-check",
        "slurm.workers=3",
        "device=cpu",
    )
    job = submit(root, "sweep", str(recipe), *words)
    recipe.write_text("this is no Python any more")
    found = Sweep.open(root, "grid")
    wait("the sweep done", lambda: all(found.result(trial) for trial in found.trials()), root)
    assert [found.status(trial).state for trial in found.trials()] == ["done"] * 6
    wait(f"job {job} out of the queue", lambda: not call("squeue", "-h", "--me", "--name=grid", cwd=root.parent), root)
    outputs = sorted(found.path.glob("slurm-*.out"))
    assert [p.name for p in outputs] == [f"slurm-{job}_{n}.out" for n in (1, 2, 3)]
    assert sum((root / f"grid-{n:04d}" / "rows.jsonl").is_file() for n in range(1, 7)) == 6
    trained = [p for p in outputs if "done" in p.read_text()]
    assert len(trained) == 3, "every worker reported"


def test_ranks_of_one_job_train_together_and_are_requeued_together(root: Path):
    settings = (*SMALL, *RARELY, "steps=80")
    job = submit(root, "train", "gpt/demo", *settings, "dist.replicate=2", "--run", "pair", "--no-check")
    wait_for_step(root, "pair", 20)
    call("scontrol", "requeue", job, cwd=root.parent)
    start_again(root, job)
    seedbed(root, "train", "gpt/demo", *settings, "--run", "alone", "--no-check")
    wait_for_end(root, "pair", job)
    (step,) = resumed_at(root, "pair")
    assert 20 <= step < 80
    losses = [[row["loss"] for row in Run(root / name).rows()] for name in ("pair", "alone")]
    assert len(losses[0]) == 80 and losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_sbatch_error_of_a_cluster_is_quoted_and_leaves_no_run(root: Path):
    words = [
        sys.executable,
        "-m",
        "seedbed",
        "train",
        TOY,
        "--on",
        "slurm",
        "--dirty",
        "slurm.partition=nonesuch",
        "slurm.gpus=0",
        "--run",
        "x",
    ]
    done = subprocess.run(words, cwd=root.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "sbatch refused" in done.stderr and "partition" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not list(root.iterdir())
