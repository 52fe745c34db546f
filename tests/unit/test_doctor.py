"""The doctor on healthy and on sick machines: every answer above `ok` is provoked by a machine that deserves it."""

import errno
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from seedbed.checks import doctor as verb
from seedbed.checks.doctor import LEVELS, Plan
from seedbed.checks.doctor_machine import Machine
from seedbed.config import Config
from seedbed.report.findings import Finding
from seedbed.track import files

GB = 10**9


class Process:
    """A compilation under way: it ends with a status, or never."""

    def __init__(self, returncode: int | None = 0, printed: str = "") -> None:
        self.returncode, self.printed, self.killed = returncode, printed, False

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if self.returncode is None and not self.killed:
            raise subprocess.TimeoutExpired("compile", timeout or 0)
        return "", self.printed

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.killed, self.returncode = True, -9


GPU = {"name": "NVIDIA H200", "free": 140 * GB, "total": 141 * GB, "own": 0}
FAST = {"gemm": 808e12, "copy": 4.27e12, "upload": 55e9}
KERNELS = {"math": 9e-3, "flash": 1e-3}
HEALTHY: dict[str, Any] = {
    "try_folder": None,
    "touch_ends": None,
    "free": (500 * GB, 10**6),
    "write_speed": 5e8,
    "clock_lead": 0.001,
    "now": 1.8e9,
    "num_cores": 8.0,
    "num_threads": 8,
    "open_files": (65536, 65536),
    "shared_memory": 8 * GB,
    "memory": (60 * GB, 64 * GB),
    "encodings": {"files": "utf-8", "text": "UTF-8", "terminal": "utf-8"},
    "asserts_are_on": True,
    "versions": {"python": "3.12.1", "torch": "2.13.0+cu130", "numpy": "2.4", "cuda": "13.0"},
    "numpy_bridge": None,
    "compiler": "g++",
    "compile_cpp": "",
    "has_triton": True,
    "num_nvidia": 1,
    "gpus": [GPU],
    "driver_cuda": (13, 1),
    "gpu_error": 1e-6,
    "attention_times": KERNELS,
    "speeds": FAST,
    "which": "/usr/bin/x",
    "call": (0, "Signal=15@120"),
    "code_state": {"commit": "1a2b3c4d5e6f", "dirty": False, "changed": [], "untracked": []},
}


class Fake(Machine):
    """Answers as told; an exception as an answer is raised."""

    def __init__(self, env: dict[str, str] | None = None, **answers: Any) -> None:
        self.env = env or {}
        self.answers = {**HEALTHY, "start_compile": Process(), **answers}

    def __getattribute__(self, name: str) -> Any:
        if name in ("env", "answers") or name.startswith("__"):
            return object.__getattribute__(self, name)
        answer = self.answers[name]

        def give(*_: Any, **__: Any) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return give


def plan(tmp_path: Path = Path("somewhere"), **changes: Any) -> Plan:
    config = Config(model=None, data=None, **changes.pop("config")) if "config" in changes else None
    return Plan(tmp_path / "runs", tmp_path / "cache", config=config, **changes)


def shown(finding: Finding) -> str:
    return verb._SHOWN[verb._kind(finding)][0]


def sick(lines: list[Finding]) -> list[Finding]:
    return [line for line in lines if line.status != "pass"]


def test_doctor_probes_have_a_healthy_answer():
    """A new question without one would be asked of the real machine by every test below."""
    asked = {n for n, v in vars(Machine).items() if callable(v) and not n.startswith("_")}
    assert asked == {*HEALTHY, "start_compile"}


def test_healthy_gpu_machine_passes():
    lines = verb.examine(Fake(), plan(config={"device": "cuda", "compile": "blocks"}, num_params=124_000_000))
    assert sick(lines) == []
    assert {line.id for line in lines} == {f"P{i}" for i in range(1, 9)}
    assert verb.exit_code(lines) == 0


def test_healthy_cpu_machine_passes():
    bare = {"gpus": [], "num_nvidia": 0, "has_triton": False, "which": None, "driver_cuda": None}
    slow = {"speeds": {"gemm": 1e11, "copy": 1e10}, "attention_times": {"math": 0.01}}
    facts = {"code_state": {"commit": None}}
    lines = verb.examine(Fake(**{**bare, **slow, **facts, "which": "/usr/bin/git", "call": (0, "")}), plan())
    assert sick(lines) == []


