"""`--on slurm` against commands that only pretend: what is written, what is said, and what is refused; no cluster is needed."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import TOY

from seedbed.cli import main
from seedbed.errors import UserError
from seedbed.launch import slurm_script
from seedbed.recipes import find
from seedbed.report import slurm_queue
from seedbed.track import code
from seedbed.track.run import Run
from seedbed.tune.sweep.folder import Sweep

Answer = tuple[int, str, str]


class Commands:
    """A folder that is the whole PATH, with commands that print what a test tells them to, and note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, out: str = "", err: str = "", status: int = 0) -> None:
        path = self.folder / name
        reported = "\n".join([f"printf '%s' '{out}'", f"printf '%s' '{err}' >&2", f"exit {status}"])
        path.write_text(f'#!/bin/bash\necho "$@" >>{self.folder / (name + ".calls")}\n{reported}\n')
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(found.folder))
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("SEEDBED_CODE", raising=False)
    monkeypatch.setattr("seedbed.track.files.fsync", lambda fd: None)

    def call(*words: str) -> Answer:
        capsys.readouterr()
        return main(words), *capsys.readouterr()

    return call


def ready(commands: Commands, job: int = 41) -> Commands:
    commands.add("sbatch", out=f"{job}\n")
    commands.add("squeue")
    commands.add("scancel")
    return commands


# ---- what is submitted -----------------------------------------------------------------------------------------------


def test_submitted_run_is_complete_before_it_starts(run, commands: Commands):
    status, out, err = run("train", "gpt/demo", "steps=8", "--on", "slurm", "--run", "far", "-m", "why", "slurm.time=4h")
    assert status == 2 and "no sbatch on PATH" in err and not Path("runs").exists()
    ready(commands)
    status, out, err = run("train", "gpt/demo", "steps=8", "--on", "slurm", "--run", "far", "-m", "why", "slurm.time=4h")
    assert (status, err) == (0, ""), out + err
    assert "submitted job 41" in out and "seedbed cancel far" in out
    folder = Path("runs/far").absolute()
    assert commands.calls("sbatch") == [f"--parsable {folder / 'job.sbatch'}"]
    assert {"config.json", "code.json", "job.sbatch", "slurm.json", "code"} <= {p.name for p in folder.iterdir()}
    assert Run(folder).config_json()["config"]["steps"] == 8
    text = (folder / "job.sbatch").read_text()
    assert "#SBATCH --time=0-04:00:00" in text and "--requeue" in text and f"-m seedbed resume far --runs {folder.parent}" in text
    (found,) = json.loads(run("runs", "list", "--json")[1])
    assert found["status"] == "cancelled", "squeue answered, and knows of no such job"


