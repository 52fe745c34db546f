"""`seedbed doctor`: tests whether this machine can train. One line per probe, within ten seconds.

Each of the probes P1 to P8 compares an answer of the machine with what the run needs.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from seedbed.cache import cache_folder
from seedbed.checks.doctor_machine import Machine
from seedbed.config import Config
from seedbed.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, EXIT_WARNING, UserError
from seedbed.report.findings import Finding
from seedbed.track.text import clip, one_line, scaled, size, width

Level = Literal["ok", "note", "warning", "failure"]
LEVELS: dict[Level, Any] = {"ok": ("pass", ""), "note": ("fail", "note"), "warning": ("fail", "warn"), "failure": ("fail", "err")}

# A checkpoint is written while `keep` others and the best one still exist.
SPARE_CHECKPOINTS, SPARE = 2, 1.2
LOG_BYTES, MIN_FREE, MIN_INODES = 100e6, 1e9, 1000
SLOW_SAVE = 60.0  # seconds for one checkpoint
SLOW_DISK = 20e6  # bytes per second, synced; laptops and network disks here measured 150e6 and more
FOREIGN_SHARE = 0.1
GPU_ERROR = 1e-4  # float32, TF32 off; measured 1e-6 on an H200
MIN_OPEN_FILES, MIN_SHARED, MIN_MEMORY = 1024, 64 << 20, 1 << 30
CLOCK_LEAD, OLDEST_NOW = 5.0, 1767225600.0  # 2026-01-01: the package is younger
TORCH_RANGE, PYTHON_MIN = ((2, 11), (2, 14)), (3, 11)
# bf16 FLOP/s, bytes per second of memory traffic and of a pinned upload, measured.
REFERENCE = {"NVIDIA H200": {"gemm": 808e12, "copy": 4.27e12, "upload": 55e9}}
SLOW_SHARE = 0.7
UNITS = {"gemm": ("matrix products", "FLOP/s"), "copy": ("memory copy", "B/s"), "upload": ("pinned upload", "B/s")}
# Seconds after which a compilation is neither begun nor waited for.
COMPILE_START, COMPILE_SECONDS = 4.0, 7.0
# The word and the colour of a finding.
_SHOWN = {"pass": ("ok", "32"), "note": ("note", "36"), "warn": ("warning", "33"), "err": ("failure", "31")}
_SHOWN["broken"] = ("broken", "35")


@dataclass(frozen=True)
class Plan:
    """What a run needs: its folders and, for a preset, the size of its checkpoints and its data files."""

    runs: Path
    cache: Path
    dirty: bool = False
    config: Config | None = None
    num_params: int = 0
    data_files: tuple[Path, ...] = ()
    started: float = field(default_factory=time.perf_counter)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and two moments in float32, and the EMA where there is one."""
        return self.num_params * (16 if self.config and self.config.ema else 12)


def doctor(name: str | None, assignments: list[str], *, runs: Path, as_json: bool = False, dirty: bool = False) -> int:
    """Examines the machine, optionally for a preset; prints the findings and returns the exit code."""
    plan, problems = make_plan(name, assignments, runs, dirty)
    findings = [*problems, *examine(Machine(), plan)]
    seconds = time.perf_counter() - plan.started
    if as_json:
        facts = {"preset": name, "exit": exit_code(findings), "seconds": round(seconds, 2)}
        print(json.dumps({**facts, "findings": [asdict(x) for x in findings]}, indent=1))
    else:
        print(render(findings, name, seconds, sys.stdout.isatty()))
    return exit_code(findings)


def make_plan(name: str | None, assignments: list[str], runs: Path, dirty: bool) -> tuple[Plan, list[Finding]]:
    """What a run of the preset needs; data or a model that cannot be opened become findings."""
    started = time.perf_counter()
    if name is None:
        return Plan(runs, cache_folder(""), dirty, started=started), []
    from seedbed import config as configs
    from seedbed.recipes import find

    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), assignments)
    cache = cache_folder(getattr(config.data, "cache", ""))
    num_params, data_files, problems = 0, (), []
    try:
        data = recipe.open_data(config)
        arrays = [array for source in (data.train, data.valid) for array in source.arrays.values()]
        mapped = [name for array in arrays if (name := getattr(array, "filename", None))]
        data_files = tuple(dict.fromkeys(map(Path, mapped)))
        num_params = sum(p.numel() for p in recipe.build(config, data).parameters())
    except UserError as problem:
        why, fix = "the run could not start", f"try: seedbed train {name}, or: seedbed data --help"
        problems.append(line("P1", "preset", "failure", one_line(str(problem)), why, fix))
    return Plan(runs, cache, dirty, config, num_params, data_files, started), problems


