"""Runs on this machine: start, resume, sample and export, from names on a command line to exit codes."""

from __future__ import annotations

import random
import shutil
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from seedbed import config as configs
from seedbed.checks.preflight import before_training
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.dist.limits import require_possible
from seedbed.dist.ranks import ALONE, Ranks
from seedbed.errors import UserError
from seedbed.launch import company
from seedbed.recipes import Recipe, find, find_saved
from seedbed.track import code, journal
from seedbed.track.console import Console
from seedbed.track.files import write_atomic
from seedbed.track.mirrors.choose import Choice, keep, mirrored
from seedbed.track.model_table import model_text
from seedbed.track.run import Run, full_name
from seedbed.train import checkpoint
from seedbed.train.anomaly import detecting
from seedbed.train.engine import Engine, mix, pick_device
from seedbed.train.loop import Job, fit, forget_after, take_back
from seedbed.train.playing import Player
from seedbed.train.summary import summarise
from seedbed.train.system import Request, System
from seedbed.tune.verdict import closing_verdict

EXIT_OK, EXIT_FAILED = 0, 1
# What the quick checks before a first step may do: stop it, only tell, or stay away.
Check = Literal["quick", "force", "skip"]
# What a resumed run may change without becoming another run.
FREE_KEYS = {"batch", "accum", "device", "precision", "keep", "steps"}
FREE_KEYS |= {word.partition("=")[0] for word in configs.PLAIN}
FREE_GROUPS = ("every.", "guard.", "dist.")


@dataclass
class Trained:
    """A system built as its run describes it, with the weights of one checkpoint."""

    run: Run
    config: Config
    data: Data
    system: System
    engine: Engine


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
    mirrors: Sequence[Choice] = (),
) -> int:
    """Start a run and stay with it to its end; the quick checks may stop it before its first step."""
    recipe, preset = find(name)
    base = recipe.preset(preset)
    assert preset is not None, "a recipe without a settled preset has been refused"
    config = configs.override(base, [*assignments, *(configs.UNCOMPILED if anomaly else ())])
    with company.joined(config) as ranks:
        pick_device(config.device)
        if not ranks.is_first:
            return _beside(ranks, root, recipe, anomaly)
        state = code.state(Path.cwd(), root)
        code.require_clean(state, dirty)
        run = Run.create(root, recipe.name, preset, config, name=run_name, why=why, parent=parent, code=state, base=base)
        keep(run, mirrors)
        return _start(run, recipe, config, base, ranks, check, anomaly)


def _start(run: Run, recipe: Recipe, config: Config, base: Config, ranks: Ranks, check: Check, anomaly: bool) -> int:
    """A new run, from its first look at the data to its end."""
    preset = run.config_json()["preset"]
    with run.lock(), closing(Console(run.path / "console.log")) as console:
        try:
            data = _first_look(run, recipe, config, base, console)
        except UserError:
            shutil.rmtree(run.path)  # nothing was trained: a mistyped path leaves no run behind
            raise
        if not _preflight(run, recipe, preset, config, console, check):
            return EXIT_FAILED
        return _execute(run, recipe, config, data, console, resumed=False, anomaly=anomaly, ranks=ranks)


def _first_look(run: Run, recipe: Recipe, config: Config, base: Config, console: Console) -> Data:
    """What a run begins with: its recipe kept, its settings told, its data opened."""
    _keep_recipe_files(recipe, run)
    _echo(run, config, base, console)
    return recipe.open_data(config)


def _begin(run: Run, recipe: Recipe, config: Config, console: Console, check: Check, ranks: Ranks) -> int:
    """The first start of a run that was made ready elsewhere and has waited in a queue."""
    preset = run.config_json()["preset"]
    base = recipe.preset(preset)
    run.change_config(config, base)
    run.rewind(-1)  # an earlier first start may have been cut short
    try:
        data = _first_look(run, recipe, config, base, console)
    except UserError as problem:
        run.set_status("failed", error=str(problem))
        raise
    if not _preflight(run, recipe, preset, config, console, check):
        return EXIT_FAILED
    return _execute(run, recipe, config, data, console, resumed=False, ranks=ranks)


def resume(
    root: Path,
    run_name: str,
    assignments: list[str],
    *,
    force: bool = False,
    check: Check = "quick",
    mirrors: Sequence[Choice] | None = None,
) -> int:
    """Go on with a run where its newest whole checkpoint left it; one that was only queued begins, after its checks."""
    run = Run.open(root, run_name)
    recipe, _, config = may_resume(run, assignments, force)
    with company.joined(config) as ranks:
        if not ranks.is_first:
            return _beside(ranks, root, recipe, anomaly=False)
        return _go_on(run, assignments, force, check, mirrors, ranks)


