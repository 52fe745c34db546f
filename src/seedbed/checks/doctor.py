"""`seedbed doctor`: tests whether this machine can train. One line per probe, within ten seconds.

Each of the probes P1 to P8 compares an answer of the machine with what the run needs.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seedbed.cache import cache_folder
from seedbed.checks.doctor_machine import Machine
from seedbed.config import Config
from seedbed.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, EXIT_WARNING, UserError
from seedbed.report.findings import Finding
from seedbed.track.text import clip, one_line, scaled, size, width

# What is said where a probe is not ok, and what its levels are in a Finding.
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
LEVELS: dict[str, Any] = {"note": ("fail", "note"), "warning": ("fail", "warn"), "failure": ("fail", "err")}

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
        problems.append(judged("P1 preset", True, one_line(str(problem)), name=name))
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


def judged(name: str, bad: bool, what: str, /, **values: Any) -> Finding:
    """The finding of a probe: ok, or where it is `bad` what doctor.toml says under this name, filled with `values`."""
    id, _, title = name.partition(" / ")[0].format(**values).partition(" ")
    if not bad:
        return Finding(id, title, what=what)
    texts = {part: text.format(**values) for part, text in TEXTS[name].items()}
    status, severity = LEVELS[texts.pop("level")]
    return Finding(id, title, status, severity, what=what, **texts)


def paths(machine: Machine, plan: Plan) -> Iterator[Finding]:
    for title, folder in (("runs", plan.runs), ("cache", plan.cache)):
        problem = _problem(machine.try_folder, folder)
        yield judged(f"P1 {title} folder", bool(problem), f"{folder}: {problem or 'create, sync, rename and delete work'}")
    for path in plan.data_files:
        if problem := _problem(machine.touch_ends, path):
            yield judged("P1 data file", True, f"{path}: {problem}")


def _problem(act: Callable[[Path], None], path: Path) -> str:
    try:
        act(path)
    except OSError as error:
        return str(error.strerror or error)
    return ""


def disk(machine: Machine, plan: Plan) -> Iterator[Finding]:
    free, inodes = machine.free(plan.runs)
    if plan.config is None:
        yield judged("P2 disk space", free < MIN_FREE, f"{size(free)} free for {plan.runs}")
    else:
        keep = plan.config.keep
        needed = (keep + SPARE_CHECKPOINTS) * plan.checkpoint_bytes * SPARE + LOG_BYTES
        seen = f"{size(free)} free, {size(needed)} needed to keep {keep} checkpoints of {size(plan.checkpoint_bytes)}"
        yield judged("P2 disk space / for a preset", free < needed, seen, keep=max(1, keep // 2))
    if 0 <= inodes < MIN_INODES:
        yield judged("P2 inodes", True, f"{inodes} more files may be created")
    speed = machine.write_speed(plan.runs)
    seconds = plan.checkpoint_bytes / speed
    seen = f"{size(speed)}/s written and synced" + (f", {seconds:.1f} s per checkpoint" if plan.config else "")
    yield judged("P2 disk speed", speed < SLOW_DISK or seconds > SLOW_SAVE, seen)


def gpu(machine: Machine, plan: Plan) -> Iterator[Finding]:
    found, present = machine.gpus(), machine.num_nvidia()
    if not found:
        yield _no_gpu(machine, plan, present)
        return
    for index, facts in enumerate(found):
        taken = facts["total"] - facts["free"] - facts["own"]
        seen = f"{facts['name']}, {size(facts['free'])} of {size(facts['total'])} free"
        yield judged("P3 GPU {index}", taken > FOREIGN_SHARE * facts["total"], seen, index=index, taken=size(taken))
    try:
        error = machine.gpu_error(0)
    except RuntimeError as problem:
        yield judged("P3 GPU works / not", True, f"64 MiB and one product failed: {str(problem).splitlines()[0]}")
        return
    seen = f"product and gradient within {error:.0e} of the CPU's (limit {GPU_ERROR:.0e})"
    yield judged("P3 GPU works", not error <= GPU_ERROR, seen)  # a NaN must not pass


def _no_gpu(machine: Machine, plan: Plan, present: int) -> Finding:
    hidden = machine.env.get("CUDA_VISIBLE_DEVICES")
    if present and hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return judged("P3 GPU / hidden", True, f"{present} in the machine, CUDA_VISIBLE_DEVICES={hidden!r} hides them")
    if present:
        return judged("P3 GPU / unseen", True, f"{present} in the machine, torch {machine.versions()['torch']} sees none")
    wanted = plan.config is not None and plan.config.device == "cuda"
    return judged("P3 GPU / none", wanted, f"none{', and the preset says device=cuda' if wanted else '; runs use the CPU'}")


def versions(machine: Machine, plan: Plan) -> Iterator[Finding]:
    found = machine.versions()
    seen = ", ".join(f"{name} {value}" for name, value in found.items() if value)
    low, high = TORCH_RANGE
    if _numbers(found["python"]) < PYTHON_MIN:
        yield judged("P4 versions / Python", True, seen)
    else:
        between = {"low": f"{low[0]}.{low[1]}", "high": f"{high[0]}.{high[1]}"}
        yield judged("P4 versions / torch", not low <= _numbers(found["torch"])[:2] < high, seen, **between)
    try:
        machine.numpy_bridge()
    except Exception as error:
        yield judged("P4 numpy", True, str(error).splitlines()[0])
    driver = machine.driver_cuda() if found["cuda"] else None
    if driver and driver < _numbers(found["cuda"])[:2] and driver[0] < _numbers(found["cuda"])[0]:
        yield judged("P4 driver", True, f"torch is built for CUDA {found['cuda']}, the driver serves {driver[0]}.{driver[1]}")


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0a0+cpu gives (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])))


def compiling(machine: Machine, plan: Plan, process: Any = None) -> Iterator[Finding]:
    """A C++ compiler or Triton must exist; the compilation started earlier is awaited within a limit."""
    on_gpu = bool(machine.gpus())
    is_used = plan.config is not None and plan.config.compile != "off"
    given = {"bad": "failure" if is_used else "warning" if on_gpu else "note"}
    given["instead"] = "compile=off" if is_used else "needed for compile=blocks only"
    compiler = machine.compiler()
    if on_gpu and not machine.has_triton():
        yield judged("P4 compile / Triton", True, "Triton is missing", **given)
    elif compiler is None:
        yield judged("P4 compile / no compiler", True, "no C++ compiler", **given)
    elif output := machine.compile_cpp(compiler):
        yield judged("P4 compile / broken", True, f"{compiler}: {output}", **given)
    elif process is None:
        yield judged("P4 compile", False, "the compiler works; torch.compile was not tried, since time was short")
    else:
        yield _await_compile(process, plan, given)


def _await_compile(process: Any, plan: Plan, given: dict[str, str]) -> Finding:
    left = max(0.1, COMPILE_SECONDS - (time.perf_counter() - plan.started))
    try:
        _, output = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        seen = f"the compiler works; torch.compile was still busy after {time.perf_counter() - plan.started:.0f} s"
        return judged("P4 compile / busy", True, seen)
    if not process.returncode:
        return judged("P4 compile", False, "torch.compile works")
    seen = (output.strip().splitlines() or [f"status {process.returncode}"])[-1][:160]
    return judged("P4 compile", True, f"a small function does not compile: {seen}", **given)


def limits(machine: Machine, plan: Plan) -> Iterator[Finding]:
    cores, threads = machine.num_cores(), machine.num_threads()
    seen = f"{threads} threads, {cores:g} cores"
    yield judged("P5 threads", threads > max(cores, 1), seen, cores=max(1, int(cores)))
    available, total = machine.memory()
    needed = max(MIN_MEMORY, 2 * plan.checkpoint_bytes)
    yield judged("P5 memory", available < needed, f"{size(available)} of {size(total)} available", needed=size(needed))
    soft, hard = machine.open_files()
    seen = "no limit" if soft < 0 else f"at most {soft:,}"
    yield judged("P5 open files", 0 <= soft < MIN_OPEN_FILES, seen, most=hard if hard > soft else MIN_OPEN_FILES)
    shared = machine.shared_memory()
    if shared is not None:
        yield judged("P5 shared memory", shared < MIN_SHARED, f"{size(shared)} free")
    wrong = {k: v for k, v in machine.encodings().items() if v.lower().replace("-", "") not in ("utf8", "cp65001")}
    seen = ", ".join(f"{name}: {value}" for name, value in wrong.items()) or "files, texts and terminal"
    yield judged("P5 UTF-8", bool(wrong), seen)
    off = not machine.asserts_are_on()
    yield judged("P5 assertions", off, "off (-O)" if off else "on")


def clock(machine: Machine, plan: Plan) -> Iterator[Finding]:
    now, lead = machine.now(), machine.clock_lead(plan.runs)
    if now < OLDEST_NOW:
        yield judged("P5 clock / wrong", True, time.strftime("it says %Y-%m-%d", time.gmtime(now)))
    elif abs(lead) > CLOCK_LEAD:
        yield judged("P5 clock", True, f"the disk's server is {abs(lead):.0f} s {'ahead' if lead > 0 else 'behind'}")
    else:
        yield judged("P5 clock", False, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)) + ", the disk agrees")


def speed(machine: Machine, plan: Plan) -> Iterator[Finding]:
    facts = machine.gpus()
    device = "cuda:0" if facts else "cpu"
    times = machine.attention_times(device)
    works = {name: t for name, t in times.items() if t is not None}
    refused = [name for name, t in times.items() if t is None]
    ranked = sorted(works, key=lambda name: works[name])
    seen = ", ".join(f"{name} {works[name] * 1e3:.2f} ms" for name in ranked) + "".join(f", {n} refuses" for n in refused)
    yield judged("P6 attention", set(works) <= {"math"} and bool(facts), seen)
    measured = machine.speeds(device)
    table = next((values for name, values in REFERENCE.items() if facts and name in facts[0]["name"]), {})
    for key, value in measured.items():
        name, unit = UNITS[key]
        expected = table.get(key)
        seen = _rate(value, unit) + (f", expected {_rate(expected, unit)}" if expected else "")
        yield judged(f"P6 {name}", value < SLOW_SHARE * (expected or 0.0), seen)


def _rate(value: float, unit: str) -> str:
    digits = scaled(value)
    return f"{digits[:-1]} {digits[-1]}{unit}" if digits[-1].isalpha() else f"{digits} {unit}"


def launcher(machine: Machine, plan: Plan) -> Iterator[Finding]:
    if job := machine.env.get("SLURM_JOB_ID"):
        status, output = machine.call(["scontrol", "show", "job", job], 3.0)
        if status:
            yield judged("P7 Slurm / silent", True, f"inside job {job}; scontrol does not answer")
        else:
            silent = "Signal=" not in output
            seen = f"inside job {job}, {'no' if silent else 'with a'} signal before the end"
            yield judged("P7 Slurm / no signal", silent, seen)
    elif machine.which("sbatch"):
        status, output = machine.call(["sbatch", "--test-only", "--time=1", "--wrap=true"], 3.0)
        error = (output.strip().splitlines() or [f"status {status}"])[-1][:160]
        seen = f"a test submission failed: {error}" if status else "a test submission is accepted"
        yield judged("P7 Slurm", bool(status), seen)
    else:
        yield judged("P7 Slurm", False, "not here; runs start on this machine")


def source(machine: Machine, plan: Plan) -> Iterator[Finding]:
    if machine.which("git") is None:
        yield judged("P8 git / missing", True, "git is not installed")
        return
    facts = machine.code_state(Path.cwd(), plan.runs)
    if "dirty" not in facts:
        yield judged("P8 git", False, "not in a git work tree; runs keep a copy of a recipe file of your own")
        return
    commit = (facts["commit"] or "no commit yet")[:10]
    changed = [*facts["changed"], *facts["untracked"]]
    names = ", ".join(changed[:3]) + " …" * (len(changed) > 3)
    seen = f"{len(changed)} changed or new since {commit}: {names}" if changed else f"clean at {commit}"
    yield judged("P8 git / meant" if plan.dirty else "P8 git", bool(changed), seen)
