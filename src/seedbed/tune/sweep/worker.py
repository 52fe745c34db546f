"""One worker of a sweep: claims trials, has them trained alone or as a pack, and writes down what came of them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from seedbed.config import Config
from seedbed.recipes import Recipe
from seedbed.track import locks
from seedbed.tune.sweep import grid
from seedbed.tune.sweep.folder import Standing, Sweep, Trial


@dataclass(frozen=True)
class Room:
    """All that the training of a trial needs to know of its sweep."""

    sweep: Sweep
    recipe: Recipe
    preset: str
    base: Config
    code: dict[str, Any]
    say: Callable[[str], None]

    @property
    def patience(self) -> int:
        return int(self.sweep.facts.get("patience") or 0)

    def config(self, trial: Trial) -> Config:
        return grid.config_of(self.base, self.sweep.grid, trial.settings)


@dataclass(frozen=True)
class Group:
    """Trials that may train as one stacked model, `most` of them at a time."""

    trials: tuple[Trial, ...]
    most: int = 1


@dataclass(frozen=True)
class Outcome:
    """How training went: the signal that stopped it, and what went wrong by the trial's number."""

    stop_signal: int = 0
    errors: dict[int, str] = field(default_factory=dict)


class Launch(Protocol):
    """Who trains: seedbed.launch.trials, handed in from the command line."""

    def groups(self, room: Room, trials: Sequence[Trial], most: int | None) -> list[Group]: ...

    def train(self, room: Room, trials: Sequence[Trial]) -> Outcome: ...


class Watcher(Protocol):
    """Who shows the work to a person."""

    def began(self, trials: Sequence[Trial]) -> None: ...

    def ended(self, found: Standing) -> None: ...


class Worker:
    """Works until nothing is left to claim. `most` bounds a pack, 1 for none; `more` writes down further trials, if any."""

    def __init__(self, room: Room, launch: Launch, watcher: Watcher, most: int | None, more: Callable[[], bool]) -> None:
        self.room, self.launch, self.watcher, self.most, self.more = room, launch, watcher, most, more
        self._groups: list[Group] = []
        self._grouped: set[int] = set()

    def work(self) -> int:
        """Train what can be claimed; the signal that ended the work, or 0."""
        while True:
            with self._claimed() as trials:
                if trials:
                    outcome = self._train(trials)
                    if outcome.stop_signal:
                        return outcome.stop_signal
            if not trials and not self.more():
                return 0

    def _train(self, trials: list[Trial]) -> Outcome:
        sweep = self.room.sweep
        # A worker may have died between the end of a run and the record of it.
        left = [trial for trial in trials if not self._record(trial)]
        if not left:
            return Outcome()
        self.watcher.began(left)
        outcome = self.launch.train(self.room, left)
        for trial in left:
            found = sweep.record(trial, outcome.errors.get(trial.number, ""))
            if found is None and not outcome.stop_signal:
                found = sweep.record(trial, "the run ended without a word; see its console.log")
            if found:
                self.watcher.ended(found)
        return outcome

    def _record(self, trial: Trial) -> bool:
        found = self.room.sweep.record(trial)
        if found:
            self.watcher.ended(found)
        return found is not None

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[list[Trial]]:
        """The next trials to train together, held against other workers; none when all are done or taken."""
        sweep = self.room.sweep
        held: dict[int, int] = {}
        found: list[Trial] = []
        try:
            for first in self._waiting():
                group = self._group_of(first)
                for trial in group.trials:
                    if len(found) < group.most and (fd := sweep.claim(trial)) is not None:
                        held[trial.number] = fd
                        found.append(trial)
                if found:
                    break
            yield found
        finally:
            for fd in held.values():
                locks.release(fd)

    def _waiting(self) -> list[Trial]:
        sweep = self.room.sweep
        return [trial for trial in sweep.trials() if sweep.result(trial) is None and not sweep.is_claimed(trial)]

    def _group_of(self, trial: Trial) -> Group:
        if trial.number not in self._grouped:
            # What came since the last look: all of it at the start, a few suggestions later.
            fresh = [t for t in self._waiting() if t.number not in self._grouped]
            found = [Group((t,)) for t in fresh] if self.most == 1 else self.launch.groups(self.room, fresh, self.most)
            self._groups += found
            self._grouped |= {t.number for group in found for t in group.trials}
        found = next((group for group in self._groups if trial in group.trials), None)
        return found or Group((trial,))
