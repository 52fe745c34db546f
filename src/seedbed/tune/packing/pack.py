"""Many runs of one shape trained as one stacked model, each with its own folder, rows, evaluations and checkpoints.

Between steps a trial is an ordinary job whose tensors are views of the stack: loop.py checks, logs, evaluates and saves it.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from seedbed import config as configs
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.track.text import format_value
from seedbed.train import guard, loop, reporting
from seedbed.train.capabilities import Packable
from seedbed.train.engine import cpu_threads, pick_device
from seedbed.train.job import Action, Job
from seedbed.train.optim import multiplier
from seedbed.train.stepper import StepQueue
from seedbed.train.system import System, named_optimizers
from seedbed.tune.packing.stack import Stack

# What trials may always differ in; a recipe adds keys of its own with `Packable.packable_keys`.
FREE_KEYS = frozenset({"seed", "steps", "keep", "ema"})
FREE_GROUPS = ("optim.", "schedule.", "every.", "guard.")
OnStatus = Callable[[Job], None]


def why_not_packed(system: System, configs_: Sequence[Config]) -> str:
    """Why runs with these configs cannot be one pack, in a clause; empty when they can. `system` is built from any of them."""
    if not isinstance(system, Packable):
        return "the recipe does not offer a packed objective"
    keys = system.packable_keys()
    if len(named_optimizers(system)) > 1:
        return "the recipe has several optimizers"
    for config in configs_:
        if reason := _why_not_alone(config):
            return reason
    first = configs.flatten(configs_[0])
    for config in configs_[1:]:
        for key in configs.diff(first, configs.flatten(config)):
            if key not in FREE_KEYS | keys and not key.startswith(FREE_GROUPS):
                return f"{key} differs"
        if bool(config.ema) != bool(configs_[0].ema):
            return "ema is off in some"
    return ""


def _why_not_alone(config: Config) -> str:
    """What keeps a run out of any pack."""
    packed = {"optim.kind": ("adamw",), "precision": ("fp32", "tf32"), "accum": (1,), "ema2": (0.0,), "remat": ("none",)}
    packed |= {"compile_autograd": (False,), "compile_optimizer": (False,)}
    found = [
        f"{key}={format_value(value)}" for key, value in configs.flatten(config).items() if value not in packed.get(key, (value,))
    ]
    found += [f"budget={config.budget:g}"] if config.budget else []
    found += [f"limit.train={config.limit.train}"] if config.limit.train else []
    device = pick_device("auto").type if config.device == "auto" else config.device
    found += ["device=mps"] if device == "mps" else []
    return found[0] if found else ""


@dataclass
class PackedTrial:
    job: Job
    row: int
    last_step: int
    actions: list[Action]
    turn: int = 0  # how often the run was rolled back: results of steps from before that are ignored

    def __post_init__(self) -> None:
        self.joined = self.job.step, self.job.clock["train"]

    @property
    def training(self) -> bool:
        return self.job.status == "running"

    @property
    def at_end(self) -> bool:
        return self.job.step >= self.last_step

    @property
    def seconds_per_step(self) -> float:
        step, seconds = self.joined
        return (self.job.clock["train"] - seconds) / max(self.job.step - step, 1)


@dataclass
class Pack:
    """Jobs that train together, and `template`, the system built from their padded config."""

    jobs: list[Job]
    template: System
    stop_signal: int = 0
    on_status: OnStatus | None = field(init=False, default=None)
    trials: list[PackedTrial] = field(init=False)
    stack: Stack = field(init=False)
    queue: StepQueue = field(init=False)

    def __post_init__(self) -> None:
        if reason := why_not_packed(self.template, [job.config for job in self.jobs]):
            raise UserError(f"these runs cannot be packed: {reason}; train them one by one")
        self._in_flight: deque[list[tuple[PackedTrial, int, int]]] = deque()
        self._prepare_seconds = 0.0
        for job in self.jobs[1:]:
            job.watch.memories = []  # memory is the process's: the first trial watches it
        self._assemble(self.jobs)

    def _assemble(self, jobs: Sequence[Job]) -> None:
        self.stack = Stack(jobs, self.template)
        self.queue = StepQueue(self.stack, self.stack, self._log)
        self.trials = []
        for row, job in enumerate(jobs):
            self.trials.append(PackedTrial(job, row, job.num_steps, loop.actions(job)))
            for unit in job.stepper.runner.units:
                unit._compiled_call_impl = None  # compiling a run's model for its evaluations takes longer than they do
            job.stepper.runner = self.queue.runner

    @property
    def training(self) -> list[PackedTrial]:
        return [trial for trial in self.trials if trial.training]

    def prepare(self) -> None:
        """Compile and capture before the clocks start."""
        start = time.perf_counter()
        with contextlib.ExitStack() as timers:
            for trial in self.training:
                timers.enter_context(trial.job.clock.timer("compile"))
            self._begin()
            self.queue.runner.prepare()
        self._prepare_seconds = time.perf_counter() - start
        for trial in self.training:
            trial.job.run.event(trial.job.step, "pack", replicas=len(self.trials), step_runs=self.queue.runner.how)
        self._log(f"step: {self.queue.runner.how}; one of {len(self.trials)} runs in a pack")

    def notify(self, job: Job) -> None:
        """Call `on_status` for a run, with all clocks paused."""
        if self.on_status:
            with self.clocks_paused():
                self.on_status(job)

    def _log(self, text: str) -> None:
        for trial in self.training:
            trial.job.console.line(text)

    def _begin(self) -> None:
        """Set each run's learning rate, EMA weight and next item; finished runs repeat their last step, halted."""
        jobs = [trial.job for trial in self.trials]
        rates = [multiplier(job.config.schedule, job.progress, job.step + 1) for job in jobs]
        averaging = [job.engine.ema.weight(job.step) if job.engine.ema else 0.0 for job in jobs]
        self.stack.begin(rates, averaging, [job.counter for job in jobs])

    def take_step(self) -> None:
        self._begin()
        self.queue.launch(0)
        taken = []
        for trial in self.training:
            job = trial.job
            job.step_history.add(job.step + 1, job.counter, job.items, job.system.variant(job.step, job.config.steps))
            job.step += 1
            job.items += job.config.batch
            taken.append((trial, job.step, trial.turn))
        self._in_flight.append(taken)

    def read_results(self, leave: int) -> set[int]:
        """Check and log results until `leave` steps are outstanding; returns the rows of runs that were rolled back or ended."""
        sent_back = set()
        while (found := self.queue.readback.pop(leave)) is not None:
            columns = list(zip(*found[1], strict=True))
            for trial, step, turn in self._in_flight.popleft():
                job = trial.job
                if turn != trial.turn or not trial.training:
                    continue
                if not loop.accept_step(job, self.queue.result(step, list(columns[trial.row]))):
                    trial.turn += 1
                    sent_back.add(trial.row)
                if step % job.config.every.log == 0:
                    self.notify(job)
        return sent_back

    @contextlib.contextmanager
    def clocks_paused(self) -> Iterator[None]:
        """Pause every run's clock: no run trains while one of them evaluates, samples or saves."""
        for trial in self.training:
            trial.job.clock.pause()
        try:
            yield
        finally:
            for trial in self.training:
                trial.job.clock.resume()

    def act(self, trial: PackedTrial, act: Callable[[Job], object]) -> None:
        """Do something with one run; an error ends only that run."""
        job = trial.job
        with self.clocks_paused():
            try:
                job.engine.begin(job.step - 1, job.items / job.total_items)  # recipes may read the run's progress from it
                act(job)
            except Exception as error:
                job.status = "failed"
                job.run.event(job.step, "end", status="failed", error=str(error)[:500])
                job.run.set_status("failed", error=str(error)[:500])
                job.console.line(f"step {job.step}: this run ends here: {type(error).__name__}: {error}")

    def end(self, trial: PackedTrial) -> None:
        if trial.job.status != "failed":
            self.act(trial, loop.finish)
        self.stack.detach(trial.row)
        with self.clocks_paused():
            trial.job.clock.pause()
            reporting.write_history(trial.job)
            trial.job.stepper.feed.close()
        self.notify(trial.job)

    def shrink(self) -> None:
        """Remove finished runs from the stack, once they are half of it or more and the saving is worth it."""
        left = self.training
        if not left or 2 * len(left) > len(self.trials) or not self._pays(left):
            return
        self.read_results(leave=0)
        kept = [trial.job for trial in self.training]
        if kept:
            self._assemble(kept)
            self.prepare()

    def _pays(self, left: list[PackedTrial]) -> bool:
        """Whether smaller steps save more time to the end than preparing them takes, by the times measured so far."""
        steps = max(trial.last_step - trial.job.step for trial in left)
        share = 1.0 - len(left) / len(self.trials)
        return steps * share * left[0].seconds_per_step >= self._prepare_seconds


