"""Trials of a sweep on this machine: which of them may train as one stacked model, and the training itself."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

import torch

from seedbed.checks.preflight import before_training
from seedbed.config import Config
from seedbed.data.feed import Data, room
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.launch.packed import train_packed
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train.engine import pick_device
from seedbed.train.pack import why_not_packed
from seedbed.tune.batch import is_out_of_memory
from seedbed.tune.paper import count
from seedbed.tune.sweep.folder import Trial
from seedbed.tune.sweep.grid import words
from seedbed.tune.sweep.worker import Group, Outcome, Room

MAX_PACK = 128
# A pack keeps more for its backward pass than its runs would alone: draws and masks, and stacked copies.
PACK_WASTE = 1.5
# A smaller run joins a larger one's pack while at least this share of the work is its own.
LEAST_SHARE = 0.5


def check(office: Room, trial: Trial) -> list[str]:
    """The quick checks, once for the whole sweep, on its first trial; the ids of those that failed."""
    config, folder = office.config(trial), office.sweep.path
    report = before_training(office.recipe, office.preset, config, root=office.sweep.root, folder=folder, say=office.say)
    return [finding.id for finding in report.of("err")]


# ---- who trains with whom --------------------------------------------------------------------------------------------


def groups(office: Room, trials: Sequence[Trial], most: int | None) -> list[Group]:
    """Trials by the packs they may form; says why where they must train one by one."""
    try:
        return _groups(office, trials, most)
    except Exception as error:
        # One of them may be broken, and will say so when its turn comes; the others shall train.
        office.say(f"one by one: packs cannot be planned ({_reason(error)})")
        return [Group((trial,)) for trial in trials]


def _groups(office: Room, trials: Sequence[Trial], most: int | None) -> list[Group]:
    configs = {trial.number: office.config(trial) for trial in trials}
    data = office.recipe.open_data(configs[trials[0].number])
    system = office.recipe.build(configs[trials[0].number], data)
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
    found = [part for pack in packs for part in _alike(office, pack, configs, data)]
    _tell(office, found, list(reasons))
    return [Group(tuple(pack), _most(office, [configs[t.number] for t in pack], data, most)) for pack in found]


def _alike(office: Room, pack: list[Trial], configs: dict[int, Config], data: Data) -> list[list[Trial]]:
    """A pack's trials apart where most of a smaller one's steps would be masked work."""
    if len(pack) == 1:
        return [pack]
    costs = {t.number: office.recipe.build(configs[t.number], data).flops_per_item() for t in pack}
    parts: list[list[Trial]] = []
    for trial in sorted(pack, key=lambda t: -costs[t.number]):
        if parts and costs[trial.number] >= LEAST_SHARE * costs[parts[-1][0].number]:
            parts[-1].append(trial)
        else:
            parts.append([trial])
    return [sorted(part, key=lambda t: t.number) for part in parts]


def _most(office: Room, configs: list[Config], data: Data, asked: int | None) -> int:
    """How many of these train at once: as many as fit into memory by an estimate on paper, unless a number was asked for."""
    if len(configs) == 1 or asked:
        return min(asked or 1, len(configs))
    envelope = office.recipe.build(configs[0], data).envelope(configs)
    each = PACK_WASTE * sum(count(office.recipe, envelope, data).memory(envelope.batch).values())
    fitting = max(1, int(1.2 * room(pick_device(envelope.device)) / each))
    if fitting < len(configs):
        office.say(f"memory for {fitting} of {len(configs)} runs at a time, by an estimate; --pack N overrides it")
    return min(fitting, MAX_PACK, len(configs))


def _tell(office: Room, packs: list[list[Trial]], reasons: list[str]) -> None:
    sizes = [len(pack) for pack in packs]
    together = [size for size in sizes if size > 1]
    if together:
        how = "one stacked model" if len(together) == 1 else f"stacked models of {' + '.join(map(str, together))}"
        office.say(f"packed: {sum(together)} trials train as {how}")
    if sum(sizes) > sum(together):
        why = "; ".join(reasons[:3]) or "masked work would be more than half"
        office.say(f"one by one: {sum(sizes) - sum(together)} trials ({why})")


# ---- training --------------------------------------------------------------------------------------------------------


def train(office: Room, trials: Sequence[Trial]) -> Outcome:
    """Train these to their ends, started or continued; what goes wrong with one of them is written down, the others go on."""
    if len(trials) == 1:
        return _train_alone(office, trials[0])
    try:
        return _train_pack(office, trials)
    except Exception as error:
        middle = len(trials) // 2 if is_out_of_memory(error) else 1
        office.say(f"the pack of {len(trials)} did not train ({_reason(error)}); going on in smaller parts")
    return _in_parts(office, trials, middle)


def _in_parts(office: Room, trials: Sequence[Trial], size: int) -> Outcome:
    torch.cuda.empty_cache()
    errors: dict[int, str] = {}
    for first in range(0, len(trials), size):
        outcome = train(office, trials[first : first + size])
        errors |= outcome.errors
        if outcome.stop_signal:
            return Outcome(outcome.stop_signal, errors)
    return Outcome(0, errors)


def _train_alone(office: Room, trial: Trial) -> Outcome:
    config = office.config(trial)
    try:
        with _run_of(office, trial) as (run, resumed), _console(run) as console:
            data = office.recipe.open_data(config)
            try:
                status = local._execute(run, office.recipe, config, data, console, resumed=resumed, patience=office.patience)
            except Exception:
                console.line(traceback.format_exc())
                raise
    except Exception as error:
        return Outcome(0, {trial.number: _reason(error)})
    return Outcome(max(status - 128, 0))


def _train_pack(office: Room, trials: Sequence[Trial]) -> Outcome:
    stops: list[int] = []
    with ExitStack() as held:
        runs = [held.enter_context(_run_of(office, trial))[0] for trial in trials]
        statuses = train_packed(runs, patience=office.patience, tell=lambda job: stops.append(job.stop_signal))
        failed = {trial: run for trial, run in zip(trials, runs, strict=True) if statuses[run.name] == "failed"}
        errors = {trial.number: str(run.status().get("error") or "failed") for trial, run in failed.items()}
    return Outcome(max(stops, default=0), errors)


@contextlib.contextmanager
def _run_of(office: Room, trial: Trial) -> Iterator[tuple[Run, bool]]:
    """The trial's run, locked, and whether it had been started before."""
    sweep, name = office.sweep, office.sweep.run_name(trial)
    if (sweep.root / name).is_dir():
        run, begun = Run.open(sweep.root, name), True
    else:
        run, begun = _new_run(office, trial, name), False
    with run.lock():
        # Without a status nothing was trained: its process died between the two lines above.
        yield run, begun and bool(run.status())


def _new_run(office: Room, trial: Trial, name: str) -> Run:
    sweep, config = office.sweep, office.config(trial)
    why = f"{sweep.facts.get('why') or 'sweep'}: {' '.join(words(trial.settings))}"
    about = {"name": name, "why": why, "code": office.code, "base": office.base, "sweep": sweep.name}
    run = Run.create(sweep.root, office.recipe.name, office.preset, config, **about)
    local._keep_recipe_files(office.recipe, run)
    with _console(run) as console:
        local._echo(run, config, office.base, console)
    return run


@contextlib.contextmanager
def _console(run: Run) -> Iterator[Console]:
    """A console that writes to the run's file only: the screen belongs to the sweep."""
    with open(os.devnull, "w") as nowhere, closing(Console(run.path / "console.log", nowhere)) as console:
        yield console


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
