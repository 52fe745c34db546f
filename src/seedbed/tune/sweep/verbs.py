"""The verb `sweep`: start, join or show a sweep; a worker claims trials, trains them alone or packed, and records their results.

Torch is imported only for training.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from seedbed import config as configs
from seedbed.config import Config, keys
from seedbed.errors import EXIT_FAILED, EXIT_OK, UserError
from seedbed.recipes import Recipe, find, remember
from seedbed.recipes.saved import confirm_functions, confirm_saved, find_saved, require_trusted
from seedbed.report import slurm_queue
from seedbed.report.findings import Finding
from seedbed.track import code, folders
from seedbed.track.jsonl import print_json
from seedbed.track.run import full_name
from seedbed.track.text import width
from seedbed.trust import Code
from seedbed.tune.sweep import grid as grids
from seedbed.tune.sweep import report as reports
from seedbed.tune.sweep import suggest
from seedbed.tune.sweep.folder import Sweep, Trial, default_name
from seedbed.tune.sweep.grid import Grid, words
from seedbed.tune.sweep.screen import Screen

# Number of suggestions that train as a pack.
SUGGESTED_TOGETHER = 8


@dataclass(frozen=True)
class Options:
    root: Path
    dirty: bool = False
    json: bool = False
    check: bool = True
    most: int | None = None
    suggest: int | None = None
    retry: bool = False

    def clean_code(self) -> dict[str, Any]:
        state = code.state(Path.cwd(), self.root)
        code.require_clean(state, self.dirty)
        return state


@dataclass(frozen=True)
class Workspace:
    """What the training of a trial needs to know about its sweep, and this process's options."""

    sweep: Sweep
    recipe: Recipe
    preset: str
    base: Config
    code: dict[str, Any]
    options: Options
    screen: Screen

    @property
    def patience(self) -> int:
        return int(self.sweep.facts.get("patience") or 0)

    def say(self, text: str) -> None:
        self.screen.say(text)

    def config(self, trial: Trial) -> Config:
        config = grids.config_of(self.base, self.sweep.grid, trial.settings)
        require_trusted(config, self.sweep.path)
        return config


@dataclass(frozen=True)
class Group:
    """Trials that may train as one stacked model, `most` of them at a time."""

    trials: tuple[Trial, ...]
    most: int = 1


@dataclass(frozen=True)
class Outcome:
    """The signal that stopped training, and errors by trial number."""

    stop_signal: int = 0
    errors: dict[int, str] = field(default_factory=dict)


class Launcher(Protocol):
    """Checks and trains trials: seedbed.launch.trials, passed in from the command line."""

    def check(self, workspace: Workspace, trial: Trial) -> list[Finding]: ...

    def groups(self, workspace: Workspace, trials: Sequence[Trial], most: int | None) -> list[Group]: ...

    def train(self, workspace: Workspace, trials: Sequence[Trial]) -> Outcome: ...


class Worker:
    """Works until nothing is left to claim."""

    def __init__(self, workspace: Workspace, launch: Launcher) -> None:
        self.workspace, self.launch, self.screen = workspace, launch, workspace.screen
        self._groups: dict[int, Group] = {}  # by the numbers of their trials

    def work(self) -> int:
        """Trains what can be claimed; returns the signal that stopped it, or 0."""
        while True:
            with self._claimed() as trials:
                stop_signal = self._train(trials) if trials else 0
            if stop_signal or (not trials and not _more(self.workspace)):
                return stop_signal

    def _train(self, trials: list[Trial]) -> int:
        # A worker may have died between the end of a run and the record of it.
        left = [trial for trial in trials if not self._recorded(trial)]
        if not left:
            return 0
        self.screen.on_start(left)
        outcome = self.launch.train(self.workspace, left)
        for trial in left:
            if not self._recorded(trial, outcome.errors.get(trial.number, "")) and not outcome.stop_signal:
                self._recorded(trial, "the run ended without a message; see its console.log")
        return outcome.stop_signal

    def _recorded(self, trial: Trial, error: str = "") -> bool:
        """Records and shows the result of a trial whose run has ended or failed; False when it can continue."""
        found = self.workspace.sweep.record(trial, error)
        if found:
            self.screen.on_end(found)
        return found is not None

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[list[Trial]]:
        """The next trials to train together, locked against other workers; none when all are done or taken."""
        found: list[Trial] = []
        with contextlib.ExitStack() as held:
            for first in self._waiting():
                group = self._group_of(first)
                for trial in group.trials:
                    if len(found) < group.most and (fd := self.workspace.sweep.claim(trial)) is not None:
                        held.callback(folders.release, fd)
                        found.append(trial)
                if found:
                    break
            yield found

    def _waiting(self) -> list[Trial]:
        sweep = self.workspace.sweep
        return [trial for trial in sweep.trials() if sweep.result(trial) is None and not sweep.is_claimed(trial)]

    def _group_of(self, trial: Trial) -> Group:
        if trial.number not in self._groups:
            # New trials since the last call: all of them at the start, a few suggestions later.
            fresh, most = [t for t in self._waiting() if t.number not in self._groups], self.workspace.options.most
            if most == 1 and not self._groups:
                self.workspace.say("one by one: packs were declined (--no-pack)")
            found = [Group((t,)) for t in fresh] if most == 1 else self.launch.groups(self.workspace, fresh, most)
            self._groups |= {t.number: group for group in found for t in group.trials}
        return self._groups.get(trial.number) or Group((trial,))


