"""Dry run: two steps, an evaluation, a sample, a save and a resume, compared bit for bit. Nothing is kept."""

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from seedbed.errors import EXIT_FAILED, EXIT_OK, UserError
from seedbed.launch import local
from seedbed.launch.resume import saved_config
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading
from seedbed.train.engine import cpu_threads
from seedbed.train.job import Job
from seedbed.train.loop import settle, take_step, warm_up

# The shortest run that does everything once.
SHORT = ["steps=2", "budget=none", "every.log=1", "every.eval=0", "every.sample=0", "every.save=1", "keep=2"]
NAME = "dry"


def dry_run(name: str, assignments: list[str], kept: Sequence[str] = (), num_ranks: int = 0) -> int:
    """Do everything that a run does once, in a temporary folder. Returns 1 when the resumed step differs from the original.

    Options of what is `kept` cannot be followed.
    """
    if num_ranks:
        raise UserError("--dry is done by one process; set dist.replicate=1 dist.shard=1 for it")
    for option in kept:
        raise UserError(f"--dry keeps nothing, so --{option} has no effect; drop one of them")
    with tempfile.TemporaryDirectory(prefix="seedbed-dry-") as folder:
        root = Path(folder) / "runs"
        status = local.train(name, [*assignments, *SHORT], root=root, run_name=NAME, why="a dry run", dirty=True)
        if status:
            return status
        run = Run.open(root, NAME)
        assert {"model", "eval", "sample", "checkpoint"} <= {event["kind"] for event in run.events()}, (
            "a part of the run is missing"
        )
        wanted = checkpoint_loading.load(run.path / "checkpoints" / checkpoint.folder_name(2))
        with closing(Console()) as console:
            different = _differences(_repeat_second_step(run, wanted, console), wanted)
            done = "dry run: 2 steps, 1 evaluation, 1 sample, saved, resumed at step 1, step 2 repeated"
            if not different:
                console.line(f"{done}: bitwise equal. Nothing was kept", style="bold")
                return EXIT_OK
            worst = max(different, key=lambda name: different[name])
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            console.line(f"{done}: NOT equal: {worst} by {different[worst]:.3g}{more}", style="bold")
            console.line("  a resumed run would differ from an uninterrupted one; seedbed check looks for the cause")
            return EXIT_FAILED


def _repeat_second_step(run: Run, wanted: checkpoint_loading.Checkpoint, console: Console) -> Job:
    """Take the second step from the first checkpoint, without actions."""
    checkpoint.remove(wanted.path)
    recipe, config = saved_config(run)
    job = local.open_job(local.Launch(run, recipe, config, console, resumed=True), recipe.open_data(config))
    assert job.step == 1, "the second checkpoint was removed"
    try:
        with cpu_threads(job.system.num_cpu_threads):
            warm_up(job)
            take_step(job)
            settle(job)
    finally:
        job.stepper.close()
    return job


def _differences(job: Job, wanted: checkpoint_loading.Checkpoint) -> dict[str, float]:
    """The largest difference of each tensor that differs. State that evaluations steer is not compared: the repeat has none."""
    found = {}
    for file, group in job.engine.tensors().items():
        for name, tensor in group.items():
            have, want = tensor.detach().cpu(), wanted.tensors[file][name]
            if not torch.equal(have, want):
                found[f"{file}: {name}"] = (have.double() - want.double()).abs().max().item()
    if not job.system.evaluation_steers and job.system.state() != wanted.state["system"]:
        found["the recipe's state"] = float("nan")
    return found