READ_ONLY = OSError(errno.EROFS, "Read-only file system")
CUDA_PRESET = {"device": "cuda"}
COMPILED = {"compile": "blocks"}
AVERAGED = {"config": {"ema": 0.9}, "num_params": 10**9}
NO_GPU = {"gpus": [], "speeds": {"gemm": 1e11}}
DIRTY = {"commit": "1a2b3c4d5e6f", "dirty": True, "changed": ["a.py"], "untracked": ["b.py"]}

SICK: list[tuple[str, dict[str, Any], dict[str, Any], str, str, str]] = [
    # what is wrong, answers of the machine, plan, id, status, words that the finding must hold
    ("runs read-only", {"try_folder": READ_ONLY}, {}, "P1", "failure", "Read-only"),
    ("data gone", {"touch_ends": OSError(errno.EIO, "no")}, {"data_files": (Path("x.bin"),)}, "P1", "failure", "x.bin"),
    ("disk full", {"free": (10**8, 10**6)}, {}, "P2", "failure", "--runs"),
    ("disk too small for the preset", {"free": (9 * GB, 10**6)}, {"config": {}, "num_params": 10**9}, "P2", "failure", "keep=1"),
    ("an average needs more", {"free": (75 * GB, 10**6)}, AVERAGED, "P2", "failure", "needed"),
    ("no inodes", {"free": (500 * GB, 3)}, {}, "P2", "failure", "3 more files"),
    ("slow disk", {"write_speed": 5e6}, {}, "P2", "warning", "5 MB/s"),
    ("slow for the preset", {"write_speed": 1e8}, {"config": {}, "num_params": 10**9}, "P2", "warning", "per checkpoint"),
    ("GPU hidden", {**NO_GPU, "env": {"CUDA_VISIBLE_DEVICES": ""}}, {}, "P3", "failure", "CUDA_VISIBLE_DEVICES"),
    ("GPU hidden by -1", {**NO_GPU, "env": {"CUDA_VISIBLE_DEVICES": "-1"}}, {}, "P3", "failure", "unset"),
    ("torch without CUDA", NO_GPU, {}, "P3", "failure", "sees none"),
    ("GPU wanted, none there", {**NO_GPU, "num_nvidia": 0}, {"config": CUDA_PRESET}, "P3", "failure", "device=cpu"),
    ("GPU shared", {"gpus": [{**GPU, "free": 100 * GB}]}, {}, "P3", "warning", "other processes"),
    ("GPU computes wrongly", {"gpu_error": 0.1}, {}, "P3", "failure", "wrong"),
    ("GPU computes NaN", {"gpu_error": float("nan")}, {}, "P3", "failure", "wrong"),
    ("GPU fails", {"gpu_error": RuntimeError("CUDA out of memory\nmore")}, {}, "P3", "failure", "out of memory"),
    ("python too old", {"versions": {**HEALTHY["versions"], "python": "3.10.2"}}, {}, "P4", "failure", "3.11"),
    ("torch too old", {"versions": {**HEALTHY["versions"], "torch": "2.9.1"}}, {}, "P4", "warning", "pip install"),
    ("torch too new", {"versions": {**HEALTHY["versions"], "torch": "2.14.0a0+git"}}, {}, "P4", "warning", "pip install"),
    ("numpy does not fit", {"numpy_bridge": RuntimeError("Numpy is not available")}, {}, "P4", "failure", "together"),
    ("driver too old", {"driver_cuda": (12, 4)}, {}, "P4", "failure", "12.4"),
    ("no compiler, preset compiles", {"compiler": None}, {"config": COMPILED}, "P4", "failure", "compile=off"),
    ("no compiler on a GPU", {"compiler": None}, {}, "P4", "warning", "gcc"),
    ("no compiler on a CPU", {**NO_GPU, "num_nvidia": 0, "compiler": None}, {}, "P4", "note", "gcc"),
    ("compiler broken", {"compile_cpp": "cannot find -lstdc++"}, {"config": COMPILED}, "P4", "failure", "lstdc"),
    ("no Triton", {"has_triton": False}, {"config": COMPILED}, "P4", "failure", "Triton"),
    ("compile fails", {"start_compile": Process(1, "x\nInductor: no")}, {"config": COMPILED}, "P4", "failure", "Inductor:"),
    ("compile hangs", {"start_compile": Process(None)}, {}, "P4", "note", "busy"),
    ("too many threads", {"num_threads": 64}, {}, "P5", "warning", "OMP_NUM_THREADS=8"),
    ("half a core", {"num_cores": 0.5, "num_threads": 2}, {}, "P5", "warning", "OMP_NUM_THREADS=1"),
    ("little memory", {"memory": (5 * 10**8, 8 * GB)}, {}, "P5", "warning", "kill"),
    ("few open files", {"open_files": (256, 4096)}, {}, "P5", "warning", "ulimit -n 4096"),
    ("no shared memory", {"shared_memory": 1 << 20}, {}, "P5", "warning", "--shm-size"),
    ("not UTF-8", {"encodings": {"files": "ascii", "text": "UTF-8"}}, {}, "P5", "warning", "PYTHONUTF8"),
    ("assertions off", {"asserts_are_on": False}, {}, "P5", "warning", "drop -O"),
    ("clock in 1970", {"now": 100.0}, {}, "P5", "warning", "1970"),
    ("disk's clock ahead", {"clock_lead": 30.0}, {}, "P5", "warning", "30 s ahead"),
    ("disk's clock behind", {"clock_lead": -3600.0}, {}, "P5", "warning", "3600 s behind"),
    ("only slow attention", {"attention_times": {"math": 0.1, "flash": None}}, {}, "P6", "warning", "flash refuses"),
    ("slow upload", {"speeds": {**FAST, "upload": 6e9}}, {}, "P6", "warning", "expected 55"),
    ("slow products", {"speeds": {**FAST, "gemm": 400e12}}, {}, "P6", "warning", "808"),
    ("submission refused", {"call": (1, "sbatch: error: invalid account")}, {}, "P7", "warning", "invalid account"),
    ("no signal", {"env": {"SLURM_JOB_ID": "7"}, "call": (0, "JobId=7")}, {}, "P7", "warning", "--signal"),
    ("Slurm is silent", {"env": {"SLURM_JOB_ID": "7"}, "call": (124, "")}, {}, "P7", "note", "scontrol"),
    ("no git", {"which": None}, {}, "P8", "warning", "install git"),
    ("dirty", {"code_state": DIRTY}, {}, "P8", "failure", "a.py, b.py"),
    ("dirty, meant", {"code_state": DIRTY}, {"dirty": True}, "P8", "note", "--dirty was given"),
]  # fmt: skip


