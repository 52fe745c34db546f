"""Drills of damaged files, concurrent processes, clock jumps and changed configs."""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from seedbed.drills import faults
from seedbed.drills.sandbox import EVERY, DrillResult, Failed, Sandbox, last_line, line_with, training
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading

STOP = 3 * EVERY + 2


def _truncate(path: Path) -> None:
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size // 2)


def _zero(path: Path) -> None:
    file = path / "ema.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def _rewrite_state(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"items"', '"itemz"'))


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "bit-flipped": lambda path: flip_bit(path / "optim.safetensors", random.Random(0)),
    "zero-filled": _zero,
    "edited": _rewrite_state,
    "file-deleted": lambda path: (path / "optim.safetensors").unlink(),
    "manifest-deleted": lambda path: (path / "manifest.json").unlink(),
    "manifest-damaged": lambda path: (path / "manifest.json").write_bytes(b"\x80\x04 not json"),
    "emptied": _empty,
}


def flip_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data) * 8)
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def flip_bits(files: Iterable[Path], rng: random.Random, result: DrillResult, is_detected: Callable[[], bool]) -> None:
    """Flips one bit of each of these files, one file at a time."""
    for file in files:
        good = file.read_bytes()
        flip_bit(file, rng)
        result.injected += 1
        result.detected += is_detected()
        file.write_bytes(good)


def is_damaged(path: Path) -> bool:
    """Whether a checkpoint is refused as damaged."""
    try:
        checkpoint_loading.load(path)
    except checkpoint_loading.Damaged:
        return True
    return False


def checkpoints(sandbox: Sandbox, result: DrillResult) -> None:
    """The newest checkpoint is damaged in eight ways; then single bits of it at random; then all checkpoints."""
    sandbox.train("straight")
    sandbox.train("stopped", fault=faults.at_step(STOP, faults.send(signal.SIGTERM)), code=143)
    newest, before = (p.name for p in reversed(checkpoint.steps_in(sandbox.checkpoints("stopped"))[-2:]))
    for name, damage in DAMAGES.items():
        shutil.copytree(sandbox.run_folder("stopped"), sandbox.run_folder(name), symlinks=True)
        damage(sandbox.checkpoints(name) / newest)
        output = sandbox.resume(name)
        result.add(line_with(output, "checkpoint damaged, falling back"))
        line_with(output, f"resumed at step {checkpoint.step_of(before)} of")
        sandbox.require_same_end("straight", name)
    path, rng = sandbox.checkpoints("stopped") / newest, random.Random(2)
    files = sorted(p for p in path.iterdir() if p.name != "manifest.json")
    flipped = (rng.choice(files) for _ in range(20 if sandbox.short else 200))
    flip_bits(flipped, rng, result, lambda: is_damaged(path))
    checkpoint_loading.load(path)
    for path in checkpoint.steps_in(sandbox.checkpoints("stopped")):
        _truncate(path)
    result.add(sandbox.plain(line_with(sandbox.resume("stopped", code=2), "every checkpoint")))


def data(sandbox: Sandbox, result: DrillResult) -> None:
    """A bit of the data flips on disk, between two runs and while a run is interrupted: reported before it is used."""
    cache = f"data.cache={sandbox.folder / 'cache'}"
    sandbox.train("straight", cache)
    sandbox.train("stopped", cache, fault=faults.at_step(STOP, faults.send(signal.SIGTERM)), code=143)
    (tokens,) = (sandbox.folder / "cache").rglob("tokens.bin")
    good, rng = tokens.read_bytes(), random.Random(3)
    for k in range(2 if sandbox.short else 8):
        flip_bit(tokens, rng)
        output = sandbox.resume("stopped", code=2) if k % 2 else sandbox.train(f"new-{k}", cache, code=2)
        result.add(sandbox.plain(line_with(output, "differs from its checksum")))
        if sandbox.run_folder(f"new-{k}").exists():
            raise Failed("a run folder was left behind")
        tokens.write_bytes(good)
    os.truncate(tokens, len(good) - 1)
    result.add(sandbox.plain(line_with(sandbox.resume("stopped", code=2), "instead of")))
    tokens.write_bytes(good)
    sandbox.resume("stopped", same_as="straight")


