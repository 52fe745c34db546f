"""Drills in which the process, the disk or the power goes away."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from seedbed.drills import faults
from seedbed.drills.lab import EVERY, STEPS, Child, Failed, Lab, Tally, line_with, training
from seedbed.drills.power import lose_power, record_until
from seedbed.track import files
from seedbed.train import checkpoint, loop


def kill_save(lab: Lab, tally: Tally) -> None:
    """SIGKILL at random bytes of a save, and before its syncs and renames; then the run is killed too, and resumed."""
    lab.train("straight")
    report = lab.folder / "kills.jsonl"
    num = 16 if lab.short else 120
    child = lab.start(*training("killed"), fault=lambda: _fork_at_save(2 * EVERY, num, report))
    if lab.wait(child) != -signal.SIGKILL:
        raise Failed(f"the run outlived its kill: {child.said()[-200:]}")
    found = [json.loads(line) for line in report.read_text().splitlines()]
    for one in found:
        tally.injected += 1
        tally.detected += one["killed"]
        tally.steps_lost += max(0, EVERY - one["step"])
        if one["problem"]:
            raise Failed(f"killed at {one['where']}: {one['problem']}")
    if len(found) != num:
        raise Failed(f"only {len(found)} of {num} kills were told of")
    lab.resume("killed")
    lab.same_end("straight", "killed")
    tally.said.append("the checkpoint before, whole; nothing needs telling")
    tally.exact = "yes"


def _fork_at_save(step: int, num: int, report: Path) -> None:
    """In the run: when it is about to save at `step`, let `num` copies of it be killed in that save, then be killed as well."""
    real = loop.save

    def save(job: loop.Job) -> None:
        if job.step != step:
            return real(job)
        num_bytes, num_calls = _measure(job, real, report.with_suffix(".size"))
        dice = random.Random(0)
        for k in range(num):
            at = ("call", dice.randrange(num_calls)) if k % 6 == 5 else ("byte", dice.randrange(num_bytes))
            files.append_line(report, json.dumps(_kill_one(job, real, at)))
        faults.Trap(at_byte=num_bytes // 2)
        _save_and_wait(job, real)

    loop.save = save


def _measure(job: loop.Job, save: Any, note: Path) -> tuple[int, int]:
    """How many bytes and calls a save takes, by a copy of the process that lives through it."""

    def work() -> None:
        meter = faults.Meter()
        _save_and_wait(job, save)
        note.write_text(f"{meter.num_bytes} {meter.num_calls}")

    _in_copy(work)
    checkpoint.remove(job.run.path / "checkpoints" / checkpoint.folder_name(job.step))
    num_bytes, num_calls = note.read_text().split()
    return int(num_bytes), int(num_calls)


def _kill_one(job: loop.Job, save: Any, at: tuple[str, int]) -> dict[str, Any]:
    kind, where = at

    def work() -> None:
        faults.Trap(**{f"at_{kind}": where})
        _save_and_wait(job, save)

    code = _in_copy(work)
    problems: list[str] = []
    saved = checkpoint.load_newest(job.run.path / "checkpoints", warn=problems.append)
    step = saved.step if saved else 0
    if step == job.step:
        checkpoint.remove(job.run.path / "checkpoints" / checkpoint.folder_name(step))
    return {
        "where": f"{kind} {where}",
        "killed": code == -signal.SIGKILL,
        "step": step,
        "problem": "; ".join(problems),
    }


def _save_and_wait(job: loop.Job, save: Any) -> None:
    save(job)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()


def _in_copy(work: Any) -> int:
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_run(lab: Lab, tally: Tally) -> None:
    """SIGKILL at random moments of a whole run, some of them while it is still starting; resumed after each."""
    num = 5 if lab.short else 20
    settings = (f"steps={80 * num}", "every.save=10", "every.eval=50")
    straight = lab.start(*training("straight", *settings))
    dice, words, kept = random.Random(0), training("killed", *settings), 0
    for k in range(num):
        child = _kill_somewhere(lab, words, dice, fresh=k % 5 == 4)
        if lab.wait(child) != -signal.SIGKILL:
            raise Failed(f"the run ended before kill {k + 1} of {num}: {child.said()[-200:]}")
        tally.injected += 1
        tally.detected += 1
        if lab.run_folder("killed").exists():
            if "resumed at step" in child.said():
                lab.require_resumed("killed", kept)
            words, kept = ["resume", "killed"], lab.kept("killed")
    said = lab.resume("killed")
    tally.said.append(line_with(said, "resumed at step"))
    if lab.wait(straight):
        raise Failed("the run that was left alone did not end well")
    lab.same_end("straight", "killed")
    tally.exact = "yes"


def _kill_somewhere(lab: Lab, words: list[str], dice: random.Random, fresh: bool) -> Child:
    """Start the run and kill it some steps later, or while it loads, starts or resumes."""
    rows = lab.run_folder("killed") / "rows.jsonl"
    if fresh:
        child = lab.start_fresh(*words)
        time.sleep(dice.uniform(0.0, 3.0))
    else:
        # Resuming takes back the rows after a checkpoint, so that this many lines are new steps for the most part.
        wanted = (rows.read_bytes().count(b"\n") if rows.exists() else 0) + dice.randint(1, 40)
        child = lab.start(*words)
        lab.until(lambda: child.poll() is not None or _has_lines(rows, wanted), child, "to train")
        time.sleep(dice.uniform(0.0, 0.02))
    child.signal(signal.SIGKILL)
    return child


def _has_lines(path: Path, num: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= num


def signals(lab: Lab, tally: Tally) -> None:
    """SIGTERM, SIGINT and SIGUSR1, each in the middle of a run: saved at the end of that very step, and resumed."""
    lab.train("straight")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        name, step = number.name.lower(), 2 * EVERY + 3
        said = lab.train(name, fault=faults.at_step(step, faults.send(number)), code=128 + number)
        tally.saw(line_with(said, "go on with: seedbed resume").replace(name, "RUN"))
        tally.steps_lost += step - lab.newest(name).step
        lab.resume(name)
        lab.same_end("straight", name)
    tally.exact = "yes"


def disk_full(lab: Lab, tally: Tally) -> None:
    """No space left: during a save, while rows and events are logged, for status and journal, and for all of it at once."""
    lab.train("straight")
    window = {"from_step": EVERY + 2, "to_step": 2 * EVERY + 2}
    cases = {
        "save": (("/checkpoints/",), "no checkpoint could be written"),
        "logging": (("rows.jsonl", "events.jsonl", "console.log"), "cannot be written"),
        "status": (("status.json", "ring.json"), "cannot be written"),
        "all": (("/runs/", "JOURNAL"), "No space left on device"),
    }
    for name, (paths, words) in cases.items():
        said = lab.train(name, fault=faults.disk_full(*paths, **window))
        tally.saw(_without_paths(line_with(said, words), lab))
        lab.same_end("straight", name)
    said = lab.train("journal", fault=faults.disk_full("JOURNAL", "report.md", "loss.png"))
    tally.saw(_without_paths(line_with(said, "could not be written"), lab))
    lab.same_end("straight", "journal")
    said = lab.train("last", fault=faults.disk_full(f"step-{STEPS:06d}"), code=2)
    tally.saw(line_with(said, "free some space"))
    lab.resume("last")
    lab.same_end("straight", "last")
    tally.exact = "yes"


def _without_paths(line: str, lab: Lab) -> str:
    return line.replace(str(lab.folder) + "/", "").removeprefix("seedbed: warning: ").removeprefix("warning: ")


def power_loss(lab: Lab, tally: Tally) -> None:
    """The power goes at a random call of the write layer: what was not synced is cut, zeroed or gone, renames are undone."""
    lab.train("straight")
    num = 6 if lab.short else 40
    dice = random.Random(1)
    for k in range(num):
        name, note = f"dark-{k}", lab.folder / f"record-{k}.json"
        calls = dice.randrange(4, 170)
        child = lab.start(*training(name), fault=lambda note=note, calls=calls: record_until(calls, note))
        if lab.wait(child) not in (-signal.SIGKILL, 0):
            raise Failed(f"the run ended by itself: {child.said()[-200:]}")
        if not note.exists():
            continue  # the run had fewer calls than that
        kept = _promised(note)
        lose_power(note, dice)
        _resume_or_restart(lab, name, tally, kept)
    tally.said.append("resumed at the newest checkpoint whose name was synced")
    tally.exact = "yes"


def _promised(note: Path) -> int:
    """The newest step whose checkpoint was whole and had its name on the disk when the power went."""
    steps = [Path(p).name for p in json.loads(note.read_text())["durable"] if Path(p).name.startswith("step-")]
    return max((int(s.removeprefix("step-")) for s in steps), default=0)


def _resume_or_restart(lab: Lab, name: str, tally: Tally, kept: int) -> None:
    tally.injected += 1
    if not (lab.run_folder(name) / "config.json").exists():
        tally.detected += 1
        return  # the power went before the run had its folder: there is nothing to go on with
    child: Child = lab.start("resume", name)
    if lab.wait(child):
        raise Failed(f"{name} could not be resumed: {child.said()[-300:]}")
    tally.detected += 1
    resumed = lab.events(name, "resume")
    tally.steps_lost += max(0, kept - (resumed[-1]["step"] if resumed else 0))
    lab.same_end("straight", name)
