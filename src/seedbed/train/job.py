"""One run in this process: its parts, its counters, and the actions between its steps."""

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.track.clocks import Meter, Stopwatch
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train import checkpoint
from seedbed.train.engine import Engine
from seedbed.train.guard import Incidents
from seedbed.train.stepper import StepHistory, Stepper
from seedbed.train.system import System, flops_per_item
from seedbed.train.watch import Watch

if TYPE_CHECKING:
    from seedbed.train.async_saving import Saver

# Log points over which a run's speed is measured.
NUM_LOG_POINTS = 6


@dataclass
class Job:
    """The parts of a run and its counters."""

    run: Run
    config: Config
    system: System
    data: Data
    engine: Engine
    console: Console
    step: int = 0
    items: int = 0
    skipped_items: int = 0
    total_items: int = 0
    best: float | None = None
    best_step: int = 0
    last_loss: float = float("nan")
    status: str = "running"
    stop_signal: int = 0
    patience: int = 0
    until: int = 0
    async_saves: bool = False  # write checkpoints during training; several ranks always do
    pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=NUM_LOG_POINTS))
    clock: Stopwatch = field(default_factory=Stopwatch)
    saver: "Saver | None" = None  # of asynchronous checkpoints, made with the first one
    stepper: Stepper = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = self.engine.ranks
        self.part = checkpoint.Part(self.ranks.background, self.engine.rows, lambda: self.run.origin(self.config))
        self._all_stop = False
        self.run.on_removed = self._stop_when_removed
        self.stepper = Stepper(self.engine, self.data.train, self.console.line, lambda: self.clock.timer("compile"))
        self.incidents = Incidents(self.config.guard)
        self.step_history = StepHistory()
        self.watch = Watch(self.engine, self.stepper.feed)
        self.meter = Meter(flops_per_item(self.system) / self.ranks.world, self.engine.device, self.config.precision)
        self.total_items = self.config.steps * self.config.batch

    @property
    def is_stopped(self) -> bool:
        """Whether the run was asked to stop, and with several ranks, whether all of them know."""
        return 0 < self.until <= self.step or (bool(self.stop_signal) if self.ranks.is_single else self._all_stop)

    def _stop_when_removed(self) -> None:
        """Stop a run whose folder was removed at its next step, as after SIGTERM: saved, in a new folder."""
        self.stop_signal = self.stop_signal or signal.SIGTERM
        self.console.attach(self.run.path / "console.log")

    def stop_together(self) -> None:
        """Stop on every rank, after a step has shared that one of them was asked to."""
        self._all_stop, self.stop_signal = True, self.stop_signal or signal.SIGTERM

    @property
    def counter(self) -> int:
        """The next sample of the data order; roll-backs skip the samples before an incident."""
        return self.items + self.skipped_items

    @property
    def num_steps(self) -> int:
        """The step at which the run ends, at the present batch size."""
        return self.step + -(-(self.total_items - self.items) // self.config.batch)

    @property
    def progress(self) -> float:
        """The share of the run done once the next step is taken."""
        return (self.items + self.config.batch) / self.total_items

    def items_at(self, step: int) -> int:
        """The items seen by the end of a recent step."""
        return self.items - (self.step - step) * self.config.batch


@dataclass(frozen=True)
class Action:
    """Something that is done every n steps and at the end of the run; 0 means only at the end.

    Every rank calls `run`, so it may use collectives; test `job.ranks.is_primary` for what only one rank does.
    """

    every: int
    run: Callable[[Job], object]

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0