def _go_on(run: Run, assignments: list[str], force: bool, check: Check, mirrors: Sequence[Choice] | None, ranks: Ranks) -> int:
    with run.lock(), closing(Console(run.path / "console.log")) as console:
        recipe, saved, config = may_resume(run, assignments, force)
        if mirrors is not None:
            keep(run, mirrors)
        for key, (old, new) in configs.diff(configs.flatten(saved), configs.flatten(config)).items():
            console.line(f"changed on resume: {key} {old} -> {new}" + (", the learning rate is kept" if key == "batch" else ""))
        if run.status().get("status") == "queued":
            return _begin(run, recipe, config, console, check, ranks)
        return _execute(run, recipe, config, recipe.open_data(config), console, resumed=True, ranks=ranks)


def may_resume(run: Run, assignments: list[str], force: bool) -> tuple[Recipe, Config, Config]:
    """A run's recipe, its settings as saved and as they are to be; refused when it is finished or would be another run."""
    recipe, saved = saved_config(run)
    if run.status().get("status") == "done" and not assignments and not force:
        raise UserError(f"run {run.name} is finished; to train it longer: seedbed resume {run.name} steps={2 * saved.steps}")
    config = configs.override(saved, assignments)
    for key in configs.diff(configs.flatten(saved), configs.flatten(config)):
        if key not in FREE_KEYS and not key.startswith(FREE_GROUPS):
            raise UserError(f"{key} cannot change on resume: it would be another run; start one with --parent {run.name}")
    return recipe, saved, config


def sample(root: Path, run_name: str, options: dict[str, Any], *, checkpoint_name: str = "", write: Any = None) -> int:
    """Show what a trained run can do."""
    trained = load(root, run_name, checkpoint_name)
    folder = trained.run.path / "samples" / "asked"
    with trained.engine.evaluating():
        shown = trained.system.sample(Request(folder, options, write), trained.engine)
    if write is None and shown.text:
        print(shown.text)
    for path in shown.files:
        print(path)
    return EXIT_OK


def think(root: Path, run_name: str, options: dict[str, Any], *, checkpoint_name: str = "") -> int:
    """Show what more steps of thought buy a trained run; the picture and the numbers go to its folder."""
    trained = load(root, run_name, checkpoint_name)
    with trained.engine.evaluating():
        shown = trained.system.think(Request(trained.run.path / "thinking", options), trained.engine)
    print(shown.text)
    for path in shown.files:
        print(path)
    return EXIT_OK


def load(root: Path, run_name: str, checkpoint_name: str = "", device: str = "auto") -> Trained:
    """A run's system with its best weights, or those of a named checkpoint; averaged ones where the run has them."""
    run = Run.open(root, run_name)
    recipe, config = saved_config(run)
    config = configs.override(config, [*configs.PLAIN, f"device={device}"])
    folder = run.path / "checkpoints"
    path = folder / checkpoint_name if checkpoint_name else checkpoint.best(folder)
    if path and not path.is_dir():
        names = ", ".join(p.name for p in checkpoint.steps_in(folder)) or "none yet"
        raise UserError(f"run {run.name} has no checkpoint {checkpoint_name!r}; there are: {names}")
    try:
        saved = checkpoint.load(path) if path else checkpoint.load_newest(folder)
    except checkpoint.Damaged as problem:
        raise UserError(f"checkpoint damaged: {problem}; name another with --checkpoint") from None
    if saved is None:
        raise UserError(f"run {run.name} has no checkpoint yet; wait for its first save")
    data = recipe.open_data(config)
    engine, system = _build(recipe, config, data)
    have, want = data.facts.get("fingerprint", ""), saved.state["data"]
    if have != want:
        raise UserError(f"the data has changed: run {run.name} was trained on {want}, the source now gives {have}")
    live = {k: v for k, v in engine.tensors().items() if k in ("model", "ema", "ema2")}
    checkpoint.restore(live, {k: v for k, v in saved.tensors.items() if k in live}, f"checkpoint {saved.path.name}")
    return Trained(run, config, data, system, engine)


def player(root: Path, run_name: str, checkpoint_name: str = "", runtime: str = "torch") -> Player:
    """A trained run to walk through; onnx runs on one processor core wherever torch would run."""
    trained = load(root, run_name, checkpoint_name, device="cpu" if runtime == "onnx" else "auto")
    with trained.engine.evaluating():
        return trained.system.play(runtime)


def export(root: Path, run_name: str, out: Path, checkpoint_name: str = "", *, to: Literal["files", "web"] = "files") -> int:
    """Write the weights and all that is needed to use them elsewhere: safetensors and JSON, or a network for a web page."""
    trained = load(root, run_name, checkpoint_name, device="cpu")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; name a new folder with --out")
    with trained.engine.evaluating():
        files = trained.system.export(out) if to == "files" else trained.system.export_web(out)
    for path in files:
        print(path)
    return EXIT_OK