def test_code_copy_is_what_the_job_runs(run, commands: Commands, tmp_path: Path):
    ready(commands)
    recipe = Path("mine.py")
    recipe.write_text(Path(TOY).read_text())
    assert run("train", "mine.py", "steps=6", "--on", "slurm", "--run", "kept")[0] == 0
    kept = Path("runs/kept/code").absolute()
    assert not list(kept.rglob("__pycache__"))
    recipe.write_text("broken(")
    env = {**os.environ, "SEEDBED_CODE": str(kept), "PYTHONPATH": str(kept), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    reported = "import seedbed, sys; from seedbed.cli import main; print(seedbed.__file__); sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", reported, "resume", "kept", "--no-check"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == str(kept / "seedbed" / "__init__.py")
    events = [event["kind"] for event in Run(kept.parent).events()]
    assert events[0] == "preflight" and "start" in events and "model" in events and "resume" not in events
    assert (kept.parent / "mine.py").read_text() == Path(TOY).read_text()
    assert Run(kept.parent).status()["status"] == "done"


def test_code_copy_records_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    facts = {"version": "1", "commit": "c" * 40, "branch": "b", "dirty": True, "changed": ["a"], "untracked": [], "hostname": "x"}
    code.keep({**facts, "patch_left_out": [], "patch": "--- a\n"}, tmp_path)
    monkeypatch.setenv("SEEDBED_CODE", str(tmp_path))
    reported = code.state(Path.cwd())
    assert reported["commit"] == "c" * 40 and reported["dirty"] and reported["patch"] == "--- a\n"
    assert reported["hostname"] == os.uname().nodename, "the machine is that of the job"


@pytest.mark.parametrize("word", ["AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"])
def test_environment_secrets_are_not_written_by_a_submission(run, commands: Commands, monkeypatch: pytest.MonkeyPatch, word: str):
    monkeypatch.setenv(word, "hunter2hunter2")
    ready(commands)
    assert run("train", "gpt/demo", "--on", "slurm", "--run", "safe")[0] == 0
    assert [p for p in Path("runs").rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()] == []


def test_data_error_of_a_job_is_shown_in_its_output_and_the_list(run, commands: Commands):
    ready(commands)
    assert run("train", "gpt/demo", "data.text=nowhere.txt", "--on", "slurm", "--run", "lost", "slurm.gpus=0")[0] == 0
    status, _, err = run("resume", "lost")
    assert status == 2 and "nowhere.txt" in err
    assert Run(Path("runs/lost")).status()["status"] == "failed" and "nowhere.txt" in Run(Path("runs/lost")).status()["error"]


# ---- the script ------------------------------------------------------------------------------------------------------


def test_dry_run_prints_everything_and_writes_nothing(run, commands: Commands):
    words = ["train", "gpt/demo", "--on", "slurm", "--dry", "--run", "far", "dist.replicate=4", "dist.shard=2", "device=cuda"]
    words += ["slurm.nodes=2", "slurm.cpus=6", "slurm.partition=gpu", "slurm.account=lab", "slurm.constraint=h100&ib"]
    words += ["slurm.setup=module load cuda", "slurm.extra=--qos=high --mem=64G", "slurm.warn=3m", "slurm.time=1-12"]
    status, out, err = run(*words, "slurm.container=apptainer exec --nv torch.sif")
    assert (status, err) == (0, "") and list(Path().iterdir()) == []
    directives = re.findall(r"^#SBATCH --([\w-]+)=(\S+)", out, re.M)
    wanted = {"job-name": "far", "nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4", "cpus-per-task": "6"}
    wanted |= {"partition": "gpu", "account": "lab", "constraint": "h100&ib", "time": "1-12:00:00", "signal": "B:USR1@180"}
    assert wanted.items() <= dict(directives).items()
    assert "#SBATCH --qos=high --mem=64G" in out and "\nmodule load cuda\n" in out and "WORLD_SIZE=8" in out
    assert "apptainer exec --nv torch.sif python3 -P -m seedbed resume far" in out
    assert "nothing was written or submitted" in out and out.rstrip().endswith(str(Path("runs/far/job.sbatch").absolute()))
    assert is_bash(out)


def test_dry_sweep_and_dry_resume_write_nothing(run, commands: Commands):
    status, out, _ = run("sweep", TOY, "optim.lr=1e-3,1e-2", "seed=1..3", "--on", "slurm", "--dry", "--name", "grid")
    assert status == 0 and f"ls -d {Path('runs/grid').absolute()}-*/checkpoints/step-*" in out
    assert "#SBATCH --array=1-6" in out and "--pack 1" in out and list(Path().iterdir()) == [] and is_bash(out)
    ready(commands)
    assert run("train", TOY, "--on", "slurm", "--run", "far")[0] == 0
    before = sorted(Path().rglob("*"))
    status, out, _ = run("resume", "far", "steps=99", "--on", "slurm", "--dry")
    assert status == 0 and "resume far steps=99" in out and sorted(Path().rglob("*")) == before


def test_submission_loads_no_torch(seedbed):
    done = seedbed("train", "gpt/demo", "--on", "slurm", "--dry", python=("-X", "importtime"))
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "seedbed.launch.slurm" in loaded and not loaded & {"torch", "matplotlib", "rich"}


def is_bash(text: str) -> bool:
    return subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_awkward_folders_are_quoted(run, commands: Commands, tmp_path: Path):
    ready(commands)
    odd = tmp_path / "my runs; $(touch gone) 100%"
    assert run("train", TOY, "--on", "slurm", "--run", "far", "--runs", str(odd))[0] == 0
    text = (odd / "far" / "job.sbatch").read_text()
    assert is_bash(text) and f'--output="{str(odd).replace("%", "%%")}/far/slurm-%j.out"' in text
    status, _, err = run("train", TOY, "--on", "slurm", "--run", "far", "--runs", str(tmp_path / 'a"b'))
    assert status == 2 and "quote" in err


def test_shell_injection_by_a_run_folder_is_quoted(run, commands: Commands):
    ready(commands)
    assert run("train", TOY, "--on", "slurm", "--run", "far")[0] == 0
    odd = Path("runs/far").rename("runs/a $(touch gone)")
    facts = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**facts, "hash": "`touch gone`"}))
    assert run("resume", odd.name, "--on", "slurm", "--dry")[0] == 2, "a hash that is none is refused"
    (odd / "config.json").write_text(json.dumps({**facts, "version": "1\ntouch gone\n"}))
    status, out, err = run("resume", odd.name, "--on", "slurm", "--dry")
    assert status == 0, err
    lines = [line for line in out.splitlines() if "touch gone" in line and not line.startswith("#")]
    assert lines and all(re.search(r"'[^']*\$\(touch gone\)[^']*'", line) for line in lines), lines