@pytest.mark.parametrize(("answers", "needs", "id", "status", "words"), [row[1:] for row in SICK], ids=[row[0] for row in SICK])
def test_machine_problem_is_named(answers: dict[str, Any], needs: dict[str, Any], id: str, status: str, words: str):
    lines = sick(verb.examine(Fake(**answers), plan(**needs)))
    assert {(line.id, shown(line)) for line in lines} == {(id, status)}, lines
    found = lines[0]
    assert words in f"{found.what} {found.why} {found.fix}"
    assert found.why and found.fix, "a finding says why it matters and what to do"
    expected = {"failure": 1, "warning": 3, "note": 0}[status]
    assert verb.exit_code(lines) == expected


@pytest.mark.parametrize("question", sorted({*HEALTHY, "start_compile"}))
def test_probe_that_breaks_does_not_hide_the_others(question: str):
    lines = verb.examine(Fake(**{question: ZeroDivisionError("oops")}), plan(config={}, data_files=(Path("x"),)))
    assert {f"P{i}" for i in (2, 3, 5, 7, 8)} & {line.id for line in lines}
    if question not in ("numpy_bridge", "start_compile"):  # any error of the bridge is its finding
        assert verb.exit_code(lines) == 2
        assert any("oops" in line.what for line in lines)


def test_hanging_compilation_is_ended():
    process = Process(None)
    verb.examine(Fake(start_compile=process), plan())
    assert process.killed


def test_slow_machine_skips_compilation():
    process = Process(None)
    lines = verb.examine(Fake(start_compile=process), plan(started=time.perf_counter() - 60))
    assert not process.killed and sick(lines) == []
    assert any("not tried" in line.what for line in lines)