def fit_pack(pack: Pack, patience: int = 0, on_status: OnStatus | None = None) -> dict[str, str]:
    """Train every run until it is done, stopped or failed; returns statuses by run name.

    `patience` evaluations in a row without a better one end a run early. `on_status` is called at its log points, after its
    evaluations and at its end.
    """
    pack.on_status = on_status
    for job in pack.jobs:
        job.patience = patience
    handlers = guard.catch_signals(pack)
    try:
        pack.prepare()
        with cpu_threads(pack.template.num_cpu_threads), guard.gc_paused():
            _start(pack)
            while pack.training and not pack.stop_signal:
                _step_and_act(pack)
            pack.read_results(leave=0)
            for trial in pack.trials:
                if pack.stack.is_attached(trial.row):  # stopped by a signal: saved at its present step
                    trial.job.stop_signal = pack.stop_signal
                    pack.end(trial)
    finally:
        for trial in pack.training:
            pack.stack.detach(trial.row)
            trial.job.stepper.feed.close()
        guard.restore_signals(handlers)
    return {job.run.name: job.status for job in pack.jobs}


def _start(pack: Pack) -> None:
    for trial in pack.training:
        job = trial.job
        job.stepper.feed.load(job.counter)  # the watchers use the loaded batch
        job.meter.start(job.items, job.clock["train"], job.stepper.feed.wait)
        job.clock.start("train")
    _finish_trials_at_end(pack)


def _step_and_act(pack: Pack) -> None:
    """One step of all runs, and the actions that are due after it."""
    pack.take_step()
    sent_back = pack.read_results(leave=1)
    due = [
        (trial, trial.turn, action)
        for trial in pack.training
        for action in trial.actions
        if trial.row not in sent_back and action.due(trial.job.step) and not trial.at_end
    ]
    if due or any(trial.at_end for trial in pack.training):
        pack.read_results(leave=0)
    for trial, turn, action in due:
        if trial.training and turn == trial.turn:
            pack.act(trial, action.run)
            if action.run is loop.evaluate and trial.training:
                pack.notify(trial.job)
    if due:
        guard.gc_collect()
    _finish_trials_at_end(pack)
    pack.shrink()


def _finish_trials_at_end(pack: Pack) -> None:
    for trial in pack.trials:
        if (trial.at_end or not trial.training) and pack.stack.is_attached(trial.row):
            pack.end(trial)
