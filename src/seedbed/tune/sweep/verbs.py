"""The verb `sweep`: start, join or show one. Listings need no torch, so whoever trains is asked for only when it is time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.recipes import Recipe, find, find_saved
from seedbed.track import code, queue
from seedbed.track.listing import print_json
from seedbed.track.run import full_name
from seedbed.tune.sweep import grid as grids
from seedbed.tune.sweep import report as reports
from seedbed.tune.sweep import suggest
from seedbed.tune.sweep.folder import Sweep, Trial, default_name
from seedbed.tune.sweep.grid import Grid, words
from seedbed.tune.sweep.screen import Screen
from seedbed.tune.sweep.worker import Launch, Room, Worker

EXIT_OK, EXIT_FAILED = 0, 1
# How many suggestions train together where they can be packed.
SUGGESTED_TOGETHER = 8


class Checker(Launch, Protocol):
    """Who trains, and looks at a recipe before it does."""

    def check(self, room: Room, trial: Trial) -> list[str]: ...


@dataclass(frozen=True)
class Options:
    """How this process works on the sweep; another one may work in another way."""

    root: Path
    dirty: bool = False
    json: bool = False
    check: bool = True
    most: int | None = None
    suggest: int | None = None
    retry: bool = False


def show(root: Path, name: str, as_json: bool) -> int:
    """Print where a sweep stands."""
    found = reports.look(Sweep.open(root, name))
    told = queue.told(found.sweep.path)
    if as_json:
        return print_json({**found.to_json(), "queue": told or None})
    reports.print_report(found)
    if told:
        print(f"queue: {told}")
    return EXIT_OK


@dataclass(frozen=True)
class Draft:
    """A sweep that has been read and found right, and not yet written anywhere."""

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
        """The settings of the first trial."""
        return grids.config_of(self.base, self.grid, self.settings[0] if self.settings else _end(self.grid, "low"))

    def write(self, root: Path) -> Sweep:
        """The sweep's folder, or the one that is there when it is the same sweep."""
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
) -> Draft:
    """Read a sweep; everything is refused here, before anything is written."""
    recipe, preset = find(recipe_name)
    base = recipe.preset(preset)
    assert preset is not None
    searching = options.suggest is not None
    grid = grids.read(base, assignments, num_seeds, searching)
    settings = _checked_cells(base, grid, searching, full_name(recipe.name, preset))
    if searching:
        suggest.require(sampler)
    state = code.state(Path.cwd(), options.root)
    code.require_clean(state, options.dirty)
    facts = {"recipe": recipe.name, "preset": preset, "patience": patience, "sampler": sampler if searching else None}
    facts |= {"why": why, "suggest": options.suggest, "code": {k: v for k, v in state.items() if k != "patch"}}
    commas = grids.takes_commas(base, assignments)
    notes = [
        f"note: {word} is one value in every trial, its commas belong to it; | separates values: 'key=1,2|3,4'" for word in commas
    ]
    return Draft(recipe, preset, base, grid, settings, name or default_name(recipe.name, preset, grid), facts, state, notes)


def start(made: Draft, options: Options, launch: Callable[[], Checker]) -> int:
    """Start a sweep, or go on with it when it is there."""
    sweep = made.write(options.root)
    screen = Screen(sweep, quiet=options.json)
    for note in made.notes:
        screen.say(note)
    return _work(Room(sweep, made.recipe, made.preset, made.base, made.code, screen.say), options, launch, screen)


def join(name: str, options: Options, launch: Callable[[], Checker]) -> int:
    """Work on a sweep that was started before, here or on another machine that sees the same disk."""
    sweep = Sweep.open(options.root, name)
    recipe = find_saved(sweep.facts["recipe"], sweep.path.parent)
    preset = sweep.facts["preset"]
    if sweep.facts.get("sampler"):
        suggest.require(sweep.facts["sampler"])
    state = code.state(Path.cwd(), options.root)
    code.require_clean(state, options.dirty)
    screen = Screen(sweep, quiet=options.json)
    return _work(Room(sweep, recipe, preset, recipe.preset(preset), state, screen.say), options, launch, screen)


def _checked_cells(base: Config, grid: Grid, searching: bool, title: str) -> list[dict[str, Any]]:
    """The trials to begin with, each a config that can be built."""
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


def _work(room: Room, options: Options, launch: Callable[[], Checker], screen: Screen) -> int:
    sweep = room.sweep
    _greet(room, options)
    trials = _first_trials(room, options)
    if any(sweep.result(trial) is None for trial in trials):
        train = launch()
        if options.check and not _passed(room, train, trials):
            return EXIT_FAILED
        with screen.showing():
            stopped = Worker(room, train, screen, options.most, lambda: _more(room, options)).work()
        screen.close()
        if stopped:
            screen.say(f"stopped, every trial is saved; go on with: seedbed sweep --join {sweep.name}")
            return 128 + stopped
    return _close(room, options)


def _first_trials(room: Room, options: Options) -> list[Trial]:
    if options.retry and (num := room.sweep.forget_failures()):
        room.say(f"{num} failed trials are tried again")
    if room.sweep.facts.get("sampler"):
        _more(room, options)
    return room.sweep.trials()


def _more(room: Room, options: Options) -> bool:
    """Further trials where a suggester names them; whether there are any."""
    if not room.sweep.facts.get("sampler"):
        return False
    num = options.suggest or int(room.sweep.facts["suggest"])
    return bool(suggest.add(room.sweep, num, 1 if options.most == 1 else SUGGESTED_TOGETHER))


def _greet(room: Room, options: Options) -> None:
    sweep = room.sweep
    varied = [f"{axis.key} {len(axis.values)}" for axis in sweep.grid.axes] + [
        f"{span.key} suggested" for span in sweep.grid.spans
    ]
    room.say(f"sweep {sweep.name} ({sweep.title()}): {' x '.join(varied)} -> {sweep.path}")
    was, now = (sweep.facts.get("code") or {}).get("commit"), room.code.get("commit")
    if was != now:
        room.say(f"note: the code has moved since this sweep was made, from {str(was)[:10]} to {str(now)[:10]}")


def _passed(room: Room, train: Checker, trials: list[Trial]) -> bool:
    """The quick checks, once per sweep: whoever joins later relies on the first verdict."""
    if (room.sweep.path / "preflight.json").is_file():
        return True
    failed = train.check(room, trials[0])
    if failed:
        (room.sweep.path / "preflight.json").unlink(missing_ok=True)
        room.say(f"preflight: {', '.join(failed)}: not started; mend it, or start all the same with --no-check")
    return not failed


def _close(room: Room, options: Options) -> int:
    """The report at the end of this worker's part."""
    found = reports.look(room.sweep)
    if options.json:
        print_json(found.to_json())
    else:
        reports.print_report(found)
        left = found.counts.get("running", 0) + found.counts.get("waiting", 0)
        if left:
            print(f"{left} trials are still being worked on elsewhere; look again with: seedbed sweep --show {room.sweep.name}")
        print("\n".join(str(path) for path in sorted(room.sweep.path.glob("*")) if path.name in ("report.md", "heatmap.png")))
    return EXIT_FAILED if found.counts.get("failed") else EXIT_OK