def examine(machine: Machine, plan: Plan) -> list[Finding]:
    """Runs all probes in order. A probe that raises becomes a finding of its own."""
    lines = _guarded(speed, machine, plan)  # before compilation loads the machine
    hurry = time.perf_counter() - plan.started > COMPILE_START
    process = None
    with contextlib.suppress(Exception):
        process = None if hurry else machine.start_compile("cuda" if machine.gpus() else "cpu")
    try:
        for probe in (paths, disk, gpu, versions, limits, clock, launcher, source):
            lines += _guarded(probe, machine, plan)
        lines += _guarded(compiling, machine, plan, process)
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.communicate()
    return sorted(lines, key=lambda line: line.id)


def _guarded(probe: Callable[..., Iterator[Finding]], *given: Any) -> list[Finding]:
    try:
        return list(probe(*given))
    except Exception as error:
        what, why = one_line(f"{type(error).__name__}: {error}"), "this probe could not finish: a fault of the doctor"
        return [Finding("P0", probe.__name__, "broken", "err", what=what, why=why, fix="please report this line")]


def exit_code(findings: list[Finding]) -> int:
    """2 when a probe broke, 1 for a failure, 3 for warnings only, 0 otherwise."""
    found = {_kind(finding) for finding in findings}
    codes = {"broken": EXIT_USER, "err": EXIT_FAILED, "warn": EXIT_WARNING}
    return next((code for kind, code in codes.items() if kind in found), EXIT_OK)


def _kind(finding: Finding) -> str:
    return finding.severity if finding.status == "fail" else finding.status


def render(findings: list[Finding], name: str | None, seconds: float, colour: bool) -> str:
    """The findings as a table; everything that is not ok is followed by its reason and its fix."""
    out = [f"doctor: this machine{f' for {name}' if name else ''}", ""]
    for finding in findings:
        word, code = _SHOWN[_kind(finding)]
        mark = f"\033[{code}m{word:<8}\033[0m" if colour else f"{word:<8}"
        head = f"  {mark} {finding.id} {finding.title:<16} {one_line(finding.what)}"
        if finding.status == "pass":
            out.append(clip(head, width() + (9 if colour else 0)))
        else:
            reasons = [f"  {'':<12}{part}  {text}" for part, text in (("why", finding.why), ("fix", finding.fix)) if text]
            out += [head, *reasons]
    counts = [(sum(_kind(x) == kind for x in findings), _SHOWN[kind][0]) for kind in ("err", "warn", "note", "broken")]
    words = [f"{n} {'broken probe' if s == 'broken' else s}{'s' * (n > 1)}" for n, s in counts if n]
    out += ["", f"{', '.join(words) if words else 'all ok'} ({seconds:.1f} s)"]
    return "\n".join(out)


# ---- probes ----------------------------------------------------------------------------------------------------------


def line(id: str, title: str, level: Level, what: str, why: str = "", fix: str = "") -> Finding:
    """The finding of a probe."""
    status, severity = LEVELS[level]
    return Finding(id, title, status, severity, what=what, why=why, fix=fix)


def judged(id: str, title: str, level: Level, bad: bool, what: str, why: str, fix: str) -> Finding:
    """The finding of a probe: `level` where it is `bad`, else ok."""
    return line(id, title, level, what, why, fix) if bad else line(id, title, "ok", what)


def paths(machine: Machine, plan: Plan) -> Iterator[Finding]:
    for title, folder, option in (("runs", plan.runs, "--runs DIR"), ("cache", plan.cache, "data.cache=DIR or SEEDBED_CACHE")):
        try:
            machine.try_folder(folder)
        except OSError as error:
            seen = f"{folder}: {error.strerror or error}"
            why = "checkpoints would be lost" if title == "runs" else "prepared data could not be kept"
            yield line("P1", f"{title} folder", "failure", seen, why, f"make it writable, or choose another with {option}")
        else:
            yield line("P1", f"{title} folder", "ok", f"{folder}: create, sync, rename and delete work")
    for path in plan.data_files:
        try:
            machine.touch_ends(path)
        except OSError as error:
            seen = f"{path}: {error.strerror or error}"
            yield line("P1", "data file", "failure", seen, "training would stop at its first batch", "prepare the data again")


