"""Resumes runs from their newest intact checkpoint; queued runs begin."""

from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from seedbed import config as configs
from seedbed.config import Config, flat
from seedbed.config.saved import is_free
from seedbed.dist import is_elastic
from seedbed.errors import EXIT_FAILED, UserError
from seedbed.launch import code_changes
from seedbed.launch.local import Check, Launch, device_name, may_start, open_run, ranks_of, run_training
from seedbed.recipes import Recipe
from seedbed.recipes.saved import open_saved
from seedbed.track import clocks, edits
from seedbed.track.changes import change_config, rewind
from seedbed.track.clocks import Stopwatch
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train import checkpoint_loading, progress, rollback
from seedbed.train.job import Job

if TYPE_CHECKING:
    from seedbed.report.mirrors.choose import Choice


def resume(
    root: Path,
    run_name: str,
    assignments: list[str],
    *,
    force: bool = False,
    check: Check = "quick",
    until: int = 0,
    mirrors: "Sequence[Choice] | None" = None,
) -> int:
    """Resume a run from its newest intact checkpoint. A queued run begins, after its checks."""
    clock, run = Stopwatch(since=clocks.take_command_start()), Run.open(root, run_name)
    run.wall = clock.split
    recipe, _, config = config_to_resume(run, assignments, force)
    if is_elastic():
        from seedbed.launch import elastic

        assignments = [*assignments, *elastic.fitted(config)]
        config = configs.override(config, assignments)
    with ranks_of(config) as ranks:
        if not ranks.is_primary:
            from seedbed.launch.ranks import train_non_primary

            return train_non_primary(ranks, root, recipe, anomaly=False)
        with run.lock(), closing(Console(run.path / "console.log")) as console:
            recipe, saved, config = config_to_resume(run, assignments, force)
            if mirrors is not None:
                from seedbed.report.mirrors import choose

                choose.keep(run, mirrors)
            for key, (old, new) in configs.diff(configs.flatten(saved), configs.flatten(config)).items():
                more = ", the learning rate is kept" if key == "batch" else ""
                console.line(f"changed on resume: {key} {old} -> {new}{more}")
            launch = Launch(run, recipe, config, console, resumed=True, until=until, ranks=ranks, clock=clock)
            if run.status().get("status") == "queued":
                return _start_queued(launch, check)
            with clock.timer("data"):
                data = recipe.open_data(config)
            return run_training(launch, data)


def saved_config(run: Run) -> tuple[Recipe, Config]:
    return open_saved(edits.verified_config(run), run.path)


def config_to_resume(run: Run, assignments: list[str], force: bool) -> tuple[Recipe, Config, Config]:
    """A run's recipe, its saved config and the new one. Refused when the run is finished or a fixed key changes."""
    recipe, saved = saved_config(run)
    if run.status().get("status") == "done" and not assignments and not force:
        raise UserError(f"run {run.name} is finished; to train it longer: seedbed resume {run.name} steps={2 * saved.steps}")
    configs.require_one_length(saved, assignments)
    config = configs.override(saved, assignments)
    if config.budget and config.budget != saved.budget:
        raise UserError(f"budget={config.budget:g}s cannot be set on resume; set the length instead: budget=none steps=N")
    for key in configs.diff(configs.flatten(saved), configs.flatten(config)):
        if not is_free(key):
            raise UserError(f"{key} cannot change on resume; start a new run with --parent {run.name}")
    return recipe, saved, config


def _start_queued(launch: Launch, check: Check) -> int:
    """Begin a run that was created by a Slurm submission."""
    run, launch.resumed = launch.run, False
    base = launch.recipe.preset(run.config_json()["preset"])
    change_config(run, launch.config, base)
    rewind(run, -1)  # an earlier first start may have been interrupted
    try:
        data = open_run(launch, base)
    except UserError as problem:
        run.set_status("failed", error=str(problem))
        raise
    return run_training(launch, data) if may_start(launch, data, check) else EXIT_FAILED


def restore_newest(job: Job, recipe: Recipe) -> None:
    """Restore the newest checkpoint, and record the settings that changed. A refusal changes nothing."""
    run, folder = job.run, job.run.path / "checkpoints"
    saved = checkpoint_loading.load_newest(folder, job.console.line, job.part)
    facts, now = run.config_json(), flat(configs.to_json(job.config))
    before = flat((saved and saved.origin.get("config")) or facts["config"])
    changed = {key: list(pair) for key, pair in configs.diff(before, now).items() if key in before and key in now}
    history = []
    if saved is None:
        job.console.line("the run ended before its first checkpoint; starting again from step 0")
    else:
        progress.restore(job, saved)
        job.clock.go_on_from(saved.state["clock"])
        # Apply a new number of steps. Without one, the run ends after the same number of items as before.
        if job.config.steps != saved.state["planned_steps"]:
            if job.config.steps <= job.step:
                raise UserError(f"steps={job.config.steps} is before step {job.step}, which the run has reached")
            job.total_items = job.items + (job.config.steps - job.step) * job.config.batch
        rollback.forget_after(job, job.step)
        job.console.line(f"resumed at step {job.step} of {job.num_steps}")
        history = [past for past in facts.get("history") or [] if past["step"] < job.step]
        history += [{"step": job.step, "changed": changed}] if changed else []
    if not job.ranks.is_primary:
        return
    rewind(run, job.step)
    if code := code_changes.since_last(run, recipe.files() if recipe.name.endswith(".py") else ()):
        job.console.warn(f"resumed with other code: {code_changes.describe(code)}")
    with suppress(OSError):  # also in the event
        code_changes.record(run, job.step, code)
    about = {key: value for key, value in (("changed", changed), ("code", code)) if value}
    run.event(job.step, "resume", device=device_name(job.engine.device), **about)
    change_config(run, job.config, recipe.preset(facts["preset"]), history)
