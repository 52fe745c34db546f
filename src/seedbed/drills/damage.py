"""Drills of damaged files, concurrent processes, clock jumps, changed configs, moved folders and very large step numbers."""

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from seedbed.config import Config
from seedbed.drills import faults
from seedbed.drills.sandbox import EVERY, STEPS, DrillResult, Failed, Sandbox, last_line, line_with, require_close, training
from seedbed.errors import EXIT_USER, UserError
from seedbed.launch.resume import saved_config
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading

STOP = 3 * EVERY + 2

# Where checkpoint names become longer, and how many steps before it a run starts.
EDGES, BEFORE = (10**6, 10**9), EVERY + EVERY // 2


def _truncate(path: Path) -> None:
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size // 2)


def _rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "bit-flipped": lambda path: flip_bit(path / "optim.safetensors", random.Random(0)),
    "zero-filled": lambda path: _rewrite(path / "ema.safetensors", lambda data: data[: len(data) // 2].ljust(len(data), b"\0")),
    "edited": lambda path: _rewrite(path / "state.json", lambda data: data.replace(b'"items"', b'"itemz"')),
    "file-deleted": lambda path: (path / "optim.safetensors").unlink(),
    "manifest-deleted": lambda path: (path / "manifest.json").unlink(),
    "manifest-damaged": lambda path: (path / "manifest.json").write_bytes(b"\x80\x04 not json"),
    "emptied": lambda path: (shutil.rmtree(path), path.mkdir()),
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
    if Run.open(sandbox.root, "one").is_running():
        raise Failed("the lock of a dead process is still taken")
    result.add()
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
    sandbox.require_same_end("straight", "one")


def million_steps(sandbox: Sandbox, result: DrillResult) -> None:
    """A run passes step 1,000,000 and step 1,000,000,000 and is killed around both: it resumes at its newest checkpoint."""
    sandbox.train("near", f"steps={EVERY}")
    for edge in EDGES[:1] if sandbox.short else EDGES:
        straight = _put_before(sandbox, edge, f"straight-{edge}")
        sandbox.resume(straight, f"steps={edge + STEPS}")
        kills = (edge, edge + EVERY + 3) if sandbox.short else (edge - 1, edge, edge + 1, edge + EVERY + 3, edge + 3 * EVERY + 1)
        for at in kills:
            name = _put_before(sandbox, edge, f"killed-{at}")
            kill = faults.at_step(at, faults.send(signal.SIGKILL))
            sandbox.run("resume", name, f"steps={edge + STEPS}", fault=kill, code=-signal.SIGKILL)
            saved = max(edge - BEFORE, (at - 1) // EVERY * EVERY)
            output = sandbox.resume(name)
            result.steps_lost += max(0, saved - sandbox.events(name, "resume")[-1]["step"])
            result.add(line_with(output, "resumed at step"))
            sandbox.require_same_end(straight, name)


def _put_before(sandbox: Sandbox, edge: int, name: str) -> str:
    """A copy of the run `near` as if it were shortly before this step."""
    shutil.copytree(sandbox.run_folder("near"), sandbox.run_folder(name), symlinks=True)
    folder, saved, step = sandbox.checkpoints(name), sandbox.newest(name), edge - BEFORE
    for path in checkpoint.steps_in(folder):
        checkpoint.remove(path)
    (folder / "best").unlink(missing_ok=True)
    state = {**saved.state, "items": step * 8}
    checkpoint.save(folder, step, saved.tensors, state, checkpoint.Part(origin=lambda: saved.origin))
    return name


def moved_folder(sandbox: Sandbox, result: DrillResult) -> None:
    """The run's folder is renamed, moved away, replaced or removed during the run: followed, or saved elsewhere."""
    sandbox.train("straight")
    for name, act in MOVES.items():
        for step in (STOP,) if sandbox.short else (1, 2 * EVERY, STOP):
            run, removed = f"{name}-{step}", name.startswith("removed")
            folder = sandbox.run_folder(run)
            fault = faults.at_step(step, lambda job, act=act, folder=folder: act(folder, folder.with_name(f"{folder.name}-new")))
            output = sandbox.train(run, fault=fault, code=EXIT_USER if removed else 0)
            line = sandbox.plain(line_with(output, "was removed" if removed else "was renamed")).replace(run, "RUN")
            result.add(line.replace("away-RUN", "ELSEWHERE").replace("../", ""))
            # Under the old name there is nothing, or what somebody else put there.
            if folder.exists() and os.listdir(folder) != ["mine"]:
                raise Failed(f"{run} was written to after it was gone: {sorted(os.listdir(folder))[:4]}")
            if removed:
                result.steps_lost += max(0, step - sandbox.newest(f"{run}-rescued").step)
                sandbox.resume(f"{run}-rescued", same_as="straight")
            else:
                sandbox.require_same_end("straight", f"{run}-new")


def _move_away(folder: Path, new: Path) -> None:
    """Moves the folder out of the runs folder; a link leads to it."""
    away = folder.parents[1] / f"away-{folder.name}"
    folder.rename(away)
    new.symlink_to(away)


def _plant(folder: Path) -> None:
    folder.mkdir()
    (folder / "mine").write_text("somebody else's")


# Called with the run's folder and another name for it.
MOVES: dict[str, Callable[[Path, Path], object]] = {
    "renamed": lambda folder, new: folder.rename(new),
    "away": _move_away,
    "replaced": lambda folder, new: (folder.rename(new), _plant(folder)),
    "removed": lambda folder, new: shutil.rmtree(folder),
    "removed-and-replaced": lambda folder, new: (shutil.rmtree(folder), _plant(folder)),
}


def sharded_manifest(sandbox: Sandbox, result: DrillResult) -> None:
    """Single bits of a sharded checkpoint of two ranks flip, half of them in its manifest: never loaded."""
    together = ("model.dropout=0.0", "steps=24")
    sandbox.train("straight", *together)
    sandbox.train("pieces", *together, fault=faults.at_step(4, faults.send(signal.SIGTERM)), code=143)
    sandbox.resume("pieces", "dist.shard=2", num_ranks=2)
    newest = checkpoint.steps_in(sandbox.checkpoints("pieces"))[-1]
    if len(list(newest.glob("model-*-of-00002.safetensors"))) != 2:
        raise Failed("the checkpoint is not sharded")
    rng, files, manifest = random.Random(4), sorted(newest.iterdir()), newest / "manifest.json"
    flipped = (manifest if number % 2 else rng.choice(files) for number in range(60 if sandbox.short else 1000))
    flip_bits(flipped, rng, result, lambda: is_damaged(newest))
    checkpoint_loading.load(newest)
    flip_bit(newest / "manifest.json", random.Random(1))
    output = sandbox.resume("pieces", "dist.shard=1", "--force")
    result.add(line_with(output, "checkpoint damaged, falling back"))
    require_close(sandbox, "straight", "pieces", 1e-5)


EDITS = {"optim.lr": 0.5, "seed": 9, "model.dropout": 0.5, "data.block": 32, "ema": 0.5}


def edited_config(sandbox: Sandbox, result: DrillResult) -> None:
    """config.json is edited, or a checkpoint of another run added: refused unless accepted; no flipped bit goes unnoticed."""
    sandbox.train("straight")
    sandbox.train("one", fault=faults.at_step(STOP, faults.send(signal.SIGTERM)), code=143)
    path = sandbox.run_folder("one") / "config.json"
    good = path.read_bytes()
    for key, value in EDITS.items():
        path.write_bytes(_with(good, key, value))
        output = sandbox.resume("one", code=2)
        result.add(line_with(output, f"was edited or is damaged: {key}").removeprefix("seedbed: ").replace("run one", "RUN"))
    path.write_bytes(good)
    run = Run.open(sandbox.root, "one")
    _, wanted = saved_config(run)
    flip_bits([path] * (60 if sandbox.short else 600), random.Random(6), result, lambda: _is_refused_or(run, wanted))
    _foreign_checkpoint(sandbox, result)
    shutil.copytree(sandbox.run_folder("one"), sandbox.run_folder("two"), symlinks=True)
    (sandbox.run_folder("two") / "config.json").write_bytes(_with(good, "optim.lr", 0.5))
    output = sandbox.resume("two", "--accept-edits")
    result.add(line_with(output, "accepted: optim.lr"))
    if sandbox.events("two", "edited")[-1]["changed"] != {"optim.lr": [json.loads(good)["config"]["optim"]["lr"], 0.5]}:
        raise Failed("an accepted edit was not recorded")
    sandbox.resume("one", same_as="straight")


def _with(data: bytes, key: str, value: Any) -> bytes:
    facts = json.loads(data)
    *groups, name = key.split(".")
    inner = facts["config"]
    for group in groups:
        inner = inner[group]
    inner[name] = value
    return json.dumps(facts, indent=1).encode()


def _is_refused_or(run: Run, wanted: Config) -> bool:
    """Whether the run's config is refused with a message, or still the wanted one."""
    try:
        return saved_config(run)[1] == wanted
    except UserError:
        return True


def _foreign_checkpoint(sandbox: Sandbox, result: DrillResult) -> None:
    sandbox.train("other", "seed=5")
    shutil.copytree(sandbox.run_folder("one"), sandbox.run_folder("mixed"), symlinks=True)
    theirs = checkpoint.steps_in(sandbox.checkpoints("other"))[-1]
    shutil.copytree(theirs, sandbox.checkpoints("mixed") / theirs.name)
    output = sandbox.resume("mixed", code=2)
    result.add(line_with(output, "was written by run other").removeprefix("seedbed: ").replace("run mixed", "RUN"))
    if not (sandbox.checkpoints("mixed") / theirs.name / "manifest.json").exists():
        raise Failed("a checkpoint of another run was removed")
