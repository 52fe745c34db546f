"""Drills of very large step numbers, moved and removed folders, edited configs and damaged manifests."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed.config import Config
from seedbed.drills import faults
from seedbed.drills.damage import STOP, flip_bit, flip_bits, is_damaged
from seedbed.drills.sandbox import EVERY, STEPS, DrillResult, Failed, Sandbox, last_line, line_with, require_close
from seedbed.errors import EXIT_USER, UserError
from seedbed.launch import local
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading

# Where checkpoint names become longer, and how many steps before it a run starts.
EDGES, BEFORE = (10**6, 10**9), EVERY + EVERY // 2


def million_steps(sandbox: Sandbox, result: DrillResult) -> None:
    """A run passes step 1,000,000 and step 1,000,000,000 and is killed around both: it resumes at its newest checkpoint."""
    sandbox.train("near", f"steps={EVERY}")
    for edge in EDGES[:1] if sandbox.short else EDGES:
        straight = _put_at(sandbox, "near", f"straight-{edge}", edge - BEFORE)
        sandbox.resume(straight, f"steps={edge + STEPS}")
        kills = (edge, edge + EVERY + 3) if sandbox.short else (edge - 1, edge, edge + 1, edge + EVERY + 3, edge + 3 * EVERY + 1)
        for at in kills:
            name = _put_at(sandbox, "near", f"killed-{at}", edge - BEFORE)
            child = sandbox.start("resume", name, f"steps={edge + STEPS}", fault=faults.at_step(at, faults.send(signal.SIGKILL)))
            sandbox.require_killed(child)
            saved = max(edge - BEFORE, (at - 1) // EVERY * EVERY)
            output = sandbox.resume(name)
            resumed = sandbox.events(name, "resume")[-1]["step"]
            result.steps_lost += max(0, saved - resumed)
            result.add(line_with(output, "resumed at step"))
            sandbox.require_same_end(straight, name)


def _put_at(sandbox: Sandbox, source: str, name: str, step: int) -> str:
    """A copy of a run at a much later step."""
    shutil.copytree(sandbox.run_folder(source), sandbox.run_folder(name), symlinks=True)
    folder, saved = sandbox.checkpoints(name), sandbox.newest(name)
    for path in checkpoint.steps_in(folder):
        checkpoint.remove(path)
    (folder / "best").unlink(missing_ok=True)
    state = {**saved.state, "items": step * 8}
    checkpoint.save(folder, step, saved.tensors, state, checkpoint.Part(origin=lambda: saved.origin))
    return name


# ---- the folder ------------------------------------------------------------------------------------------------------


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


# ---- manifests of several ranks --------------------------------------------------------------------------------------


def sharded_manifest(sandbox: Sandbox, result: DrillResult) -> None:
    """Single bits of a sharded checkpoint of two ranks flip, half of them in its manifest: never loaded."""
    together = ("model.dropout=0.0", "steps=24")
    sandbox.train("straight", *together)
    sandbox.train("pieces", *together, fault=faults.at_step(4, faults.send(signal.SIGTERM)), code=143)
    child = sandbox.start_fresh("resume", "pieces", "dist.shard=2", num_ranks=2)
    if sandbox.wait(child):
        lines = [line for line in child.output().splitlines() if "Error" in line or line.startswith("seedbed: ")]
        raise Failed(f"two ranks could not resume: {lines[0] if lines else last_line(child.output())}")
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


# ---- edited files ----------------------------------------------------------------------------------------------------


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
    _, wanted = local.saved_config(run)
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
        return local.saved_config(run)[1] == wanted
    except UserError:
        return True


def _foreign_checkpoint(sandbox: Sandbox, result: DrillResult) -> None:
    """A newer checkpoint of another run with equal shapes."""
    sandbox.train("other", "seed=5")
    shutil.copytree(sandbox.run_folder("one"), sandbox.run_folder("mixed"), symlinks=True)
    theirs = checkpoint.steps_in(sandbox.checkpoints("other"))[-1]
    shutil.copytree(theirs, sandbox.checkpoints("mixed") / theirs.name)
    output = sandbox.resume("mixed", code=2)
    result.add(line_with(output, "was written by run other").removeprefix("seedbed: ").replace("run mixed", "RUN"))
    if not (sandbox.checkpoints("mixed") / theirs.name / "manifest.json").exists():
        raise Failed("a checkpoint of another run was removed")
