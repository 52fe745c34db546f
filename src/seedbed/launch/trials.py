"""Trains trials of a sweep on this machine, alone or as packs: several runs as one stacked model, each with its own folder."""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import torch

from seedbed.checks.preflight import before_training
from seedbed.config import Config
from seedbed.data.feed import Data, room
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.launch.local import Launch, close_job, open_job
from seedbed.launch.resume import saved_config
from seedbed.report.findings import Finding
from seedbed.track import code_patch
from seedbed.track.clocks import Stopwatch
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train import capabilities
from seedbed.train.capabilities import packable
from seedbed.train.engine import pick_device
from seedbed.train.job import Job
from seedbed.train.oom import is_out_of_memory
from seedbed.train.system import flops_per_item
from seedbed.tune.estimate import estimate_costs
from seedbed.tune.packing.pack import Pack, fit_pack, why_not_packed
from seedbed.tune.sweep.folder import Trial
from seedbed.tune.sweep.grid import words
from seedbed.tune.sweep.verbs import Group, Outcome, Workspace

MAX_PACK = 128
# A pack saves more for its backward pass than single runs: random draws, masks and stacked copies.
PACK_WASTE = 1.5
# A smaller trial joins the pack of a larger one if at least this share of its computation is not masked.
LEAST_SHARE = 0.5


def check(workspace: Workspace, trial: Trial) -> list[Finding]:
    """Run the quick checks on the first trial of the sweep; returns the failures."""
    config, folder = workspace.config(trial), workspace.sweep.path
    report = before_training(
        workspace.recipe, workspace.preset, config, root=workspace.sweep.root, folder=folder, say=workspace.say
    )
    return report.of("err")


def groups(workspace: Workspace, trials: Sequence[Trial], most: int | None) -> list[Group]:
    """Group trials into packs, and print why some must train one by one."""
    try:
        return _groups(workspace, trials, most)
    except Exception as error:
        # A broken trial reports its own error later; the others can still train.
        workspace.say(f"one by one: packs cannot be planned ({_reason(error)})")
        return [Group((trial,)) for trial in trials]


def _groups(workspace: Workspace, trials: Sequence[Trial], most: int | None) -> list[Group]:
    configs = {trial.number: workspace.config(trial) for trial in trials}
    data = workspace.recipe.open_data(configs[trials[0].number])
    system = workspace.recipe.build(configs[trials[0].number], data)
    packs: list[list[Trial]] = []
    reasons: dict[str, None] = {}
    for trial in trials:
        config = configs[trial.number]
        clashes = [why_not_packed(system, [configs[pack[0].number], config]) for pack in packs]
        alone = why_not_packed(system, [config])
        reasons |= dict.fromkeys(filter(None, [alone, *clashes]))
        fitting = next((pack for pack, clash in zip(packs, clashes, strict=True) if not clash), None)
        if fitting is not None and not alone:
            fitting.append(trial)
        else:
            packs.append([trial])
    found = [part for pack in packs for part in _split_by_cost(workspace, pack, configs, data)]
    _print_packs(workspace, found, list(reasons), pick_device(configs[trials[0].number].device))
    return [Group(tuple(pack), _max_pack(workspace, [configs[t.number] for t in pack], data, most)) for pack in found]


def _split_by_cost(workspace: Workspace, pack: list[Trial], configs: dict[int, Config], data: Data) -> list[list[Trial]]:
    """Split a pack so that at least half of the computation of each trial is not masked."""
    if len(pack) == 1:
        return [pack]
    # Trials with equal model and data settings share one build, which takes a second.
    kinds = {t.number: repr((configs[t.number].model, configs[t.number].data)) for t in pack}
    built = {kinds[t.number]: configs[t.number] for t in pack}
    flops = {kind: flops_per_item(workspace.recipe.build(config, data)) for kind, config in built.items()}
    costs = {number: flops[kind] for number, kind in kinds.items()}
    parts: list[list[Trial]] = []
    for trial in sorted(pack, key=lambda t: -costs[t.number]):
        if parts and costs[trial.number] >= LEAST_SHARE * costs[parts[-1][0].number]:
            parts[-1].append(trial)
        else:
            parts.append([trial])
    return [sorted(part, key=lambda t: t.number) for part in parts]


def _max_pack(workspace: Workspace, configs: list[Config], data: Data, wanted: int | None) -> int:
    """Number of trials in a pack: `wanted`, or as many as fit into memory by an estimate."""
    if len(configs) == 1 or wanted:
        return min(wanted or 1, len(configs))
    padded_config = capabilities.packable(workspace.recipe.build(configs[0], data)).padded_config(configs)
    each = PACK_WASTE * sum(estimate_costs(workspace.recipe, padded_config, data).memory(padded_config.batch).values())
    fitting = max(1, int(1.2 * room(pick_device(padded_config.device)) / each))
    if fitting < len(configs):
        workspace.say(f"memory for {fitting} of {len(configs)} runs at a time, by an estimate; --pack N overrides it")
    return min(fitting, MAX_PACK, len(configs))


def _print_packs(workspace: Workspace, packs: list[list[Trial]], reasons: list[str], device: torch.device) -> None:
    sizes = [len(pack) for pack in packs]
    together = [size for size in sizes if size > 1]
    if together:
        models = "one stacked model" if len(together) == 1 else f"stacked models of {' + '.join(map(str, together))}"
        workspace.say(f"packed: {sum(together)} trials train as {models} on {device.type}; --no-pack trains them one by one")
    if sum(sizes) > sum(together):
        why = "; ".join(reasons[:3]) or "masked work would be more than half"
        workspace.say(f"one by one: {sum(sizes) - sum(together)} trials ({why})")


