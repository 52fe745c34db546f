"""Drills in which the process, the disk or the power fails."""

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed.drills import faults
from seedbed.drills.faults import OpenFiles, die
from seedbed.drills.sandbox import EVERY, STEPS, Child, DrillResult, Failed, Sandbox, line_with, training
from seedbed.track import files
from seedbed.train import checkpoint, checkpoint_loading, loop, saving


def kill_save(sandbox: Sandbox, result: DrillResult) -> None:
    """SIGKILL at random bytes of a save, and before its syncs and renames; then the run is killed too, and resumed."""
    sandbox.train("straight")
    report = sandbox.folder / "kills.jsonl"
    num = 16 if sandbox.short else 120
    sandbox.train("killed", fault=_fork_at_save(2 * EVERY, num, report), code=-signal.SIGKILL)
    found = [json.loads(line) for line in report.read_text().splitlines()]
    for one in found:
        result.injected += 1
        result.detected += one["killed"]
        result.steps_lost += max(0, EVERY - one["step"])
        if one["problem"]:
            raise Failed(f"killed at {one['where']}: {one['problem']}")
    if len(found) != num:
        raise Failed(f"only {len(found)} of {num} kills were reported")
    sandbox.resume("killed", same_as="straight")
    result.messages.append("the previous checkpoint, intact; no message needed")


