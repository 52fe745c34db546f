"""Files in the working directory are never imported by the processes that we start."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import TOY, start

from seedbed import config as configs
from seedbed import isolated
from seedbed.checks.doctor_machine import Machine
from seedbed.drills.sandbox import Sandbox
from seedbed.launch import slurm
from seedbed.launch.slurm_script import Resources
from seedbed.recipes import find
from seedbed.serve.playground import process_for
from seedbed.serve.run_index import RunIndex

# What a run imports sooner or later; each leaves a mark and then behaves as if it were missing.
PLANTED = ("safetensors", "rich", "matplotlib", "numpy", "torch", "tokenizers", "starlette", "websockets")
SAFE = [sys.executable, "-P", "-c", "import sys; from seedbed.cli import main; sys.exit(main())"]
TRAIN = ["train", TOY, "steps=2", "--run", "two", "--no-check", "--dirty"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A working directory with a trained run and planted modules; none of them may be executed."""
    start(tmp_path / "runs", "one", "steps=2")
    monkeypatch.chdir(tmp_path)
    for name in PLANTED:
        mark = f"import os\nos.makedirs({str(tmp_path / 'exploded' / name)!r}, exist_ok=True)\nraise ImportError({name!r})\n"
        (tmp_path / f"{name}.py").write_text(mark)
    yield tmp_path
    assert not (tmp_path / "exploded").exists(), f"executed: {os.listdir(tmp_path / 'exploded')}"


def call(words: list[str], folder: Path, path: str = str(ROOT / "src"), **more) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False, **more)


def test_playground_process_is_isolated(folder: Path) -> None:
    done = call(list(process_for(RunIndex(folder / "runs"), "one")), folder, input="")
    assert "ready" in json.loads(done.stdout.splitlines()[0]), done.stderr


def test_module_started_by_hand_or_by_torchrun_is_isolated(folder: Path) -> None:
    done = call([sys.executable, "-m", "seedbed", "sample", "one"], folder)
    assert done.returncode == 0, done.stderr


def test_module_is_found_where_it_is_started() -> None:
    """In the folder that holds the package, the working directory is where it comes from."""
    assert call([sys.executable, "-m", "seedbed", "--version"], ROOT / "src", path="").returncode == 0


@pytest.mark.slow
def test_ranks_are_isolated(folder: Path) -> None:
    done = call([*SAFE, *TRAIN, "dist.replicate=2"], folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchrun_is_isolated(folder: Path) -> None:
    # torchrun takes --run for an abbreviation of its own, so the run has the name that it gets.
    words = ["--standalone", "--nproc-per-node=2", "-m", "seedbed", "train", TOY, "steps=2", "dist.replicate=2"]
    words += ["--no-check", "--dirty"]
    done = call([sys.executable, "-P", "-m", "torch.distributed.run", *words], folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [0, 2])
def test_drills_are_isolated(folder: Path, num_ranks: int) -> None:
    (folder / "runs").rename(folder / "others")
    sandbox = Sandbox(folder, True, 200.0)
    words = [word for word in TRAIN if word not in ("--run", "two")]
    child = sandbox.start_fresh(*words, *([f"dist.replicate={num_ranks}"] if num_ranks else []), num_ranks=num_ranks)
    assert sandbox.wait(child) == 0, child.output()


@pytest.mark.slow
def test_doctor_compiles_in_isolation(folder: Path) -> None:
    process = Machine().start_compile("cpu")
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()


def test_job_script_is_isolated(folder: Path) -> None:
    """The command of the script, as srun would start it, without the script's variables as well."""
    how, (recipe, preset) = slurm.SubmitOptions(folder / "runs"), find("gpt/demo")
    config = configs.override(recipe.preset(preset), ["device=cpu"])
    script = slurm._run_script("t", folder / "runs" / "one", how, ["steps=4"], Resources(), recipe, config)
    line = script.text().partition("srun --kill-on-bad-exit=1 \\\n")[2].partition(" &\n")[0]
    done = call(shlex.split(line), folder)
    assert done.returncode == 0, done.stderr


def test_children_find_this_package(tmp_path: Path) -> None:
    words = isolated.command("timeit", "-n1", "-r1", "import seedbed; print(seedbed.__file__)")
    assert call(words, tmp_path, path="").stdout.splitlines()[0] == str(ROOT / "src" / "seedbed" / "__init__.py")
