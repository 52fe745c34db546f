"""Drills of very large step numbers, moved and removed folders, edited configs and damaged manifests."""

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed.drills import faults
from seedbed.drills.damage import STOP, flip_bit
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
            if sandbox.wait(child) != -signal.SIGKILL:
                raise Failed(f"the run outlived its kill: {last_line(child.output())}")
            saved = max(edge - BEFORE, (at - 1) // EVERY * EVERY)
            output = sandbox.resume(name)
            resumed = sandbox.events(name, "resume")[-1]["step"]
            result.steps_lost += max(0, saved - resumed)
            result.add(line_with(output, "resumed at step"))
            sandbox.require_same_end(straight, name)
    result.exact = "yes"


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
    for name, act in {"renamed": _rename, "away": _move_away, "replaced": _replace}.items():
        for step in (STOP,) if sandbox.short else (1, 2 * EVERY, STOP):
            run = f"{name}-{step}"
            output = sandbox.train(run, fault=_doing(step, sandbox, run, act))
            result.add(_plain(sandbox, line_with(output, "was renamed"), run))
            _require_untouched(sandbox, run)
            sandbox.require_same_end("straight", f"{run}-new")
    for name, act in {"removed": _remove, "removed-and-replaced": _remove_and_replace}.items():
        for step in (STOP,) if sandbox.short else (1, 2 * EVERY, STOP):
            run = f"{name}-{step}"
            output = sandbox.train(run, fault=_doing(step, sandbox, run, act), code=EXIT_USER)
            result.add(_plain(sandbox, line_with(output, "was removed"), run))
            _require_untouched(sandbox, run)
            result.steps_lost += max(0, step - sandbox.newest(f"{run}-rescued").step)
            sandbox.resume(f"{run}-rescued")
            sandbox.require_same_end("straight", f"{run}-rescued")
    result.exact = "yes"


def _doing(step: int, sandbox: Sandbox, name: str, act: Callable[[Path, Path], None]) -> Callable[[], None]:
    folder = sandbox.run_folder(name)
    return faults.at_step(step, lambda job: act(folder, folder.with_name(f"{name}-new")))


def _rename(folder: Path, new: Path) -> None:
    folder.rename(new)


def _move_away(folder: Path, new: Path) -> None:
    """Moves the folder out of the runs folder; a link leads to it."""
    away = folder.parents[1] / f"away-{folder.name}"
    folder.rename(away)
    new.symlink_to(away)


def _replace(folder: Path, new: Path) -> None:
    folder.rename(new)
    _plant(folder)


def _remove(folder: Path, new: Path) -> None:
    shutil.rmtree(folder)


def _remove_and_replace(folder: Path, new: Path) -> None:
    shutil.rmtree(folder)
    _plant(folder)


def _plant(folder: Path) -> None:
    folder.mkdir()
    (folder / "mine").write_text("somebody else's")


def _require_untouched(sandbox: Sandbox, name: str) -> None:
    """Under the old name there is nothing, or what somebody else put there."""
    folder = sandbox.run_folder(name)
    if folder.exists() and os.listdir(folder) != ["mine"]:
        raise Failed(f"{name} was written to after it was gone: {sorted(os.listdir(folder))[:4]}")


def _plain(sandbox: Sandbox, line: str, name: str) -> str:
    line = line.removeprefix("seedbed: ").removeprefix("warning: ").replace(str(sandbox.folder) + "/", "")
    return re.sub(rf"{re.escape(name)}", "RUN", line).replace("away-RUN", "ELSEWHERE").replace("../", "")


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
    _flips(newest, result, 60 if sandbox.short else 1000)
    flip_bit(newest / "manifest.json", random.Random(1))
    output = sandbox.resume("pieces", "dist.shard=1", "--force")
    result.add(line_with(output, "checkpoint damaged, falling back"))
    require_close(sandbox, "straight", "pieces", 1e-5)
    result.exact = "same batch, other sums: losses within 1e-5"


def _flips(path: Path, result: DrillResult, num: int) -> None:
    """Each must be called damage."""
    rng, files = random.Random(4), sorted(path.iterdir())
    for number in range(num):
        file = path / "manifest.json" if number % 2 else rng.choice(files)
        good = file.read_bytes()
        flip_bit(file, rng)
        result.injected += 1
        try:
            checkpoint_loading.load(path)
        except checkpoint_loading.Damaged:
            result.detected += 1
        file.write_bytes(good)
    checkpoint_loading.load(path)


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
    _config_flips(sandbox, result, path, good, 60 if sandbox.short else 600)
    _foreign_checkpoint(sandbox, result)
    shutil.copytree(sandbox.run_folder("one"), sandbox.run_folder("two"), symlinks=True)
    (sandbox.run_folder("two") / "config.json").write_bytes(_with(good, "optim.lr", 0.5))
    output = sandbox.resume("two", "--accept-edits")
    result.add(line_with(output, "accepted: optim.lr"))
    if sandbox.events("two", "edited")[-1]["changed"] != {"optim.lr": [json.loads(good)["config"]["optim"]["lr"], 0.5]}:
        raise Failed("an accepted edit was not recorded")
    sandbox.resume("one")
    sandbox.require_same_end("straight", "one")
    result.exact = "yes"


def _with(data: bytes, key: str, value: Any) -> bytes:
    facts = json.loads(data)
    *groups, name = key.split(".")
    inner = facts["config"]
    for group in groups:
        inner = inner[group]
    inner[name] = value
    return json.dumps(facts, indent=1).encode()


def _config_flips(sandbox: Sandbox, result: DrillResult, path: Path, good: bytes, num: int) -> None:
    """Any flipped bit: refused with a message, or the run is unchanged."""
    path.write_bytes(good)
    rng, run = random.Random(6), Run.open(sandbox.root, "one")
    _, wanted = local.saved_config(run)
    for _ in range(num):
        flip_bit(path, rng)
        result.injected += 1
        try:
            result.detected += local.saved_config(run)[1] == wanted
        except UserError:
            result.detected += 1
        path.write_bytes(good)


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