@faults.fault
def _fork_at_save(step: int, num: int, report: Path) -> None:
    """In the run: before the save at `step`, forks `num` copies that are killed during that save, then kills the run."""

    @faults.wrap(saving, "save")
    def save(real: Any, job: loop.Job, **how: bool) -> None:
        if how or job.step != step:
            return real(job, **how)
        size = report.with_suffix(".size")
        _save_in_copy(job, real, size)
        checkpoint.remove(job.run.path / "checkpoints" / checkpoint.folder_name(step))
        num_bytes, num_calls = map(int, size.read_text().split())
        rng = random.Random(0)
        for k in range(num):
            at = ("call", rng.randrange(num_calls)) if k % 6 == 5 else ("byte", rng.randrange(num_bytes))
            with report.open("a") as lines:
                lines.write(json.dumps(_kill_one(job, real, size, at)) + "\n")
        faults.WriteCounter(at_byte=num_bytes // 2)
        _save_and_wait(job, real)


def _kill_one(job: loop.Job, save: Any, size: Path, at: tuple[str, int]) -> dict[str, Any]:
    kind, where = at
    code = _save_in_copy(job, save, size, **{f"at_{kind}": where})
    problems: list[str] = []
    saved = checkpoint_loading.load_newest(job.run.path / "checkpoints", warn=problems.append)
    step = saved.step if saved else 0
    if step == job.step:
        checkpoint.remove(job.run.path / "checkpoints" / checkpoint.folder_name(step))
    killed = code == -signal.SIGKILL
    return {"where": f"{kind} {where}", "killed": killed, "step": step, "problem": "; ".join(problems)}


def _save_and_wait(job: loop.Job, save: Any) -> None:
    save(job)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()


def _save_in_copy(job: loop.Job, save: Any, size: Path, **at: int) -> int:
    """The exit code of a forked copy that saves; if it is not killed at a byte or call, it writes down how many there were."""
    pid = os.fork()
    if not pid:
        try:
            meter = faults.WriteCounter(**at)
            _save_and_wait(job, save)
            size.write_text(f"{meter.num_bytes} {meter.num_calls}")
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_run(sandbox: Sandbox, result: DrillResult) -> None:
    """SIGKILL at random moments of a whole run, some of them during start-up; resumed after each."""
    num = 5 if sandbox.short else 20
    settings = (f"steps={80 * num}", "every.save=10", "every.eval=50")
    straight = sandbox.start(*training("straight", *settings))
    rng, words, kept = random.Random(0), training("killed", *settings), 0
    for k in range(num):
        child = _kill_somewhere(sandbox, words, rng, fresh=k % 5 == 4)
        if sandbox.wait(child) != -signal.SIGKILL:
            raise Failed(f"the run ended before kill {k + 1} of {num}: {child.output()[-200:]}")
        result.add()
        if sandbox.run_folder("killed").exists():
            if "resumed at step" in child.output():
                sandbox.require_resumed("killed", kept)
            words, kept = ["resume", "killed"], sandbox.kept("killed")
    result.messages.append(line_with(sandbox.resume("killed"), "resumed at step"))
    if sandbox.wait(straight):
        raise Failed("the run that was left alone did not end well")
    sandbox.require_same_end("straight", "killed")


def _kill_somewhere(sandbox: Sandbox, words: list[str], rng: random.Random, fresh: bool) -> Child:
    """Starts the run and kills it some steps later, or while it loads, starts or resumes."""
    if fresh:
        child = sandbox.start_fresh(*words)
        time.sleep(rng.uniform(0.0, 3.0))
    else:
        # Resuming removes the rows after a checkpoint, so most of these lines are new steps.
        wanted = sandbox.num_rows("killed") + rng.randint(1, 40)
        child = sandbox.start(*words)
        sandbox.wait_until(lambda: child.poll() is not None or sandbox.num_rows("killed") >= wanted, child, "to train")
        time.sleep(rng.uniform(0.0, 0.02))
    child.signal(signal.SIGKILL)
    return child


def signals(sandbox: Sandbox, result: DrillResult) -> None:
    """SIGTERM, SIGINT and SIGUSR1, each in the middle of a run: saved at the end of that step, and resumed."""
    sandbox.train("straight")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        interrupt(sandbox, result, number.name.lower(), 2 * EVERY + 3, number)


def interrupt(sandbox: Sandbox, result: DrillResult, name: str, step: int, number: signal.Signals) -> None:
    """A run gets a signal at this step, saves and ends there, and is resumed."""
    output = sandbox.train(name, fault=faults.at_step(step, faults.send(number)), code=128 + number)
    result.add(line_with(output, "continue with: seedbed resume").replace(name, "RUN"))
    result.steps_lost += step - sandbox.newest(name).step
    sandbox.resume(name, same_as="straight")


def disk_full(sandbox: Sandbox, result: DrillResult) -> None:
    """No space left: during a save, while rows and events are logged, for status and journal, and for all at once."""
    sandbox.train("straight")
    window = {"from_step": EVERY + 2, "to_step": 2 * EVERY + 2}
    cases = {
        "save": (("/checkpoints/",), "no checkpoint could be written"),
        "logging": (("rows.jsonl", "events.jsonl", "console.log"), "cannot be written"),
        "status": (("status.json", "step_history.json"), "cannot be written"),
        "all": (("/runs/", "JOURNAL"), "No space left on device"),
    }
    for name, (paths, words) in cases.items():
        output = sandbox.train(name, fault=faults.disk_full(*paths, **window))
        result.add(sandbox.plain(line_with(output, words)))
        sandbox.require_same_end("straight", name)
    output = sandbox.train("journal", fault=faults.disk_full("JOURNAL", "report.md", "loss.png"))
    result.add(sandbox.plain(line_with(output, "could not be written")))
    sandbox.require_same_end("straight", "journal")
    output = sandbox.train("last", fault=faults.disk_full(checkpoint.folder_name(STEPS)), code=2)
    result.add(line_with(output, "free some space"))
    sandbox.resume("last", same_as="straight")


def power_loss(sandbox: Sandbox, result: DrillResult) -> None:
    """A power cut at a random call of the write layer: unsynced data is truncated, zeroed or lost, renames are undone."""
    sandbox.train("straight")
    num = 6 if sandbox.short else 40
    rng = random.Random(1)
    for k in range(num):
        name, note = f"dark-{k}", sandbox.folder / f"record-{k}.json"
        calls = rng.randrange(4, 170)
        child = sandbox.start(*training(name), fault=lambda note=note, calls=calls: Recorder(calls, note))
        if sandbox.wait(child) not in (-signal.SIGKILL, 0):
            raise Failed(f"the run ended by itself: {child.output()[-200:]}")
        if not note.exists():
            continue  # the run had fewer calls than that
        kept = max((checkpoint.step_of(Path(p).name) or 0 for p in json.loads(note.read_text())["durable"]), default=0)
        lose_power(note, rng)
        result.add()
        if not (sandbox.run_folder(name) / "config.json").exists():
            continue  # the power failed before the run had its folder: there is nothing to resume
        sandbox.run("resume", name)
        resumed = sandbox.events(name, "resume")
        result.steps_lost += max(0, kept - (resumed[-1]["step"] if resumed else 0))
        sandbox.require_same_end("straight", name)
    result.messages.append("resumed at the newest checkpoint whose name was synced")


class Recorder:
    """In the run: tracks what is durable after each call of the write layer, and cuts the power at call number `calls`.

    Synced bytes stay; later ones are truncated, zeroed or kept at random. A new file or a rename without a sync of its folder
    is undone or kept.
    """

    def __init__(self, calls: int, note: Path) -> None:
        self.left, self.note = calls, note
        self.open_files = OpenFiles()
        self.synced: dict[str, int] = {}  # bytes of a file that are on the disk
        self.renames: list[dict[str, str]] = []  # those whose folder has not been synced since
        self.durable: list[str] = []
        for name in ("write", "fsync", "replace", "sync_folder"):
            faults.wrap(files, name)(getattr(self, name))

    def _tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            new = sorted(self.open_files.new)
            facts = {"synced": self.synced, "new": new, "renames": self.renames, "durable": self.durable}
            self.note.write_text(json.dumps(facts))
            die()

    def write(self, real: Callable[[int, bytes], None], fd: int, data: bytes) -> None:
        self._tick()
        real(fd, data)
        path = self.open_files.paths[fd]
        self.synced.setdefault(str(path), 0 if str(path) in self.open_files.new else os.fstat(fd).st_size - len(data))

    def fsync(self, real: Callable[[int], None], fd: int) -> None:
        self._tick()
        real(fd)
        if fd in self.open_files.paths:
            self.synced[str(self.open_files.paths[fd])] = os.fstat(fd).st_size

    def replace(self, real: Callable[[Path, Path], None], source: Path, target: Path) -> None:
        self._tick()
        old = self._keep(target)
        real(source, target)
        self._move(str(source), str(target))
        self.renames.append({"source": str(source), "target": str(target), "old": old})

    def _keep(self, target: Path) -> str:
        """Saves the content that a rename is about to replace."""
        if not target.is_file() or target.is_symlink():
            return ""
        kept = self.note.with_name(f"{self.note.stem}-old-{len(list(self.note.parent.glob('*-old-*')))}")
        os.link(target, kept)
        return str(kept)

    def _move(self, source: str, target: str) -> None:
        for path in [p for p in self.synced if p == source or p.startswith(f"{source}/")]:
            moved = target + path.removeprefix(source)
            self.synced[moved] = self.synced.pop(path)
            if path in self.open_files.new:
                self.open_files.new.discard(path)
                # Renamed over another file: only the rename can be undone.
                self.open_files.new |= {moved} if path != source else set()

    def sync_folder(self, real: Callable[[Path], None], path: Path) -> None:
        self._tick()
        real(path)
        self.open_files.new = {p for p in self.open_files.new if Path(p).parent != Path(path)}
        done = [r for r in self.renames if Path(r["target"]).parent == Path(path)]
        self.durable += [r["target"] for r in done]
        self.renames = [r for r in self.renames if r not in done]


def lose_power(note: Path, rng: random.Random) -> None:
    record: dict[str, Any] = json.loads(note.read_text())
    for path, size in record["synced"].items():
        _lose_bytes(Path(path), size, rng)
    for path in record["new"]:
        if rng.random() < 0.5:
            Path(path).unlink(missing_ok=True)
    for rename in reversed(record["renames"]):
        if rng.random() < 0.5:
            _undo(rename)


def _lose_bytes(path: Path, synced: int, rng: random.Random) -> None:
    if not path.is_file() or path.stat().st_size <= synced:
        return
    size, kind = path.stat().st_size, rng.choice(("cut", "zero", "part"))
    with path.open("r+b") as file:
        if kind == "zero":
            file.seek(synced)
            file.write(b"\0" * (size - synced))
        else:
            file.truncate(synced if kind == "cut" else rng.randint(synced, size))


def _undo(rename: dict[str, str]) -> None:
    source, target = Path(rename["source"]), Path(rename["target"])
    if not os.path.lexists(target):
        return
    if os.path.lexists(source):
        shutil.rmtree(source) if source.is_dir() and not source.is_symlink() else source.unlink()
    os.replace(target, source)
    if rename["old"]:
        os.link(rename["old"], target)