def disk(machine: Machine, plan: Plan) -> Iterator[Finding]:
    (free, inodes), needed = machine.free(plan.runs), MIN_FREE
    seen, why = f"{size(free)} free for {plan.runs}", "a run would soon be unable to save"
    fix = "free some space, or choose another disk with --runs DIR"
    if plan.config is not None:
        keep = plan.config.keep
        needed = (keep + SPARE_CHECKPOINTS) * plan.checkpoint_bytes * SPARE + LOG_BYTES
        seen = f"{size(free)} free, {size(needed)} needed to keep {keep} checkpoints of {size(plan.checkpoint_bytes)}"
        why, fix = "the run would die while saving", f"{fix}, or keep={max(1, keep // 2)}"
    yield judged("P2", "disk space", "failure", free < needed, seen, why, fix)
    if 0 <= inodes < MIN_INODES:
        seen = f"{inodes} more files may be created"
        yield line("P2", "inodes", "failure", seen, "no file can be created although there is space", "delete small files")
    speed = machine.write_speed(plan.runs)
    seconds = plan.checkpoint_bytes / speed
    seen = f"{size(speed)}/s written and synced" + (f", {seconds:.1f} s per checkpoint" if plan.config else "")
    why, fix = "training stops while a checkpoint is written", "a local disk with --runs DIR, or a larger every.save"
    yield judged("P2", "disk speed", "warning", speed < SLOW_DISK or seconds > SLOW_SAVE, seen, why, fix)


def gpu(machine: Machine, plan: Plan) -> Iterator[Finding]:
    found, present = machine.gpus(), machine.num_nvidia()
    if not found:
        yield _no_gpu(machine, plan, present)
        return
    for index, facts in enumerate(found):
        taken = facts["total"] - facts["free"] - facts["own"]
        seen = f"{facts['name']}, {size(facts['free'])} of {size(facts['total'])} free"
        why = f"{size(taken)} are used by other processes: less memory, and shared compute"
        fix = "nvidia-smi shows whose they are; end them or use another GPU"
        yield judged("P3", f"GPU {index}", "warning", taken > FOREIGN_SHARE * facts["total"], seen, why, fix)
    yield _gpu_arithmetic(machine)


def _no_gpu(machine: Machine, plan: Plan, present: int) -> Finding:
    hidden = machine.env.get("CUDA_VISIBLE_DEVICES")
    if present:
        if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
            seen, fix = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES, or device=cpu"
        else:
            seen = f"torch {machine.versions()['torch']} sees none"
            fix = "install a torch build with CUDA that fits the driver, or device=cpu"
        return line("P3", "GPU", "failure", f"{present} in the machine, {seen}", "the CPU would be used silently", fix)
    if plan.config is not None and plan.config.device == "cuda":
        return line("P3", "GPU", "failure", "none, and the preset says device=cuda", "the run cannot start", "device=cpu")
    return line("P3", "GPU", "ok", "none; runs use the CPU")


def _gpu_arithmetic(machine: Machine) -> Finding:
    try:
        error = machine.gpu_error(0)
    except RuntimeError as problem:
        seen = f"64 MiB and one product failed: {str(problem).splitlines()[0]}"
        why, fix = "training would fail the same way", "check nvidia-smi, driver and other users"
        return line("P3", "GPU works", "failure", seen, why, fix)
    seen = f"product and gradient within {error:.0e} of the CPU's (limit {GPU_ERROR:.0e})"
    why, fix = "what it computes is wrong", "another GPU or driver; report the device"
    return judged("P3", "GPU works", "failure", not error <= GPU_ERROR, seen, why, fix)  # a NaN must not pass


def versions(machine: Machine, plan: Plan) -> Iterator[Finding]:
    found = machine.versions()
    seen = ", ".join(f"{name} {value}" for name, value in found.items() if value)
    low, high = TORCH_RANGE
    if _numbers(found["python"]) < PYTHON_MIN:
        why = "the package needs Python 3.11"
        yield line("P4", "versions", "failure", seen, why, "make a virtual environment with a newer Python")
    elif not low <= _numbers(found["torch"])[:2] < high:
        why = f"tested with torch {low[0]}.{low[1]} up to, not with, {high[0]}.{high[1]}"
        yield line("P4", "versions", "warning", seen, why, f"pip install 'torch>={low[0]}.{low[1]},<{high[0]}.{high[1]}'")
    else:
        yield line("P4", "versions", "ok", seen)
    try:
        machine.numpy_bridge()
    except Exception as error:
        why = "torch and numpy were built for different interfaces: no data can be read"
        yield line("P4", "numpy", "failure", str(error).splitlines()[0], why, "pip install -U numpy torch, together")
    driver = machine.driver_cuda() if found["cuda"] else None
    if driver and driver < _numbers(found["cuda"])[:2] and driver[0] < _numbers(found["cuda"])[0]:
        seen = f"torch is built for CUDA {found['cuda']}, the driver serves {driver[0]}.{driver[1]}"
        fix = "update the driver, or install torch for that CUDA version"
        yield line("P4", "driver", "failure", seen, "kernels will not load", fix)


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0a0+cpu gives (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])))


