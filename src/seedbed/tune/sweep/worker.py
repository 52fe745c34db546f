"""A worker of a sweep: claims trials, trains them alone or packed, and records their results."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from seedbed.config import Config
from seedbed.recipes import Recipe
from seedbed.recipes.saved import require_trusted
from seedbed.track import folders
from seedbed.tune.sweep import grid
from seedbed.tune.sweep.folder import Sweep, Trial, TrialStatus


@dataclass(frozen=True)
class Workspace:
    """What the training of a trial needs to know about its sweep."""

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
        config = grid.config_of(self.base, self.sweep.grid, trial.settings)
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
    """Trains trials: seedbed.launch.trials, passed in from the command line."""

    def groups(self, workspace: Workspace, trials: Sequence[Trial], most: int | None) -> list[Group]: ...

    def train(self, workspace: Workspace, trials: Sequence[Trial]) -> Outcome: ...


class Listener(Protocol):
    """Is notified when trials start and end."""

    def on_start(self, trials: Sequence[Trial]) -> None: ...

    def on_end(self, found: TrialStatus) -> None: ...


class Worker:
    """Works until nothing is left to claim. `most` limits a pack, 1 for none; `more` adds further trials, if any."""

    def __init__(
        self, workspace: Workspace, launch: Launcher, listener: Listener, most: int | None, more: Callable[[], bool]
    ) -> None:
        self.workspace, self.launch, self.listener, self.most, self.more = workspace, launch, listener, most, more
        self._groups: list[Group] = []
        self._grouped: set[int] = set()

    def work(self) -> int:
        """Trains what can be claimed; returns the signal that stopped it, or 0."""
        while True:
            with self._claimed() as trials:
                if trials:
                    outcome = self._train(trials)
                    if outcome.stop_signal:
                        return outcome.stop_signal
            if not trials and not self.more():
                return 0

    def _train(self, trials: list[Trial]) -> Outcome:
        sweep = self.workspace.sweep
        # A worker may have died between the end of a run and the record of it.
        left = []
        for trial in trials:
            if found := sweep.record(trial):
                self.listener.on_end(found)
            else:
                left.append(trial)
        if not left:
            return Outcome()
        self.listener.on_start(left)
        outcome = self.launch.train(self.workspace, left)
        for trial in left:
            found = sweep.record(trial, outcome.errors.get(trial.number, ""))
            if found is None and not outcome.stop_signal:
                found = sweep.record(trial, "the run ended without a message; see its console.log")
            if found:
                self.listener.on_end(found)
        return outcome

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[list[Trial]]:
        """The next trials to train together, locked against other workers; none when all are done or taken."""
        sweep = self.workspace.sweep
        held: list[int] = []
        found: list[Trial] = []
        try:
            for first in self._waiting():
                group = self._group_of(first)
                for trial in group.trials:
                    if len(found) < group.most and (fd := sweep.claim(trial)) is not None:
                        held.append(fd)
                        found.append(trial)
                if found:
                    break
            yield found
        finally:
            for fd in held:
                folders.release(fd)

    def _waiting(self) -> list[Trial]:
        sweep = self.workspace.sweep
        return [trial for trial in sweep.trials() if sweep.result(trial) is None and not sweep.is_claimed(trial)]

    def _group_of(self, trial: Trial) -> Group:
        if trial.number not in self._grouped:
            # New trials since the last call: all of them at the start, a few suggestions later.
            fresh = [t for t in self._waiting() if t.number not in self._grouped]
            if self.most == 1 and not self._grouped:
                self.workspace.say("one by one: packs were declined (--no-pack)")
            found = [Group((t,)) for t in fresh] if self.most == 1 else self.launch.groups(self.workspace, fresh, self.most)
            self._groups += found
            self._grouped |= {t.number for group in found for t in group.trials}
        found = next((group for group in self._groups if trial in group.trials), None)
        return found or Group((trial,))
