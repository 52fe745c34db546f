"""Starts runs on this machine; from command-line arguments to exit codes. resume.py continues them."""

import os
import shutil
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.dist import SINGLE, Ranks, is_elastic, started
from seedbed.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, UserError
from seedbed.recipes import Recipe, find, remember
from seedbed.report import journal
from seedbed.report.run_report import Setup, closing_verdict
from seedbed.report.tables import model_text
from seedbed.track import clocks, code
from seedbed.track.clocks import Stopwatch
from seedbed.track.console import Console
from seedbed.track.files import write_atomic
from seedbed.track.run import Run, full_name
from seedbed.track.text import duration, format_value, wrapped
from seedbed.train import checkpoint
from seedbed.train.engine import pick_device
from seedbed.train.job import Job
from seedbed.train.loop import fit
from seedbed.train.stepper import build
from seedbed.train.summary import summarise
from seedbed.train.system import describe

if TYPE_CHECKING:
    from seedbed.report.mirrors.choose import Choice

# The quick checks before the first step: a failure stops the run, is only reported, or the checks are skipped.
Check = Literal["quick", "force", "skip"]
NUM_SEARCHED = 100  # of the newest runs, for what one of these settings took


@dataclass
class Launch:
    """A run that this process starts or resumes, and how; `until` and `patience` may end it early."""

    run: Run
    recipe: Recipe
    config: Config
    console: Console
    resumed: bool = False
    until: int = 0
    patience: int = 0
    anomaly: bool = False
    ranks: Ranks = SINGLE
    clock: Stopwatch = field(default_factory=lambda: Stopwatch(since=time.monotonic()))


def train(
    name: str,
    assignments: list[str],
    *,
    root: Path,
    run_name: str | None = None,
    why: str = "",
    dirty: bool = False,
    parent: str | None = None,
    check: Check = "skip",
    anomaly: bool = False,
    until: int = 0,
    verbose: bool = False,
    mirrors: "Sequence[Choice]" = (),
) -> int:
    """Train a new run to its end. The quick checks may stop it before its first step."""
    clock = Stopwatch(since=clocks.take_command_start())
    recipe, preset = find(name)
    base = recipe.preset(preset)
    assert preset is not None, "recipe.preset refuses None"
    configs.require_one_length(base, assignments)
    config = configs.override(base, [*assignments, *(configs.UNCOMPILED if anomaly else ())])
    if is_elastic():
        from seedbed.launch import elastic

        if (status := elastic.go_on(root, run_name, config, until)) is not None:
            return status
    with ranks_of(config) as ranks:
        pick_device(config.device)
        if not ranks.is_primary:
            from seedbed.launch.ranks import train_non_primary

            return train_non_primary(ranks, root, recipe, anomaly)
        remember(recipe, config)
        state = code.state(Path.cwd(), root)
        code.require_clean(state, dirty)
        run = Run.create(root, recipe.name, preset, config, name=run_name, why=why, parent=parent, code=state, base=base)
        run.wall = clock.split
        if mirrors:
            from seedbed.report.mirrors import choose

            choose.keep(run, mirrors)
        with run.lock(), closing(Console(run.path / "console.log")) as console:
            console.verbose = verbose
            launch = Launch(run, recipe, config, console, until=until, anomaly=anomaly, ranks=ranks, clock=clock)
            try:
                data = open_run(launch, base)
            except UserError:
                shutil.rmtree(run.path)  # nothing was trained: a mistyped path leaves no run folder
                raise
            except Exception as error:
                run.set_status("failed", error=str(error)[:500])
                raise
            return run_training(launch, data) if may_start(launch, data, check) else EXIT_FAILED


def ranks_of(config: Config) -> AbstractContextManager[Ranks]:
    """This process among those that train the run."""
    if not config.dist.is_distributed and started() <= 1:
        return nullcontext(SINGLE)
    from seedbed.launch.ranks import join_ranks

    return join_ranks(config)


def open_run(launch: Launch, base: Config) -> Data:
    """Copy the recipe files into the run folder, print the config and open the data."""
    run, console = launch.run, launch.console
    if launch.recipe.code:
        from seedbed.track.code_patch import copy_files

        copy_files(launch.recipe.files(), run)
    print_config(run, base, console)
    if missing := code.left_out(run.code_json()):
        console.warn(missing)
    with launch.clock.timer("data"):
        return launch.recipe.open_data(launch.config)


def may_start(launch: Launch, data: Data, check: Check) -> bool:
    """Whether the quick checks, where they are asked for, let training start."""
    if check == "skip":
        launch.run.event(0, "preflight", outcome="skipped")
        return True
    from seedbed.launch.quick_checks import are_passed

    return are_passed(launch, data, check)