def show(root: Path, name: str, as_json: bool, metric: str | None = None) -> int:
    found = reports.read_report(Sweep.open(root, name), metric)
    queue = slurm_queue.describe(found.sweep.path)
    if as_json:
        return print_json({**found.to_json(), "queue": queue or None})
    print("\n".join(reports.lines_of(found, width())))
    if queue:
        print(f"queue: {queue}")
    return EXIT_OK


@dataclass(frozen=True)
class Draft:
    """A valid sweep that has not been written yet."""

    recipe: Recipe
    preset: str
    base: Config
    grid: Grid
    settings: list[dict[str, Any]]
    name: str
    facts: dict[str, Any]
    code: dict[str, Any]
    notes: list[str]

    @property
    def num_trials(self) -> int:
        return len(self.settings) or int(self.facts["suggest"])

    @property
    def config(self) -> Config:
        return grids.config_of(self.base, self.grid, self.settings[0] if self.settings else _end(self.grid, "low"))

    def remember(self) -> None:
        """Trusts the code that the user named for this sweep."""
        for axis in self.grid.axes:
            for value in axis.values if axis.key in keys.function_keys(self.base) else ():
                remember(self.recipe, configs.override(self.config, [f"{axis.key}={value}"]))
        remember(self.recipe, self.config)

    def write(self, root: Path) -> Sweep:
        return Sweep.create_or_join(root, self.name, self.grid, self.settings, **self.facts)


def draft(
    recipe_name: str,
    assignments: list[str],
    options: Options,
    *,
    name: str | None = None,
    why: str = "",
    num_seeds: int | None = None,
    patience: int = 0,
    sampler: str = "optuna",
    metric: str | None = None,
) -> Draft:
    """Reads and validates a sweep before anything is written."""
    recipe, preset = find(recipe_name)
    base = recipe.preset(preset)
    assert preset is not None
    searching = options.suggest is not None
    grid = grids.read(base, assignments, num_seeds, searching)
    settings = _checked_cells(base, grid, searching, full_name(recipe.name, preset))
    if searching:
        suggest.require(sampler)
    state = options.clean_code()
    facts = {"recipe": recipe.name, "preset": preset, "patience": patience, "sampler": sampler if searching else None}
    facts |= {"metric": metric} if metric else {}
    facts |= {"why": why, "suggest": options.suggest, "code": {k: v for k, v in state.items() if k != "patch"}}
    hint = "is one value in every trial, its commas belong to it; | separates values: 'key=1,2|3,4'"
    notes = [f"note: {word} {hint}" for word in grids.takes_commas(base, assignments)]
    return Draft(recipe, preset, base, grid, settings, name or default_name(recipe.name, preset, grid), facts, state, notes)


def start(made: Draft, options: Options, launch: Callable[[], Launcher]) -> int:
    made.remember()
    sweep = made.write(options.root)
    screen = Screen(sweep, quiet=options.json)
    for note in made.notes:
        screen.say(note)
    return _work(Workspace(sweep, made.recipe, made.preset, made.base, made.code, options, screen), launch)


def join(name: str, options: Options, launch: Callable[[], Launcher]) -> int:
    """Works on an existing sweep, here or on another machine that shares the disk."""
    sweep = Sweep.open(options.root, name)
    recipe, preset = find_saved(sweep.facts["recipe"], sweep.path), sweep.facts["preset"]
    if sweep.facts.get("sampler"):
        suggest.require(sweep.facts["sampler"])
    base, state, screen = recipe.preset(preset), options.clean_code(), Screen(sweep, quiet=options.json)
    return _work(Workspace(sweep, recipe, preset, base, state, options, screen), launch)