def compiling(machine: Machine, plan: Plan, process: Any = None) -> Iterator[Finding]:
    """A C++ compiler or Triton must exist; the compilation started earlier is awaited within a limit."""
    on_gpu = bool(machine.gpus())
    is_used = plan.config is not None and plan.config.compile != "off"
    bad: Level = "failure" if is_used else "warning" if on_gpu else "note"
    fix = "compile=off" if is_used else "needed for compile=blocks only"
    compiler, why = machine.compiler(), "torch.compile cannot work"
    if on_gpu and not machine.has_triton():
        yield line("P4", "compile", bad, "Triton is missing", f"{why} on a GPU", f"pip install triton, or {fix}")
    elif compiler is None:
        yield line("P4", "compile", bad, "no C++ compiler", why, f"install gcc (g++), or {fix}")
    elif output := machine.compile_cpp(compiler):
        yield line("P4", "compile", bad, f"{compiler}: {output}", why, f"repair the compiler, or {fix}")
    elif process is None:
        yield line("P4", "compile", "ok", "the compiler works; torch.compile was not tried, since time was short")
    else:
        yield _await_compile(process, plan, bad, fix)


def _await_compile(process: Any, plan: Plan, bad: Level, fix: str) -> Finding:
    left = max(0.1, COMPILE_SECONDS - (time.perf_counter() - plan.started))
    try:
        _, output = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        seen = f"the compiler works; torch.compile was still busy after {time.perf_counter() - plan.started:.0f} s"
        return line("P4", "compile", "note", seen, "not judged: the first compilation on a machine is slow", "run doctor again")
    if process.returncode:
        seen = (output.strip().splitlines() or [f"status {process.returncode}"])[-1][:160]
        return line("P4", "compile", bad, f"a small function does not compile: {seen}", "torch.compile cannot work", fix)
    return line("P4", "compile", "ok", "torch.compile works")


def limits(machine: Machine, plan: Plan) -> Iterator[Finding]:
    cores, threads = machine.num_cores(), machine.num_threads()
    seen = f"{threads} threads, {cores:g} cores"
    why, fix = "threads that fight for cores made runs 10 to 40 times slower here", f"OMP_NUM_THREADS={max(1, int(cores))}"
    yield judged("P5", "threads", "warning", threads > max(cores, 1), seen, why, fix)
    available, total = machine.memory()
    seen = f"{size(available)} of {size(total)} available"
    needed = max(MIN_MEMORY, 2 * plan.checkpoint_bytes)
    why = f"model, optimizer and a checkpoint being written need about {size(needed)}: the system may kill the run"
    yield judged("P5", "memory", "warning", available < needed, seen, why, "end other programs, or a smaller model")
    soft, hard = machine.open_files()
    seen = "no limit" if soft < 0 else f"at most {soft:,}"
    why = "many data files or workers would fail with 'too many open files'"
    fix = f"ulimit -n {hard if hard > soft else MIN_OPEN_FILES}"
    yield judged("P5", "open files", "warning", 0 <= soft < MIN_OPEN_FILES, seen, why, fix)
    shared = machine.shared_memory()
    if shared is not None:
        why = "seedbed's feed uses threads and needs none; loaders with worker processes would fail"
        fix = "docker run --shm-size=8g, or --ipc=host"
        yield judged("P5", "shared memory", "warning", shared < MIN_SHARED, f"{size(shared)} free", why, fix)
    wrong = {k: v for k, v in machine.encodings().items() if v.lower().replace("-", "") not in ("utf8", "cp65001")}
    seen = ", ".join(f"{name}: {value}" for name, value in wrong.items()) or "files, texts and terminal"
    why, fix = "texts and samples would be damaged or refused", "export PYTHONUTF8=1 LC_ALL=C.UTF-8"
    yield judged("P5", "UTF-8", "warning", bool(wrong), seen, why, fix)
    off, why = not machine.asserts_are_on(), "shape assertions are disabled"
    yield judged("P5", "assertions", "warning", off, "off (-O)" if off else "on", why, "drop -O, unset PYTHONOPTIMIZE")