def run_training(launch: Launch, data: Data) -> int:
    """Train a run that is locked, to its end or to where it is stopped; returns the exit code."""
    run, clock, resumed = launch.run, launch.clock, launch.resumed
    clock.start("build")
    run.wall = clock.split
    facts = {"run": run.name, "preset": run.config_json()["preset"], "config": configs.to_json(launch.config)}
    launch.ranks.broadcast_object({**facts, "resumed": resumed, "until": launch.until})
    if not resumed:
        run.set_status("running", step=0, last_step=launch.config.steps)
    begun = not resumed  # a refused resume leaves the status unchanged
    with _mirrored(run, launch.console):
        try:
            job = open_job(launch, data)
            begun = True
            job.async_saves = saves_async(job.engine.device)
            with anomaly_mode(job, launch.anomaly):
                status = fit(job)
        except BaseException as error:
            if begun or not isinstance(error, UserError):
                run.set_status("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error=str(error)[:500])
            raise
        finally:
            run.close()
        return close_job(job, status)


def _mirrored(run: Run, console: Console) -> AbstractContextManager[None]:
    """While the block runs, rows and events of the run go to its mirrors too."""
    if not (run.path / "mirrors.json").exists():
        return nullcontext()
    from seedbed.report.mirrors import choose

    return choose.mirrored(run, console.line, console.warn)


def anomaly_mode(job: Job, wanted: bool) -> AbstractContextManager[None]:
    if not wanted:
        return nullcontext()
    from seedbed.train.anomaly import detecting

    return detecting(job)


def saves_async(device: torch.device) -> bool:
    """Whether checkpoints are written during training; on a CPU the writer would compete for its cores."""
    return device.type == "cuda"


def open_job(launch: Launch, data: Data) -> Job:
    """Build a run's job, print its facts, and restore its newest checkpoint when it is resumed."""
    run, config, console, primary = launch.run, launch.config, launch.console, launch.ranks.is_primary
    if not launch.ranks.is_single:
        from seedbed.launch.ranks import require_equal

        recipe_code = launch.recipe.code.sha256 if launch.recipe.code else None
        require_equal(launch.ranks, recipe=recipe_code, data=data.facts.get("fingerprint"))
    engine = build(launch.recipe, config, data, ranks=launch.ranks)
    about = None if launch.resumed or engine.shards else summarise(engine, data)  # before compiling, and of unsharded weights
    job = Job(run, config, engine.system, data, engine, console, patience=launch.patience, until=launch.until, clock=launch.clock)
    show_facts(job, launch)
    if launch.resumed:
        from seedbed.launch.resume import restore_newest

        restore_newest(job, launch.recipe)
    else:
        run.event(0, "start", device=device_name(engine.device), data=data.facts)
        if launch.recipe.code and not engine.shards:
            from seedbed.checks.own_evaluation import look_at_evaluation

            look_at_evaluation(job)
    if primary:
        with suppress(OSError):  # not needed for training
            launch.recipe.save_inference_data(data, run.path)
    if about and primary:
        run.event(0, "model", **about)
        with suppress(OSError):  # neither
            write_atomic(run.path / "model.txt", f"{model_text(about)}\n".encode())
        if unreached := about["unreached"]:
            console.warn(f"the loss does not reach {', '.join(unreached[:4])}: {len(unreached)} parameters in all")
    return job


def show_facts(job: Job, launch: Launch) -> None:
    """Print what is trained, on what and where, before step 0; with `-v` all other facts of data and model."""
    console, config, degrees = job.console, job.config, job.config.dist
    console.units = launch.recipe.units(config)
    facts = {"model": f"{sum(p.numel() for p in job.system.parameters()):,} parameters"}
    facts |= {"data": console.units.describe(job.data.facts), "device": f"{device_name(job.engine.device)}, {config.precision}"}
    if degrees.is_distributed:
        shape = f"{degrees.replicate} replicas of {degrees.shard} shards, micro-batches of {config.micro_batch}"
        facts["ranks"] = f"{degrees.world}: {shape}"
    if not launch.resumed:
        length = f"{config.steps:,} steps" if not config.budget else f"{duration(config.budget)} of training"
        unknown = f"{length}; the time left is shown after the first steps"
        facts["time"] = _known_time(job.run, facts["device"]) or unknown
    for name, value in facts.items():
        console.line(f"  {name:<9} " + ("\n" + " " * 12).join(wrapped(value.split(), console.width - 12, " ")))
    for name, value in (job.data.facts | describe(job.system)).items():
        console.detail(f"  {name:<18} {format_value(value)}")


def _known_time(run: Run, device: str) -> str:
    """What the newest finished run of these settings on the device took, which may differ in its seed; empty if there is none."""

    def settings(one: Run) -> dict[str, Any]:
        facts = one.config_json()
        return {**configs.flat(facts["config"]), "recipe": facts["recipe"], "seed": 0}

    with suppress(OSError):
        for path in sorted(run.path.parent.glob("*/status.json"), key=os.path.getmtime, reverse=True)[:NUM_SEARCHED]:
            with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged run tells nothing
                other = Run(path.parent)
                seconds, starts = sum(other.status()["clock"].values()), (e for e in other.events() if e["kind"] == "start")
                here = any(device.startswith(f"{start['device']}, ") for start in starts)
                if here and other.status()["status"] == "done" and settings(other) == settings(run):
                    return f"{duration(seconds)} in the last run of these settings, {other.name}"
    return ""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def close_job(job: Job, status: str) -> int:
    """Write verdict, journal entry and report of a finished run, and print where they are. Returns the exit code."""
    run, console = job.run, job.console
    if status == "interrupted":
        _print_wall_time(job, status)
        asked = " as asked" if job.until == job.step else ""
        saved = (run.path / "checkpoints" / checkpoint.folder_name(job.step)).is_dir()
        what = "checkpoint saved" if saved else "but its checkpoint could not be written"
        console.line(f"stopped at step {job.step}{asked}, {what}; continue with: seedbed resume {run.name}")
        return exit_code(job, status)
    job.clock.start("report")
    # What bounds the speed of this run, from numbers that it measured anyway.
    rows = job.run.rows()
    medians = {
        key: statistics.median(found) for key in ("wait", "mfu") if (found := [r[key] for r in rows if r.get(key) is not None])
    }
    runner, tier = job.stepper.runner, job.stepper.feed.tier
    setup = Setup(job.engine.device.type, job.config.precision, bool(runner.units), not runner.why_not, tier)
    verdict = closing_verdict(setup, **medians)
    run.set_status(status, verdict=verdict)
    journal.finish(run, console.warn)
    if console.has_hidden:
        from seedbed.report.tables import evaluation_table

        for text in evaluation_table(run.events(), console.width).splitlines():
            console.line(text)
    best = "" if job.best is None else f"; best evaluation {job.best:.4f} at step {job.best_step}"
    console.line(f"{status} at step {job.step} after {job.clock['train']:.1f} s of training{best}", style="bold")
    console.line(verdict)
    _print_wall_time(job, status)
    console.line(f"report  {run.path / 'report.md'}")
    console.line(f"plot    {run.path / 'plots' / 'loss.png'}")
    return exit_code(job, status)


def _print_wall_time(job: Job, status: str) -> None:
    """Print the wall time of this process by part; not for runs of a pack, which share a process."""
    if job.run.wall is not None:
        job.run.set_status(status)
        job.console.line(f"wall    {clocks.split_line(job.run.wall())}")


def exit_code(job: Job, status: str) -> int:
    if job.run.was_removed:
        return EXIT_USER
    if status == "interrupted" and not job.stop_signal and job.until:
        return EXIT_OK
    if status == "interrupted":
        return 128 + (job.stop_signal or signal.SIGINT)
    return EXIT_OK if status == "done" else EXIT_FAILED


def print_config(run: Run, base: Config, console: Console) -> None:
    """Print where the run is kept and what differs from the preset and the parent; with `-v` every setting."""
    facts, new = run.config_json(), configs.flat(run.config_json()["config"])
    why = f"  ({facts['why']})" if facts["why"] else ""
    console.line(f"{full_name(facts['recipe'], facts['preset'])} -> {run.path}{why}", style="bold")
    changes = {"changed": configs.diff(configs.flatten(base), new)}
    if facts["parent"]:
        parent = Run.open(run.path.parent, facts["parent"])
        changes[f"changed against {parent.name}"] = configs.diff(configs.flat(parent.config_json()["config"]), new)
    if console.verbose:
        from seedbed.report.tables import config_lines

        for text in config_lines(new, dict(zip("*~", changes.values(), strict=False)), console.width):
            console.line(text)
    for title, found in changes.items():
        words = [f"{key} {format_value(old)} -> {format_value(now)}" for key, (old, now) in found.items()] or ["nothing"]
        head = f"  {title:<9} " if title == "changed" else f"  {title}:\n{' ' * 12}"
        if found or title != "changed":
            text = ("\n" + " " * 12).join(wrapped(words, console.width - 12, " · "))
            console.line(head + text, style="yellow" if found else "")