def confirm(root: Path, name: str) -> list[Code]:
    """Trusts the code that a sweep's folder names; returns it."""
    sweep = Sweep.open(root, name)
    found = confirm_saved(sweep.facts)
    base = find_saved(sweep.facts["recipe"], sweep.path).preset(sweep.facts["preset"])
    for trial in sweep.trials():
        found += confirm_functions(grids.config_of(base, sweep.grid, trial.settings))
    return list({code.path: code for code in found}.values())


def _checked_cells(base: Config, grid: Grid, searching: bool, title: str) -> list[dict[str, Any]]:
    """The initial trials, each with a valid config."""
    if searching:
        if not grid.spans and all(axis.key == "seed" for axis in grid.axes):
            raise UserError("there is nothing to suggest; name a range or choices: --suggest 20 optim.lr=1e-4..1e-2")
        for end in ("low", "high"):
            grids.config_of(base, grid, _end(grid, end))
        return []
    settings = grids.cells(grid)
    for cell in settings:
        grids.config_of(base, grid, cell)
    if len(settings) == 1:
        alone = " ".join(["seedbed train", title, *words(grid.fixed)])
        raise UserError(f"that is a single trial and no sweep; give a key several values, as in optim.lr=1e-3,3e-3, or: {alone}")
    return settings


def _end(grid: Grid, which: Literal["low", "high"]) -> dict[str, Any]:
    """The cell at one end of all ranges, with the first of the choices."""
    spans = {span.key: span.value(getattr(span, which)) for span in grid.spans}
    return spans | {axis.key: axis.values[0] for axis in grid.axes}


def _work(workspace: Workspace, launch: Callable[[], Launcher]) -> int:
    sweep, screen, options = workspace.sweep, workspace.screen, workspace.options
    _greet(workspace)
    if options.retry and (num := sweep.forget_failures()):
        workspace.say(f"{num} failed trials are tried again")
    _more(workspace)
    trials = sweep.trials()
    if any(sweep.result(trial) is None for trial in trials):
        train = launch()
        if options.check and not _passed(workspace, train, trials):
            return EXIT_FAILED
        with screen.showing():
            stopped = Worker(workspace, train).work()
        screen.close()
        if stopped:
            screen.say(f"stopped, every trial is saved; continue with: seedbed sweep --join {sweep.name}")
            return 128 + stopped
    found = reports.read_report(sweep)
    if options.json:
        print_json(found.to_json())
    else:
        print("\n".join(reports.lines_of(found, width())))
        left = found.counts.get("running", 0) + found.counts.get("waiting", 0)
        if left:
            print(f"{left} trials are still being worked on elsewhere; look again with: seedbed sweep --show {sweep.name}")
        paths = (sweep.path / name for name in ("heatmap.png", "report.md"))
        print("\n".join(str(path) for path in paths if path.exists()))
    return EXIT_FAILED if found.counts.get("failed") else EXIT_OK


def _more(workspace: Workspace) -> bool:
    """Adds suggested trials; whether there are any."""
    options = workspace.options
    if not workspace.sweep.facts.get("sampler"):
        return False
    num = options.suggest or int(workspace.sweep.facts["suggest"])
    return bool(suggest.add(workspace.sweep, num, 1 if options.most == 1 else SUGGESTED_TOGETHER))


def _greet(workspace: Workspace) -> None:
    sweep = workspace.sweep
    varied = [f"{axis.key} {len(axis.values)}" for axis in sweep.grid.axes]
    varied += [f"{span.key} suggested" for span in sweep.grid.spans]
    workspace.say(f"sweep {sweep.name} ({sweep.title()}): {' x '.join(varied)} -> {sweep.path}")
    was, now = (sweep.facts.get("code") or {}).get("commit"), workspace.code.get("commit")
    if was != now:
        workspace.say(f"note: the code has moved since this sweep was made, from {str(was)[:10]} to {str(now)[:10]}")


def _passed(workspace: Workspace, train: Launcher, trials: list[Trial]) -> bool:
    """The quick checks, once per sweep: workers that join later rely on the first verdict."""
    if (workspace.sweep.path / "preflight.json").is_file():
        return True
    failed = train.check(workspace, trials[0])
    if failed:
        (workspace.sweep.path / "preflight.json").unlink(missing_ok=True)
        ids = " ".join(finding.id for finding in failed)
        workspace.say(f"preflight: {ids}: not started; fix it, or start anyway with --no-check")
    return not failed