def train(workspace: Workspace, trials: Sequence[Trial]) -> Outcome:
    """Train trials to their end, from the start or resumed. An error of one is recorded and the others continue."""
    if len(trials) == 1:
        return _train_alone(workspace, trials[0])
    try:
        return _train_pack(workspace, trials)
    except Exception as error:
        size = len(trials) // 2 if is_out_of_memory(error) else 1
        workspace.say(f"the pack of {len(trials)} did not train ({_reason(error)}); retrying with smaller packs")
    torch.cuda.empty_cache()  # here, where the error no longer holds tensors
    errors: dict[int, str] = {}
    for first in range(0, len(trials), size):
        outcome = train(workspace, trials[first : first + size])
        errors |= outcome.errors
        if outcome.stop_signal:
            return Outcome(outcome.stop_signal, errors)
    return Outcome(0, errors)


def _train_alone(workspace: Workspace, trial: Trial) -> Outcome:
    config = workspace.config(trial)
    try:
        with _run_of(workspace, trial) as (run, resumed), quiet_console(run) as console:
            data = workspace.recipe.open_data(config)
            try:
                how = {"resumed": resumed, "patience": workspace.patience}
                status = local.run_training(local.Launch(run, workspace.recipe, config, console, **how), data)
            except Exception:
                console.line(traceback.format_exc())
                raise
    except Exception as error:
        return Outcome(0, {trial.number: _reason(error)})
    return Outcome(max(status - 128, 0))


def _train_pack(workspace: Workspace, trials: Sequence[Trial]) -> Outcome:
    stops: list[int] = []
    with ExitStack() as held:
        runs = [held.enter_context(_run_of(workspace, trial))[0] for trial in trials]
        statuses = train_packed(runs, patience=workspace.patience, on_status=lambda job: stops.append(job.stop_signal))
        failed = {trial: run for trial, run in zip(trials, runs, strict=True) if statuses[run.name] == "failed"}
        errors = {trial.number: str(run.status().get("error") or "failed") for trial, run in failed.items()}
    return Outcome(max(stops, default=0), errors)


@contextlib.contextmanager
def _run_of(workspace: Workspace, trial: Trial) -> Iterator[tuple[Run, bool]]:
    """The run of a trial, locked, and whether it was started before."""
    root, name = workspace.sweep.root, workspace.sweep.run_name(trial)
    begun = (root / name).is_dir()
    run = Run.open(root, name) if begun else _new_run(workspace, trial, name)
    with run.lock():
        # Without a status nothing was trained: the process died before the first step.
        yield run, begun and bool(run.status())


def _new_run(workspace: Workspace, trial: Trial, name: str) -> Run:
    sweep, config = workspace.sweep, workspace.config(trial)
    why = f"{sweep.facts.get('why') or 'sweep'}: {' '.join(words(trial.settings))}"
    about = {"name": name, "why": why, "code": workspace.code, "base": workspace.base, "sweep": sweep.name}
    run = Run.create(sweep.root, workspace.recipe.name, workspace.preset, config, **about)
    if workspace.recipe.code:
        code_patch.copy_files(workspace.recipe.files(), run)
    with quiet_console(run) as console:
        local.print_config(run, workspace.base, console)
    return run


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def train_packed(runs: Sequence[Run], *, patience: int = 0, on_status: Callable[[Job], None] | None = None) -> dict[str, str]:
    """Train locked run folders of one recipe as one pack. Returns the final status of each run by name.

    Runs that were started before resume from their newest checkpoint. Console output goes to console.log only.
    """
    jobs: list[Job] = []

    def on_end(job: Job) -> None:
        if job.status not in ("running", "failed"):
            job.run.close()
            close_job(job, job.status)
        if on_status:
            on_status(job)

    with ExitStack() as stack:
        try:
            for run in runs:
                jobs.append(open_quietly(run, stack))
            return fit_pack(as_pack(jobs), patience, on_end)
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            ended = {job.run.name for job in jobs if job.status != "running"}
            for run in runs:
                if run.name not in ended:
                    run.set_status(status, error=str(error)[:500])
            raise
        finally:
            for run in runs:
                run.close()


@contextmanager
def quiet_console(run: Run) -> Iterator[Console]:
    """A console that writes to console.log only."""
    with open(os.devnull, "w") as nowhere, closing(Console(run.path / "console.log", nowhere)) as console:
        yield console


def open_quietly(run: Run, stack: ExitStack) -> Job:
    """The job of a run folder, without terminal output; `stack` closes its files."""
    console = stack.enter_context(quiet_console(run))
    recipe, config = saved_config(run)
    begun = bool(run.status())
    run.set_status("running")
    return open_job(Launch(run, recipe, config, console, resumed=begun, clock=Stopwatch()), recipe.open_data(config))


def as_pack(jobs: list[Job]) -> Pack:
    """The pack of these jobs, with the system of their padded config."""
    recipe, _ = saved_config(jobs[0].run)
    padded_config = packable(jobs[0].system).padded_config([job.config for job in jobs])
    return Pack(jobs, recipe.build(padded_config, recipe.open_data(padded_config)).to(jobs[0].engine.device))
