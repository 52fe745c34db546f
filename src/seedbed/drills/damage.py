"""Drills in which files are damaged, or somebody else, the clock or the user meddles with a run."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from seedbed.drills import faults
from seedbed.drills.lab import EVERY, Failed, Lab, Tally, last_line, line_with, training
from seedbed.track.run import Run
from seedbed.train import checkpoint

STOP = 3 * EVERY + 2


def _truncate(path: Path) -> None:
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size // 2)


def _flip(path: Path) -> None:
    flip_bit(path / "optim.safetensors", random.Random(0))


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
    "bit-flipped": _flip,
    "zero-filled": _zero,
    "edited": _rewrite_state,
    "file-deleted": lambda path: (path / "optim.safetensors").unlink(),
    "manifest-deleted": lambda path: (path / "manifest.json").unlink(),
    "manifest-damaged": lambda path: (path / "manifest.json").write_bytes(b"\x80\x04 not json"),
    "emptied": _empty,
}


def flip_bit(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    place = dice.randrange(len(data) * 8)
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def checkpoints(lab: Lab, tally: Tally) -> None:
    """The newest checkpoint is damaged in eight ways; then single bits of it at random; then all checkpoints."""
    lab.train("straight")
    lab.train("stopped", fault=faults.at_step(STOP, faults.send(signal.SIGTERM)), code=143)
    newest, before = (p.name for p in reversed(checkpoint.steps_in(lab.checkpoints("stopped"))[-2:]))
    for name, damage in DAMAGES.items():
        shutil.copytree(lab.run_folder("stopped"), lab.run_folder(name), symlinks=True)
        damage(lab.checkpoints(name) / newest)
        said = lab.resume(name)
        tally.saw(line_with(said, "checkpoint damaged, falling back"))
        line_with(said, f"resumed at step {int(before.removeprefix('step-'))} of")
        lab.same_end("straight", name)
    _random_flips(lab, tally, newest)
    _all_damaged(lab, tally)
    tally.exact = "yes"


def _random_flips(lab: Lab, tally: Tally, newest: str) -> None:
    """Any single bit, in any file: never loaded."""
    path, dice = lab.checkpoints("stopped") / newest, random.Random(2)
    files = sorted(p for p in path.iterdir() if p.name != "manifest.json")
    for _ in range(20 if lab.short else 200):
        file = dice.choice(files)
        good = file.read_bytes()
        flip_bit(file, dice)
        tally.injected += 1
        try:
            checkpoint.load(path)
        except checkpoint.Damaged:
            tally.detected += 1
        file.write_bytes(good)
    checkpoint.load(path)


def _all_damaged(lab: Lab, tally: Tally) -> None:
    for path in checkpoint.steps_in(lab.checkpoints("stopped")):
        _truncate(path)
    tally.saw(_short(lab, line_with(lab.resume("stopped", code=2), "every checkpoint")))


def _short(lab: Lab, line: str) -> str:
    return line.replace(str(lab.folder) + "/", "").removeprefix("seedbed: ")


def data(lab: Lab, tally: Tally) -> None:
    """A bit of the data flips on the disk, between two runs and while a run is interrupted: named before it is used."""
    cache = f"data.cache={lab.folder / 'cache'}"
    lab.train("straight", cache)
    lab.train("stopped", cache, fault=faults.at_step(STOP, faults.send(signal.SIGTERM)), code=143)
    (tokens,) = (lab.folder / "cache").rglob("tokens.bin")
    good, dice = tokens.read_bytes(), random.Random(3)
    for k in range(2 if lab.short else 8):
        flip_bit(tokens, dice)
        said = lab.resume("stopped", code=2) if k % 2 else lab.train(f"new-{k}", cache, code=2)
        tally.saw(_short(lab, line_with(said, "differs from its checksum")))
        if lab.run_folder(f"new-{k}").exists():
            raise Failed("a run folder was left behind")
        tokens.write_bytes(good)
    os.truncate(tokens, len(good) - 1)
    tally.saw(_short(lab, line_with(lab.resume("stopped", code=2), "instead of")))
    tokens.write_bytes(good)
    lab.resume("stopped")
    lab.same_end("straight", "stopped")
    tally.exact = "yes"


def two_processes(lab: Lab, tally: Tally) -> None:
    """A second process wants the same run: refused with the holder's pid and host; a lock whose holder was killed is no lock."""
    lab.train("straight")
    holder = lab.start(*training("one"), fault=faults.at_step(STOP, faults.hang))
    rows = lab.run_folder("one") / "rows.jsonl"
    lab.until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= STOP - 2, holder, "to train")
    for words in (["resume", "one"], training("one")):
        said = lab.run(*words, code=2)
        told = last_line(said).removeprefix("seedbed: ").replace(str(holder.pid), "PID").replace(os.uname().nodename, "HOST")
        tally.saw(re.sub(r"since \S+;", "since TIME;", told))
    line_with(lab.run("resume", "one", code=2), f"in use by process {holder.pid} on {os.uname().nodename}")
    holder.signal(signal.SIGKILL)
    lab.wait(holder)
    tally.injected += 1
    if Run.open(lab.root, "one").is_running():
        raise Failed("the lock of a dead process is still held")
    tally.detected += 1
    lab.resume("one")
    lab.same_end("straight", "one")
    tally.exact = "yes"


