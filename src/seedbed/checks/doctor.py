"""`seedbed doctor`: can this machine train, and if not, what has to change? One line per answer, within ten seconds."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seedbed.checks import doctor_probes as probes
from seedbed.checks.doctor_machine import Machine
from seedbed.checks.doctor_probes import Line, Plan
from seedbed.data.prepare import cache_folder
from seedbed.errors import UserError
from seedbed.track.text import clip, one_line, width

EXIT_OK, EXIT_FAILURE, EXIT_BROKEN, EXIT_WARNING = 0, 1, 2, 3
_COLOURS = {"ok": "32", "note": "36", "warning": "33", "failure": "31", "broken": "35"}


def doctor(name: str | None, assignments: list[str], *, runs: Path, as_json: bool = False, dirty: bool = False) -> int:
    """Examine the machine, for a preset if one is named; prints the findings and returns the exit code."""
    machine = Machine()
    plan, trouble = make_plan(name, assignments, runs, dirty)
    lines = [*trouble, *examine(machine, plan)]
    seconds = time.perf_counter() - plan.started
    if as_json:
        facts = {"preset": name, "exit": exit_code(lines), "seconds": round(seconds, 2), "lines": [asdict(x) for x in lines]}
        print(json.dumps(facts, indent=1))
    else:
        print(render(lines, name, seconds, sys.stdout.isatty()))
    return exit_code(lines)


def make_plan(name: str | None, assignments: list[str], runs: Path, dirty: bool) -> tuple[Plan, list[Line]]:
    """What a run of that preset would need; data or a model that cannot be opened are findings, not the end."""
    started = time.perf_counter()
    if name is None:
        return Plan(runs, cache_folder(""), dirty, started=started), []
    from seedbed import config as configs
    from seedbed.recipes import find

    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), assignments)
    cache = cache_folder(getattr(config.data, "cache", ""))
    num_params, data_files, trouble = 0, (), []
    try:
        data = recipe.open_data(config)
        data_files = _files_of(data)
        num_params = sum(p.numel() for p in recipe.build(config, data).parameters())
    except UserError as problem:
        why, fix = "the run could not start", f"try: seedbed train {name}, or: seedbed data --help"
        trouble.append(Line("P1", "preset", "failure", one_line(str(problem)), why, fix))
    return Plan(runs, cache, dirty, config, num_params, data_files, started), trouble


def _files_of(data: Any) -> tuple[Path, ...]:
    """The files behind the memory-mapped arrays of both splits."""
    arrays = [array for source in (data.train, data.valid) for array in source.arrays.values()]
    return tuple(dict.fromkeys(Path(a.filename) for a in arrays if getattr(a, "filename", None)))


def examine(machine: Machine, plan: Plan) -> list[Line]:
    """All probes in order. A probe that breaks is a finding of its own and does not hide the others."""
    lines = _guarded("speed", lambda: list(probes.speed(machine, plan)))  # before the compiler makes the machine busy
    hurry = time.perf_counter() - plan.started > probes.COMPILE_START
    process = None if hurry else _try(lambda: machine.start_compile("cuda" if machine.gpus() else "cpu"))
    try:
        for probe in probes.PROBES:
            lines += _guarded(probe.__name__, lambda probe=probe: list(probe(machine, plan)))
        lines += _guarded("compiling", lambda: list(probes.compiling(machine, plan, process)))
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.communicate()
    return sorted(lines, key=lambda line: line.id)


def _guarded(name: str, work: Any) -> list[Line]:
    try:
        return work()
    except Exception as error:
        seen = one_line(f"{type(error).__name__}: {error}")
        return [Line("P0", name, "broken", seen, "this probe could not finish: a fault of the doctor", "please report this line")]


def _try(work: Any) -> Any:
    try:
        return work()
    except Exception:
        return None


def exit_code(lines: list[Line]) -> int:
    """2 when the doctor itself broke, 1 for a failure, 3 for warnings only, 0 when nothing is above a note."""
    found = {line.status for line in lines}
    for status, code in (("broken", EXIT_BROKEN), ("failure", EXIT_FAILURE), ("warning", EXIT_WARNING)):
        if status in found:
            return code
    return EXIT_OK


def render(lines: list[Line], name: str | None, seconds: float, colour: bool) -> str:
    """A table a person reads from top to bottom; whatever is not well has its reason and its cure below it."""
    out = [f"doctor: this machine{f' for {name}' if name else ''}", ""]
    for line in lines:
        mark = f"{line.status:<8}"
        mark = f"\033[{_COLOURS[line.status]}m{mark}\033[0m" if colour else mark
        head = f"  {mark} {line.id} {line.name:<16} {one_line(line.seen)}"
        out.append(head if line.status != "ok" else clip(head, width() + (9 if colour else 0)))
        if line.status != "ok":
            out += [f"  {'':<12}why  {line.why}"] * bool(line.why) + [f"  {'':<12}fix  {line.fix}"] * bool(line.fix)
    counts = [(sum(x.status == s for x in lines), s) for s in ("failure", "warning", "note", "broken")]
    words = [f"{n} {'broken probe' if s == 'broken' else s}{'s' * (n > 1)}" for n, s in counts if n]
    out += ["", f"{', '.join(words) if words else 'all well'} ({seconds:.1f} s)"]
    return "\n".join(out)