def demo(root: Path) -> int:
    """A small GPT learns in under two minutes; then, what to try next."""
    status = train("gpt/demo", [], root=root, why="the demo: watch a small GPT learn", dirty=True, check="quick")
    if status == EXIT_OK:
        name = max((p for p in root.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime).name
        command = _command()
        print("\nNow try:")
        print(f'  {command} sample {name} --prompt "The statement " --tokens 300')
        print(f"  {command} train gpt/demo model.depth=2 -m 'is half the depth enough?'")
        print(f"  {command} runs list")
        print(f"  {command} serve")
    return status


def _command() -> str:
    """What to type to reach this program from here: its name, or its path where the shell would not find it."""
    found, called = shutil.which("seedbed"), Path(sys.argv[0])
    if called.name != "seedbed" or (found and Path(found).resolve() == called.resolve()):
        return "seedbed"
    return str(called.relative_to(Path.cwd()) if called.is_absolute() and called.is_relative_to(Path.cwd()) else called)


def _preflight(run: Run, recipe: Recipe, preset: str | None, config: Config, console: Console, check: str) -> bool:
    """Whether training may start; what was found, or that nobody looked, is written into the run's folder."""
    if check == "skip":
        run.event(0, "preflight", outcome="skipped")
        return True
    report = before_training(recipe, preset, config, root=run.path.parent, folder=run.path, say=console.line)
    errors, warnings = ([f.id for f in report.of(severity)] for severity in ("err", "warn"))
    outcome = "forced" if errors and check == "force" else "failed" if errors else "passed"
    run.event(0, "preflight", outcome=outcome, errors=errors, warnings=warnings)
    if outcome == "failed":
        reason = f"preflight: {', '.join(errors)}"
        run.set_status("failed", error=reason)
        run.close()
        console.line(f"{reason}: not started; mend it, or start all the same with --force", style="bold")
    return outcome != "failed"


def saved_config(run: Run) -> tuple[Recipe, Config]:
    """The recipe and the settings that a run's folder names."""
    facts = run.config_json()
    recipe = find_saved(facts["recipe"], run.path.parent)
    return recipe, configs.from_json(recipe.preset(facts["preset"]), facts["config"])


def _build(recipe: Recipe, config: Config, data: Data, ranks: Ranks = ALONE) -> tuple[Engine, System]:
    device = pick_device(config.device)
    seed = mix(config.seed)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    system = recipe.build(config, data)
    require_possible(system, config, ranks.degrees)
    if ranks.degrees.shard == 1:  # else it goes there piece by piece
        system = system.to(device)
    return Engine(system, config, device, ranks), system


def _execute(
    run: Run,
    recipe: Recipe,
    config: Config,
    data: Data,
    console: Console,
    *,
    resumed: bool,
    anomaly: bool = False,
    patience: int = 0,
    ranks: Ranks = ALONE,
) -> int:
    facts = run.config_json()
    ranks.tell({"run": run.name, "preset": facts["preset"], "config": configs.to_json(config), "resumed": resumed})
    run.set_status("running")
    with mirrored(run, console.line, console.warn):
        try:
            job = open_job(run, recipe, config, data, console, resumed=resumed, patience=patience, ranks=ranks)
            with detecting(job) if anomaly else nullcontext():
                status = fit(job)
        except BaseException as error:
            run.set_status("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error=str(error)[:500])
            raise
        finally:
            run.close()
        return close_job(job, status)


def _beside(ranks: Ranks, root: Path, recipe: Recipe, anomaly: bool) -> int:
    """What every rank but the first does: the same steps, without a word. It waits until the first has opened the data."""
    told = ranks.tell(None)
    run = company.Beside(root / told["run"])
    config = configs.from_json(recipe.preset(told["preset"]), told["config"])
    console = company.silence()
    job = open_job(run, recipe, config, recipe.open_data(config), console, resumed=told["resumed"], ranks=ranks)
    with detecting(job) if anomaly else nullcontext():
        return _exit_code(job, fit(job))


def open_job(
    run: Run,
    recipe: Recipe,
    config: Config,
    data: Data,
    console: Console,
    *,
    resumed: bool,
    patience: int = 0,
    ranks: Ranks = ALONE,
) -> Job:
    """A run ready to train: built, told in facts, and taken back to its newest checkpoint when it goes on."""
    engine, system = _build(recipe, config, data, ranks)
    about = None if resumed or engine.shards else summarise(engine, data)  # before anything is compiled, and of whole weights
    job = Job(run=run, config=config, system=system, data=data, engine=engine, console=console, patience=patience)
    for name, value in _facts(job).items():
        console.line(f"  {name:<18} {value}")
    if resumed:
        _continue(job)
        run.change_config(config, recipe.preset(run.config_json()["preset"]))
    else:
        run.event(0, "start", device=_device_name(engine.device), data=data.facts)
    if about and ranks.is_first:
        _keep_model(run, console, about)
    return job


def _keep_model(run: Run, console: Console, about: dict[str, Any]) -> None:
    """The model as a table in the run's folder, and a word on parameters that nothing will ever change."""
    run.event(0, "model", **about)
    with suppress(OSError):  # training can do without it
        write_atomic(run.path / "model.txt", f"{model_text(about)}\n".encode())
    if about["unreached"]:
        console.warn(f"the loss does not reach {', '.join(about['unreached'][:4])}: {len(about['unreached'])} parameters in all")


def _continue(job: Job) -> None:
    folder = job.run.path / "checkpoints"
    saved = checkpoint.load_newest(folder, job.console.line, job.part)
    if saved is None:
        job.console.line("no checkpoint was written before the run ended; starting again from step 0")
    else:
        take_back(job, saved)
        forget_after(job, job.step)
        _stretch(job, saved)
        job.console.line(f"resumed at step {job.step} of {job.num_steps}")
    job.run.rewind(job.step)
    job.run.event(job.step, "resume", device=_device_name(job.engine.device))


def _stretch(job: Job, saved: checkpoint.Checkpoint) -> None:
    """A new number of steps moves the end of the run; without one, the end stays where it was, counted in items."""
    planned = saved.state["planned_steps"]
    if job.config.steps != planned:
        if job.config.steps <= job.step:
            raise UserError(f"steps={job.config.steps} is behind step {job.step}, where the run stands")
        job.total_items = job.items + (job.config.steps - job.step) * job.config.batch


def _facts(job: Job) -> dict[str, Any]:
    """What a person wants to see before step 0."""
    num_params = sum(p.numel() for p in job.system.parameters())
    facts = {"parameters": f"{num_params:,}", "device": _device_name(job.engine.device), "precision": job.config.precision}
    degrees = job.config.dist
    if degrees.world > 1:
        facts["ranks"] = (
            f"{degrees.world}: {degrees.replicate} copies of {degrees.shard} pieces, {job.config.micro_batch} items each"
        )
    return facts | job.data.facts | job.system.describe()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _keep_recipe_files(recipe: Recipe, run: Run) -> None:
    """A user's own recipe travels with its run: the file may change tomorrow."""
    if recipe.name.endswith(".py"):
        for path in recipe.files():
            shutil.copy2(path, run.path / path.name)


def close_job(job: Job, status: str) -> int:
    """Verdict, journal and report of a run that has ended, and where to find them; the exit code."""
    run, console = job.run, job.console
    if status == "interrupted":
        console.line(f"stopped at step {job.step}, checkpoint saved; go on with: seedbed resume {run.name}")
        return _exit_code(job, status)
    verdict = _verdict(job)
    run.set_status(status, verdict=verdict)
    journal.finish(run, console.warn)
    best = "" if job.best is None else f"; best evaluation {job.best:.4f} at step {job.best_step}"
    console.line(f"{status} at step {job.step} after {job.clock['train']:.1f} s of training{best}", style="bold")
    console.line(verdict)
    console.line(f"report  {run.path / 'report.md'}")
    console.line(f"plot    {run.path / 'plots' / 'loss.png'}")
    return _exit_code(job, status)


def _exit_code(job: Job, status: str) -> int:
    if status == "interrupted":
        return 128 + (job.stop_signal or signal.SIGINT)
    return EXIT_OK if status == "done" else EXIT_FAILED


def _verdict(job: Job) -> str:
    """What bound this run, in words, from figures that cost nothing."""
    rows = job.run.rows()
    medians = {
        key: statistics.median(found) for key in ("wait", "mfu") if (found := [r[key] for r in rows if r.get(key) is not None])
    }
    how = {"compiled": bool(job.runner.units), "captured": not job.runner.why_not, "tier": job.feed.tier}
    return closing_verdict({"device": job.engine.device.type, "precision": job.config.precision, **how, **medians})


def _echo(run: Run, config: Config, base: Config, console: Console) -> None:
    """What will be trained, before anything is: nobody should find out after a night that it was the wrong thing."""
    facts = run.config_json()
    parent = Run.open(run.path.parent, facts["parent"]) if facts["parent"] else None
    title = f"{full_name(facts['recipe'], facts['preset'])} -> {run.path}" + (f"  ({facts['why']})" if facts["why"] else "")
    before = (parent.name, parent.config_json()["config"]) if parent else None
    console.config(title, facts["config"], configs.to_json(base), before)