def clock(lab: Lab, tally: Tally) -> None:
    """The clock jumps back and forth by years during a run, and folders of runs that died long ago, or tomorrow, lie about."""
    lab.train("straight")
    for name, jump in (("back", -4e8), ("ahead", 4e8)):
        said = lab.train(name, fault=lambda by=jump: _move_clock(by))
        rates = [row.get("items_per_s") or 0.0 for row in Run.open(lab.root, name).rows()]
        if min(rates) < 0 or "Traceback" in said:
            raise Failed("a rate became negative when the clock jumped")
        lab.same_end("straight", name)
        tally.saw("steps are timed by a clock that does not jump")
    lab.train("one", fault=faults.at_step(STOP, faults.send(signal.SIGTERM)), code=143)
    for folder, age in ((lab.root / ".new-1-1.tmp", 1e9), (lab.checkpoints("one") / ".aside-step-000032", -1e6)):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half of it")
        os.utime(folder, (time.time() - age, time.time() - age))
        tally.injected += 1
    lab.resume("one")
    lab.train("two")
    left = [p.name for p in (*lab.root.glob(".new-*"), *lab.checkpoints("one").glob(".aside-*"))]
    if left:
        raise Failed(f"left behind: {', '.join(left)}")
    tally.detected += 2
    tally.said.append("stale folders are removed")
    lab.same_end("straight", "one")
    tally.exact = "yes"


def _move_clock(by: float) -> None:
    real = time.time

    def move(_job: object) -> None:
        time.time = lambda: real() + by

    faults.at_step(EVERY + 1, move)()


def config(lab: Lab, tally: Tally) -> None:
    """Another config on resume: what may change is printed and done, what may not is refused by name, and nothing is touched."""
    lab.train("straight")
    lab.train("one", fault=faults.at_step(STOP, faults.send(signal.SIGTERM)), code=143)
    before = (lab.run_folder("one") / "config.json").read_bytes()
    for word in ("model.width=64", "optim.lr=0.5", "seed=9", "data.block=32"):
        said = lab.resume("one", word, code=2)
        tally.saw(line_with(said, "cannot change on resume").removeprefix("seedbed: ").replace("one", "RUN"))
    tally.saw(line_with(lab.resume("one", "stpes=3", code=2), "unknown key").removeprefix("seedbed: "))
    if (lab.run_folder("one") / "config.json").read_bytes() != before:
        raise Failed("a refused change was written down")
    said = lab.resume("one", "keep=2", "every.save=5")
    tally.saw(line_with(said, "changed on resume: keep"))
    a, b = lab.newest("straight"), lab.newest("one")
    wrong = [n for f in a.tensors for n in a.tensors[f] if not a.tensors[f][n].equal(b.tensors[f][n])]
    if wrong or lab.rows("straight") != lab.rows("one"):
        raise Failed(f"changing keep and every.save changed the training: {wrong[:1]}")
    tally.exact = "yes"