def test_every_measured_speed_has_its_texts():
    assert {f"P6 {name}" for name, _ in verb.UNITS.values()} <= verb.TEXTS.keys()


def line(id: str, title: str, level: str, what: str, **texts: str) -> Finding:
    return Finding(id, title, *(("pass", "") if level == "ok" else LEVELS[level]), what=what, **texts)


def test_doctor_exit_codes():
    def code(*statuses: str) -> int:
        return verb.exit_code([Finding(status="broken") if s == "broken" else line("P1", "x", s, "seen") for s in statuses])

    assert [code(), code("ok", "note"), code("warning", "note")] == [0, 0, 3]
    assert [code("warning", "failure"), code("failure", "broken")] == [1, 2]


def test_doctor_table_shows_fixes_and_no_colours_in_files():
    lines = [line("P1", "x", "ok", "fine"), line("P2", "y", "failure", "bad\x1b[2J", why="because", fix="do this")]
    text = verb.render(lines, "gpt/demo", 1.0, colour=False)
    assert "\x1b" not in text and "because" in text and "do this" in text and "1 failure" in text
    assert "\x1b[31mfailure" in verb.render(lines, None, 1.0, colour=True)


# ---- the real machine ------------------------------------------------------------------------------------------------


def test_folder_probe_leaves_nothing(tmp_path: Path):
    Machine().try_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / "kept"
    kept.mkdir()
    Machine().try_folder(kept)
    assert list(tmp_path.rglob("*")) == [kept]


@pytest.mark.parametrize("broken", ["fsync", "replace", "open_write"])
def test_disk_that_fails_is_noticed(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, broken, fail)
    with pytest.raises(OSError, match="Input/output"):
        Machine().try_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rename_that_is_not_atomic_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "replace", lambda source, target: None)
    with pytest.raises(OSError, match="not atomic"):
        Machine().try_folder(tmp_path)


def test_ends_of_a_file_are_read(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.touch()
    Machine().touch_ends(empty)
    with pytest.raises(FileNotFoundError):
        Machine().touch_ends(tmp_path / "none")


def test_compiler_that_fails_is_quoted(tmp_path: Path):
    fake = tmp_path / "cxx"
    fake.write_text("#!/bin/sh\necho no headers >&2; exit 3\n")
    fake.chmod(0o755)
    assert Machine().compile_cpp(str(fake)) == "no headers"


def test_external_calls_have_a_timeout():
    machine = Machine()
    assert machine.call(["sleep", "9"], 0.1)[0] == 124
    assert machine.call(["no-such-program"], 1.0)[0] == 127


def test_doctor_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Everything but the slow compilation, on the machine the tests run on; JSON and exit code agree, nothing stays behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Machine, "start_compile", lambda self, device: None)
    status = verb.doctor(None, [], runs=Path("runs"), as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["exit"] == status != 2, shown
    assert {line["id"] for line in shown["findings"]} == {f"P{i}" for i in range(1, 9)}
    assert list(tmp_path.iterdir()) == []
    assert shown["seconds"] < 20


def test_preset_that_cannot_start_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from seedbed import Config, UserError\n"
        "def only() -> Config:\n    return Config(model=None, data=None)\n"
        "def open_data(config):\n    raise UserError('the corpus is gone')\n"
    )
    _, trouble = verb.make_plan(str(recipe), [], tmp_path / "runs", False)
    assert [(shown(line), line.what) for line in trouble] == [("failure", "the corpus is gone")]


def test_preset_plan_has_its_needs(tmp_path: Path):
    toy = Path(__file__).parents[1] / "toy_recipe.py"
    found, trouble = verb.make_plan(str(toy), ["keep=7", "ema=0.9"], tmp_path, False)
    assert trouble == []
    assert (found.num_params, found.checkpoint_bytes) == (97, 97 * 16)
    assert found.config is not None and found.config.keep == 7


def test_preset_that_does_not_exist_is_a_short_error(capsys: pytest.CaptureFixture[str]):
    from seedbed.cli import main

    assert main(["doctor", "gpt/nonesuch"]) == 2
    assert "nonesuch" in capsys.readouterr().err
