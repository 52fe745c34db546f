"""`seedbed doctor`: tests whether this machine can train. One line per probe, within ten seconds."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seedbed.cache import cache_folder
from seedbed.checks import doctor_probes as probes
from seedbed.checks.doctor_machine import Machine
from seedbed.checks.doctor_probes import Plan
from seedbed.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, EXIT_WARNING, UserError
from seedbed.report.findings import Finding
from seedbed.track.text import clip, one_line, width

# The word and the colour of a finding.
_SHOWN = {"pass": ("ok", "32"), "note": ("note", "36"), "warn": ("warning", "33"), "err": ("failure", "31")}
_SHOWN["broken"] = ("broken", "35")


def doctor(name: str | None, assignments: list[str], *, runs: Path, as_json: bool = False, dirty: bool = False) -> int:
    """Examines the machine, optionally for a preset; prints the findings and returns the exit code."""
    machine = Machine()
    plan, problems = make_plan(name, assignments, runs, dirty)
    findings = [*problems, *examine(machine, plan)]
    seconds = time.perf_counter() - plan.started
    if as_json:
        facts = {
            "preset": name,
            "exit": exit_code(findings),
            "seconds": round(seconds, 2),
            "findings": [asdict(x) for x in findings],
        }
        print(json.dumps(facts, indent=1))
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
        problems.append(probes.line("P1", "preset", "failure", one_line(str(problem)), why, fix))
    return Plan(runs, cache, dirty, config, num_params, data_files, started), problems


def examine(machine: Machine, plan: Plan) -> list[Finding]:
    """Runs all probes in order. A probe that raises becomes a finding of its own."""
    lines = _guarded("speed", lambda: list(probes.speed(machine, plan)))  # before compilation loads the machine
    hurry = time.perf_counter() - plan.started > probes.COMPILE_START
    process = None
    with contextlib.suppress(Exception):
        process = None if hurry else machine.start_compile("cuda" if machine.gpus() else "cpu")
    try:
        for probe in probes.PROBES:
            lines += _guarded(probe.__name__, lambda probe=probe: list(probe(machine, plan)))
        lines += _guarded("compiling", lambda: list(probes.compiling(machine, plan, process)))
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.communicate()
    return sorted(lines, key=lambda line: line.id)


def _guarded(name: str, work: Any) -> list[Finding]:
    try:
        return work()
    except Exception as error:
        what, why = one_line(f"{type(error).__name__}: {error}"), "this probe could not finish: a fault of the doctor"
        return [Finding("P0", name, "broken", "err", what=what, why=why, fix="please report this line")]


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