def two_processes(sandbox: Sandbox, result: DrillResult) -> None:
    """A second process opens the same run: refused with the holder's pid and host; a dead holder's lock is ignored."""
    sandbox.train("straight")
    holder = sandbox.start(*training("one"), fault=faults.at_step(STOP, faults.hang))
    sandbox.wait_until(lambda: sandbox.num_rows("one") >= STOP - 2, holder, "to train")
    for words in (["resume", "one"], training("one")):
        output = sandbox.run(*words, code=2)
        message = last_line(output).removeprefix("seedbed: ").replace(str(holder.pid), "PID").replace(os.uname().nodename, "HOST")
        result.add(re.sub(r"since \S+;", "since TIME;", message))
    line_with(sandbox.run("resume", "one", code=2), f"in use by process {holder.pid} on {os.uname().nodename}")
    holder.signal(signal.SIGKILL)
    sandbox.wait(holder)
    result.injected += 1
    if Run.open(sandbox.root, "one").is_running():
        raise Failed("the lock of a dead process is still taken")
    result.detected += 1
    sandbox.resume("one", same_as="straight")


def clock(sandbox: Sandbox, result: DrillResult) -> None:
    """The clock jumps by years in both directions during a run, and stale folders of past or future runs exist."""
    sandbox.train("straight")
    for name, jump in (("back", -4e8), ("ahead", 4e8)):
        output = sandbox.train(name, fault=lambda by=jump: _move_clock(by))
        rates = [row.get("items_per_s") or 0.0 for row in Run.open(sandbox.root, name).rows()]
        if min(rates) < 0 or "Traceback" in output:
            raise Failed("a rate became negative when the clock jumped")
        sandbox.require_same_end("straight", name)
        result.add("steps are timed by a clock that does not jump")
    sandbox.train("one", fault=faults.at_step(STOP, faults.send(signal.SIGTERM)), code=143)
    for folder, age in ((sandbox.root / ".new-1-1.tmp", 1e9), (sandbox.checkpoints("one") / ".aside-step-000032", -1e6)):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half of it")
        os.utime(folder, (time.time() - age, time.time() - age))
        result.injected += 1
    sandbox.resume("one")
    sandbox.train("two")
    left = [p.name for p in (*sandbox.root.glob(".new-*"), *sandbox.checkpoints("one").glob(".aside-*"))]
    if left:
        raise Failed(f"left behind: {', '.join(left)}")
    result.detected += 2
    result.messages.append("stale folders are removed")
    sandbox.require_same_end("straight", "one")


def _move_clock(by: float) -> None:
    real = time.time

    def move(_job: object) -> None:
        time.time = lambda: real() + by

    faults.at_step(EVERY + 1, move)()


def config(sandbox: Sandbox, result: DrillResult) -> None:
    """Another config on resume: allowed changes are printed and applied, others are refused by name."""
    sandbox.train("straight")
    sandbox.train("one", fault=faults.at_step(STOP, faults.send(signal.SIGTERM)), code=143)
    before = (sandbox.run_folder("one") / "config.json").read_bytes()
    for word in ("model.width=64", "optim.lr=0.5", "seed=9", "data.block=32"):
        output = sandbox.resume("one", word, code=2)
        result.add(line_with(output, "cannot change on resume").removeprefix("seedbed: ").replace("one", "RUN"))
    result.add(line_with(sandbox.resume("one", "stpes=3", code=2), "unknown key").removeprefix("seedbed: "))
    if (sandbox.run_folder("one") / "config.json").read_bytes() != before:
        raise Failed("a refused change was written down")
    output = sandbox.resume("one", "keep=2", "every.save=5")
    result.add(line_with(output, "changed on resume: keep"))
    a, b = sandbox.newest("straight"), sandbox.newest("one")
    wrong = [n for f in a.tensors for n in a.tensors[f] if not a.tensors[f][n].equal(b.tensors[f][n])]
    if wrong or sandbox.rows("straight") != sandbox.rows("one"):
        raise Failed(f"changing keep and every.save changed the training: {wrong[:1]}")