def clock(machine: Machine, plan: Plan) -> Iterator[Finding]:
    now, lead = machine.now(), machine.clock_lead(plan.runs)
    if now < OLDEST_NOW:
        seen = time.strftime("it says %Y-%m-%d", time.gmtime(now))
        why, fix = "runs would be dated and sorted wrongly", "set the clock, or start the time service"
        yield line("P5", "clock", "warning", seen, why, fix)
    elif abs(lead) > CLOCK_LEAD:
        seen = f"the disk's server is {abs(lead):.0f} s {'ahead' if lead > 0 else 'behind'}"
        why = "newest and stale files are determined by file times"
        yield line("P5", "clock", "warning", seen, why, "synchronise the clocks (chrony, ntp) of both machines")
    else:
        yield line("P5", "clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)) + ", the disk agrees")


def speed(machine: Machine, plan: Plan) -> Iterator[Finding]:
    facts = machine.gpus()
    device = "cuda:0" if facts else "cpu"
    times = machine.attention_times(device)
    works = {name: t for name, t in times.items() if t is not None}
    refused = [name for name, t in times.items() if t is None]
    ranked = sorted(works, key=lambda name: works[name])
    seen = ", ".join(f"{name} {works[name] * 1e3:.2f} ms" for name in ranked) + "".join(f", {n} refuses" for n in refused)
    slow, why = set(works) <= {"math"} and bool(facts), "only the slow kernel works: attention will take several times as long"
    yield judged("P6", "attention", "warning", slow, seen, why, "a torch build with flash attention for this GPU")
    measured = machine.speeds(device)
    table = next((values for name, values in REFERENCE.items() if facts and name in facts[0]["name"]), {})
    for key, value in measured.items():
        name, unit = UNITS[key]
        expected = table.get(key)
        seen = _rate(value, unit) + (f", expected {_rate(expected, unit)}" if expected else "")
        why = "the GPU runs below its own speed: heat, power limit, another tenant or a narrow slot"
        slow = value < SLOW_SHARE * (expected or 0.0)
        yield judged("P6", name, "warning", slow, seen, why, "nvidia-smi -q -d PERFORMANCE,CLOCK names the cause")


def _rate(value: float, unit: str) -> str:
    digits = scaled(value)
    return f"{digits[:-1]} {digits[-1]}{unit}" if digits[-1].isalpha() else f"{digits} {unit}"


def launcher(machine: Machine, plan: Plan) -> Iterator[Finding]:
    if job := machine.env.get("SLURM_JOB_ID"):
        yield _slurm_job(machine, job)
    elif machine.which("sbatch"):
        status, output = machine.call(["sbatch", "--test-only", "--time=1", "--wrap=true"], 3.0)
        error = (output.strip().splitlines() or [f"status {status}"])[-1][:160]
        seen = f"a test submission failed: {error}" if status else "a test submission is accepted"
        yield judged("P7", "Slurm", "warning", bool(status), seen, "jobs would be refused", "name account and partition")
    else:
        yield line("P7", "Slurm", "ok", "not here; runs start on this machine")


def _slurm_job(machine: Machine, job: str) -> Finding:
    status, output = machine.call(["scontrol", "show", "job", job], 3.0)
    fix = "#SBATCH --signal=TERM@120"
    if status:
        why = "whether the job is warned before its end is unknown"
        return line("P7", "Slurm", "note", f"inside job {job}; scontrol does not answer", why, fix)
    silent = "Signal=" not in output
    why = "a job that is ended at its time limit without a warning loses the steps since its last checkpoint"
    seen = f"inside job {job}, {'no' if silent else 'with a'} signal before the end"
    return judged("P7", "Slurm", "warning", silent, seen, why, fix)


def source(machine: Machine, plan: Plan) -> Iterator[Finding]:
    if machine.which("git") is None:
        why = "the state of your code cannot be stored with a run"
        yield line("P8", "git", "warning", "git is not installed", why, "install git")
        return
    facts = machine.code_state(Path.cwd(), plan.runs)
    if "dirty" not in facts:
        yield line("P8", "git", "ok", "not in a git work tree; runs keep a copy of a recipe file of your own")
        return
    commit = (facts["commit"] or "no commit yet")[:10]
    changed = [*facts["changed"], *facts["untracked"]]
    names = ", ".join(changed[:3]) + " …" * (len(changed) > 3)
    seen = f"{len(changed)} changed or new since {commit}: {names}" if changed else f"clean at {commit}"
    why, fix = "train would refuse: such a result cannot be rebuilt", "commit them, or train with --dirty"
    if plan.dirty:
        why, fix = "a patch is saved with every run", "nothing to do: --dirty was given"
    yield judged("P8", "git", "note" if plan.dirty else "failure", bool(changed), seen, why, fix)