def test_foreign_code_and_script_in_a_run_folder_are_replaced(run, commands: Commands):
    ready(commands)
    assert run("train", TOY, "--on", "slurm", "--run", "far")[0] == 0
    planted = [Path("runs/far/code/seedbed/cli/__init__.py"), Path("runs/far/code/torch.py"), Path("runs/far/job.sbatch")]
    for path in planted:
        path.write_text("planted")
    assert run("resume", "far", "--on", "slurm")[0] == 0
    assert [p for p in Path("runs").rglob("*") if p.is_file() and p.read_bytes() == b"planted"] == []


def play(text: str, folder: Path, *, code: int, signal: bool, saves: bool) -> str:
    """Run a script whose srun takes a moment, saves or not, and ends with a status; what scontrol was asked to do."""
    commands = Commands(folder)
    commands.add("scontrol")
    save = f"mkdir -p {folder.parent}/runs/far/checkpoints/step-000007" if saves else ":"
    (folder / "srun").write_text(f"#!/bin/bash\ntrap 'exit {code}' USR1\ntouch {folder}/up\nsleep 0.2\n{save}\nexit {code}\n")
    (folder / "srun").chmod(0o755)
    path = folder / "job.sh"
    warn = f"until [ -e {folder}/up ]; do sleep 0.02; done; kill -USR1 $$" if signal else ":"
    path.write_text(text.replace("&\nstep=$!", f"&\nstep=$!\n{warn}\n{save}"))
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "41"}
    done = subprocess.run(["/bin/bash", str(path)], env=env, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == code, done.stderr
    return "; ".join(commands.calls("scontrol")) + done.stdout


@pytest.mark.parametrize(
    ("code", "signal", "saves", "says"),
    [
        (138, True, True, "requeue 41"),
        (138, True, False, "not requeued"),
        (0, True, True, ""),
        (2, True, True, ""),
        (143, False, True, ""),
        (0, False, True, ""),
    ],
)
def test_requeue_only_after_a_save_at_the_time_limit(run, tmp_path, code, signal, saves, says):
    status, out, _ = run("train", TOY, "--on", "slurm", "--dry", "--run", "far", "--runs", str(tmp_path / "runs"))
    assert status == 0
    reported = play(out, tmp_path / "play", code=code, signal=signal, saves=saves)
    assert says in reported if says else reported == ""


# ---- wrong words -----------------------------------------------------------------------------------------------------

WRONG = [
    (("slurm.time=soon",), r"slurm\.time=soon is not a time; write 90m, 4h or 2d"),
    (("slurm.time=1:2:3:4",), r"is not a time"),
    (("slurm.time=90s",), r"leaves no time to train"),
    (("slurm.partitoin=x",), r"unknown key `slurm\.partitoin`; nearest: slurm\.partition"),
    (("slurm.nodes=0",), r"slurm\.nodes=0 is out of range"),
    (("slurm.nodes=many",), r"whole number"),
    (("slurm.gpus=2", "dist.replicate=4"), r"slurm\.nodes=1 with slurm\.gpus=2 each are 2 GPUs, but .* = 4"),
    (("slurm.gpus=8",), r"are 8 GPUs, but .* = 1; make them equal, as in dist\.replicate=8"),
    (("slurm.nodes=3", "dist.shard=8"), r"= 8 processes do not divide over slurm\.nodes=3"),
    (("slurm.extra=qos",), r"must be options of sbatch"),
    (("slurm.extra=--a\n--b",), r"one line"),
    (("slurm.workers=2",), r"for seedbed sweep"),
    (("--anomaly",), r"--anomaly is for a run on this machine"),
    (("stps=3",), r"steps"),
    (("--mirror", "nonesuch"), r"no mirror"),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_slurm_settings_are_validated_before_anything_is_written(run, commands: Commands, words: tuple[str, ...], says: str):
    ready(commands)
    status, _, err = run("train", "gpt/demo", "--on", "slurm", *words)
    assert status == 2 and re.search(says, err), err
    assert len(err.strip().splitlines()) <= 2 and list(Path().iterdir()) == [] and commands.calls("sbatch") == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train", "gpt/demo", "slurm.time=4h"), r"add --on slurm"),
        (("train", "gpt/demo", "--on", "slrum"), r"invalid choice"),
        (("resume", "x", "--dry"), r"--dry needs --on slurm"),
        (("sweep", "gpt/demo", "seed=1,2", "--dry"), r"--dry needs --on slurm"),
        (("sweep", "gpt/demo", "seed=1,2", "slurm.workers=2"), r"add --on slurm"),
        (("resume", "nothing", "--on", "slurm"), r"no run"),
        (("cancel", "nothing"), r"no run"),
        (("sweep", "--join", "nothing", "--on", "slurm"), r"no sweep"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_slurm_options_without_slurm_are_refused(run, commands: Commands, words: tuple[str, ...], says: str):
    status, _, err = run(*words)
    assert status == 2 and re.search(says, err), err


REFUSALS = [
    (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed",
        r"invalid partition .*; sinfo lists",
    ),
    ("sbatch: error: Invalid generic resource (gres) specification", r"slurm\.gpus=0 requests none"),
    ("", r"exit status 1"),
]


@pytest.mark.parametrize(("reported", "says"), REFUSALS)
def test_sbatch_error_is_one_line_and_leaves_no_run(run, commands: Commands, reported: str, says: str):
    ready(commands).add("sbatch", err=reported, status=1)
    status, _, err = run("train", "gpt/demo", "--on", "slurm", "--run", "far")
    assert status == 2 and re.search(f"sbatch refused: .*{says}", err) and len(err.strip().splitlines()) == 1
    assert list(Path("runs").iterdir()) == []


def test_sbatch_output_without_a_job_id_is_refused(run, commands: Commands):
    ready(commands).add("sbatch", out="later, perhaps")
    status, _, err = run("train", "gpt/demo", "--on", "slurm")
    assert status == 2 and "later, perhaps" in err and list(Path("runs").iterdir()) == []


TIMES = {
    "90m": 5400,
    "4h": 14400,
    "2d": 172800,
    "30s": 30,
    "10": 600,
    "10:30": 630,
    "1:00:00": 3600,
    "2-0": 172800,
    "1-2:30": 95400,
}


@pytest.mark.parametrize(("text", "num_seconds"), {**TIMES, "1-02:30:05": 95405}.items())
def test_time_limits_are_parsed_like_slurm(text: str, num_seconds: int):
    assert slurm_script._seconds(text) == num_seconds
    assert slurm_script._seconds(slurm_script._slurm_time(num_seconds)) == num_seconds


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ((), (1, 1, 0)),
        (("device=cuda",), (1, 1, 1)),
        (("device=cuda", "dist.replicate=8"), (1, 8, 8)),
        (("device=cuda", "dist.replicate=8", "dist.shard=4", "slurm.nodes=4"), (4, 8, 8)),
        (("device=cpu", "dist.replicate=2", "slurm.nodes=2"), (2, 1, 0)),
    ],
)
def test_layout_follows_from_replicate_and_shard(words: tuple[str, ...], shape: tuple[int, int, int]):
    from seedbed import config as configs

    ask, own = slurm_script.read([*words])
    recipe, preset = find("gpt/demo")
    plan = slurm_script.layout(ask, configs.override(recipe.preset(preset), ["device=cpu", "batch=32", *own]))
    assert (plan.nodes, plan.processes, plan.gpus) == shape


# ---- the queue -------------------------------------------------------------------------------------------------------

QUEUE = [
    ("41|PENDING|Priority\n", 0, "queued", "41: PENDING (Priority)"),
    ("41|RUNNING|None\n", 0, "queued", "41: RUNNING"),
    ("", 0, "cancelled", None),
    ("nonsense", 0, "cancelled", None),
    ("slurm_load_jobs error: Invalid job id specified", 1, "cancelled", None),
    ("slurm_load_jobs error: Unable to contact slurm controller", 1, "queued", None),
]


@pytest.mark.parametrize(("reported", "status", "standing", "shown"), QUEUE)
def test_run_list_shows_the_queue_state(run, commands: Commands, reported: str, status: int, standing: str, shown: str | None):
    ready(commands)
    assert run("train", "gpt/demo", "--on", "slurm", "--run", "far")[0] == 0
    commands.add("squeue", out="" if status else reported, err=reported if status else "", status=status)
    (found,) = json.loads(run("runs", "list", "--json")[1])
    assert (found["status"], found["queue"]) == (standing, shown)
    table = run("runs", "list")[1]
    assert ("queue" in table.splitlines()[0]) == bool(shown)
    assert ("job 41" in run("runs", "show", "far")[1]) == bool(shown)
    assert len(commands.calls("squeue")) == 3, "one call for each listing"


def test_squeue_is_called_only_for_submitted_runs(run, commands: Commands):
    ready(commands)
    assert run("train", "gpt/demo", "--on", "slurm", "--run", "far")[0] == 0
    record = Path("runs/far/slurm.json").rename("aside")
    run("runs", "list")
    assert commands.calls("squeue") == []
    record.rename("runs/far/slurm.json")
    (commands.folder / "squeue").unlink()
    status, out, err = run("runs", "list")
    assert status == 0 and err == "" and "queued" in out
    status, _, err = run("cancel", "far")
    assert status == 2 and "squeue does not answer" in err


def test_slow_squeue_does_not_delay_listings(run, commands: Commands, monkeypatch: pytest.MonkeyPatch):
    ready(commands)
    assert run("train", "gpt/demo", "--on", "slurm", "--run", "far")[0] == 0
    (commands.folder / "squeue").write_text("#!/bin/bash\nread -r -t 30 <> <(:)\n")
    monkeypatch.setattr(slurm_queue, "_PATIENCE", 0.2)
    (found,) = json.loads(run("runs", "list", "--json")[1])
    assert (found["status"], found["queue"]) == ("queued", None)


def test_cancel_and_submit_again(run, commands: Commands):
    ready(commands).add("squeue", out="41|PENDING|Priority\n")
    assert run("train", "gpt/demo", "--on", "slurm", "--run", "far")[0] == 0
    status, _, err = run("resume", "far", "--on", "slurm")
    assert status == 2 and "already in the queue as job 41; to remove it: seedbed cancel far" in err
    status, out, _ = run("cancel", "far")
    assert status == 0 and commands.calls("scancel") == ["41"] and "seedbed resume far --on slurm" in out
    ready(commands, job=42)
    status, _, err = run("cancel", "far")
    assert status == 2 and "no job in the queue" in err
    status, out, err = run("resume", "far", "--on", "slurm", "--json")
    assert status == 0, err
    assert json.loads(out)["job"] == "42" and slurm_queue.jobs(Path("runs/far")) == ["41", "42"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"jobs": 3}', '{"jobs": [1, "x; rm", null]}'])
def test_damaged_job_record_is_ignored(tmp_path: Path, text: str):
    (tmp_path / "slurm.json").write_text(text)
    assert slurm_queue.jobs(tmp_path) == []


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def test_sweep_is_created_here_and_trained_by_an_array(run, commands: Commands):
    ready(commands, job=57).add("squeue", out="57|RUNNING|None\n57|RUNNING|None\n57|PENDING|Resources\n")
    words = ("sweep", TOY, "optim.lr=1e-3,1e-2", "seed=1..3", "steps=4", "--name", "grid", "--on", "slurm")
    status, out, err = run(*words, "slurm.workers=3", "--no-check")
    assert (status, err) == (0, "") and "submitted job 57: 3 workers of sweep grid" in out
    found = Sweep.open(Path("runs"), "grid")
    text = (found.path / "job.sbatch").read_text()
    assert len(found.trials()) == 6 and "#SBATCH --array=1-3" in text and "slurm-%A_%a.out" in text
    assert "sweep --join grid" in text and "--no-check --pack 2" in text and not Path("runs").exists()
    status, out, _ = run("sweep", "--show", "grid")
    assert status == 0 and "queue: job 57: 2 RUNNING, 1 PENDING" in out
    status, out, _ = run("cancel", "grid")
    assert status == 0 and "seedbed sweep --join grid --on slurm" in out and commands.calls("scancel") == ["57"]
    status, out, _ = run("sweep", "--join", "grid", "--on", "slurm", "--no-pack", "slurm.gpus=0")
    assert status == 0 and "#SBATCH --array=1-6" in (found.path / "job.sbatch").read_text()


def test_workers_need_a_disk_with_locks(run, commands: Commands, monkeypatch: pytest.MonkeyPatch):
    ready(commands)

    def no_locks(fd: int) -> bool:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("seedbed.track.folders.try_lock", no_locks)
    status, _, err = run("sweep", TOY, "seed=1,2", "--on", "slurm", "--name", "grid")
    assert status == 2 and "without file locks" in err and "slurm.workers=1" in err and commands.calls("sbatch") == []


def test_sweep_that_has_ended_needs_no_workers(run, commands: Commands):
    ready(commands)
    assert run("sweep", TOY, "seed=1,2", "steps=2", "--name", "grid", "--no-check", "--dirty")[0] == 0
    status, _, err = run("sweep", "--join", "grid", "--on", "slurm")
    assert status == 2 and "every trial of sweep grid has ended" in err


def test_value_that_cannot_be_quoted_for_sbatch_is_refused():
    with pytest.raises(UserError, match="line break"):
        slurm_script._quoted("a\nb")
