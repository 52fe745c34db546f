"""Many runs of one shape trained as one stacked model, each with its own folder, rows, evaluations and checkpoints.

Between steps a replica is an ordinary job whose tensors happen to be views: loop.py judges, logs, evaluates and saves it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from seedbed import config as configs
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.track.text import spell
from seedbed.train import garbage, loop
from seedbed.train.capture import Readback, StepRunner
from seedbed.train.loop import Instrument, Job
from seedbed.train.schedule import multiplier
from seedbed.train.stack import Stack
from seedbed.train.system import System

# What replicas may always differ in; a recipe adds keys of its own with `System.packs`.
FREE_KEYS = frozenset({"seed", "steps", "keep", "ema"})
FREE_GROUPS = ("optim.", "schedule.", "every.", "guard.")
Tell = Callable[[Job], None]


def why_not_packed(system: System, configs_: Sequence[Config]) -> str:
    """Why runs with these configs cannot be one pack, in a clause; empty when they can. `system` is built from any of them."""
    keys = system.packs()
    if isinstance(keys, str):
        return keys
    if len(system.players()) > 1:
        return "the recipe has several players"
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
    packed = {"optim.kind": ("adamw",), "precision": ("fp32", "tf32"), "accum": (1,), "ema2": (0.0,), "recompute": ("none",)}
    packed |= {"compile_autograd": (False,), "compile_optimizer": (False,)}
    found = [f"{key}={spell(value)}" for key, value in configs.flatten(config).items() if value not in packed.get(key, (value,))]
    found += [f"budget={config.budget:g}"] if config.budget else []
    found += [f"limit.train={config.limit.train}"] if config.limit.train else []
    found += ["device=mps"] if config.device == "mps" else []
    return found[0] if found else ""


@dataclass
class Replica:
    """One run of a pack."""

    job: Job
    row: int
    last_step: int
    tools: list[Instrument]
    turn: int = 0  # how often the run was sent back: measurements of steps from before that are void

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
    """Jobs that train together, and `template`, the system built from their envelope."""

    jobs: list[Job]
    template: System
    stop_signal: int = 0
    tell: Tell | None = field(init=False, default=None)
    replicas: list[Replica] = field(init=False)
    stack: Stack = field(init=False)
    runner: StepRunner = field(init=False)

    def __post_init__(self) -> None:
        if reason := why_not_packed(self.template, [job.config for job in self.jobs]):
            raise UserError(f"these runs cannot be packed: {reason}; train them one by one")
        self.readback = Readback(self.jobs[0].engine.device)
        self._under_way: deque[list[tuple[Replica, int, int]]] = deque()
        self._prepare_seconds = 0.0
        for job in self.jobs[1:]:
            job.watch.memories = []  # one process, one memory: the first replica watches it
        self._assemble(self.jobs)

    def _assemble(self, jobs: Sequence[Job]) -> None:
        self.stack = Stack(jobs, self.template)
        self.runner = StepRunner(self.stack, self.stack, self._say)
        self.replicas = []
        for row, job in enumerate(jobs):
            self.replicas.append(Replica(job, row, job.num_steps, loop.instruments(job.config)))
            for unit in job.runner.units:
                unit._compiled_call_impl = None  # to compile each run's model for its evaluations would take longer than they do
            job.runner = self.runner

    @property
    def training(self) -> list[Replica]:
        """The replicas that still learn."""
        return [replica for replica in self.replicas if replica.training]

    def prepare(self) -> None:
        """Compile and capture before the clocks go on."""
        start = time.perf_counter()
        with contextlib.ExitStack() as laps:
            for replica in self.training:
                laps.enter_context(replica.job.clock.lap("compile"))
            self._begin()
            self.runner.prepare()
        self._prepare_seconds = time.perf_counter() - start
        for replica in self.training:
            replica.job.run.event(replica.job.step, "pack", replicas=len(self.replicas), step_runs=self.runner.how)
        self._say(f"step: {self.runner.how}; one of {len(self.replicas)} runs in a pack")

    def notify(self, job: Job) -> None:
        """Something about a run is new; nobody's clock counts what is made of it."""
        if self.tell:
            with self.standing_still():
                self.tell(job)

    def _say(self, text: str) -> None:
        for replica in self.training:
            replica.job.console.line(text)

    # ---- a step ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Each run's rate, share in its moving average and next item; those that are done repeat their last, halted."""
        rates, averaging, counters = [], [], []
        for replica in self.replicas:
            job = replica.job
            rates.append(multiplier(job.config.schedule, job.progress))
            averaging.append(job.engine.ema.weight(job.step) if job.engine.ema else 0.0)
            counters.append(job.counter)
        self.stack.begin(rates, averaging, counters)

    def take_step(self) -> None:
        self._begin()
        self.readback.push(0, self.runner())
        taken = []
        for replica in self.training:
            job = replica.job
            job.ring.take(job.step + 1, job.counter, job.items, job.system.variant(job.step, job.config.steps))
            job.step += 1
            job.items += job.config.batch
            taken.append((replica, job.step, replica.turn))
        self._under_way.append(taken)

    def look(self, leave: int) -> set[int]:
        """Judge and log measurements until `leave` steps are under way; the rows of runs that were sent back or ended."""
        sent_back = set()
        while (found := self.readback.pop(leave)) is not None:
            columns = list(zip(*found[1], strict=True))
            for replica, step, turn in self._under_way.popleft():
                job = replica.job
                if turn != replica.turn or not replica.training:
                    continue
                if loop._look(job, step, list(columns[replica.row])):
                    replica.turn += 1
                    sent_back.add(replica.row)
                if step % job.config.every.log == 0:
                    self.notify(job)
        return sent_back

    # ---- between steps --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """No run trains while one of them is looked at, so no clock counts it as training."""
        clocks = [replica.job.clock for replica in self.training]
        for clock in clocks:
            clock.pause()
        try:
            yield
        finally:
            for replica in self.training:
                replica.job.clock.resume()

    def act(self, replica: Replica, tool: Callable[[Job], None]) -> None:
        """Let an instrument work on one run; its failure is that run's alone."""
        job = replica.job
        with self.standing_still():
            try:
                job.engine.begin(job.step - 1, job.items / job.total_items)  # recipes may ask it how far the run is
                tool(job)
            except Exception as error:
                job.status = "failed"
                job.run.event(job.step, "end", status="failed", error=str(error)[:500])
                job.run.set_status("failed", error=str(error)[:500])
                job.console.line(f"step {job.step}: this run ends here: {type(error).__name__}: {error}")

    def end(self, replica: Replica) -> None:
        """The closing acts of one run; its tensors are its own again."""
        if replica.job.status != "failed":
            self.act(replica, loop._finish)
        self.stack.release(replica.row)
        with self.standing_still():
            replica.job.clock.pause()
            loop._write_ring(replica.job)
            replica.job.feed.close()
        self.notify(replica.job)

    def shrink(self) -> None:
        """Leave out rows that no longer train, once they are half or more and it pays."""
        left = self.training
        if not left or 2 * len(left) > len(self.replicas) or not self._pays(left):
            return
        self.look(leave=0)
        kept = [replica.job for replica in self.replicas if replica.training]
        if kept:
            self._assemble(kept)
            self.prepare()

    def _pays(self, left: list[Replica]) -> bool:
        """Whether smaller steps to the end save more than preparing them costs, by what both took so far."""
        steps = max(replica.last_step - replica.job.step for replica in left)
        share = 1.0 - len(left) / len(self.replicas)
        return steps * share * left[0].seconds_per_step >= self._prepare_seconds


def fit_pack(pack: Pack, patience: int = 0, tell: Tell | None = None) -> dict[str, str]:
    """Train every run until done, stopped or spoiled; run names with their statuses.

    `patience` evaluations in a row without a better one end a run early. `tell` hears of a run at its log points, after its
    evaluations and at its end.
    """
    pack.tell = tell
    for job in pack.jobs:
        job.patience = patience
    handlers = loop._catch_signals(pack)
    try:
        pack.prepare()
        with garbage.left_lying():
            _start(pack)
            while pack.training and not pack.stop_signal:
                _round(pack)
            _stop(pack)
    finally:
        for replica in pack.training:
            pack.stack.release(replica.row)
            replica.job.feed.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return {job.run.name: job.status for job in pack.jobs}


def _start(pack: Pack) -> None:
    for replica in pack.training:
        job = replica.job
        job.feed.load(job.counter)  # the watchers compare with the batch at hand
        job.meter.start(job.items, job.clock["train"], job.feed.wait)
        job.clock.start("train")
    _end_those_at_their_end(pack)


def _round(pack: Pack) -> None:
    """One step of all runs, and what falls due after it."""
    pack.take_step()
    sent_back = pack.look(leave=1)
    due = [
        (replica, replica.turn, tool)
        for replica in pack.training
        for tool in replica.tools
        if replica.row not in sent_back and tool.due(replica.job.step) and not replica.at_end
    ]
    if due or any(replica.at_end for replica in pack.training):
        pack.look(leave=0)
    for replica, turn, tool in due:
        if replica.training and turn == replica.turn:
            pack.act(replica, tool.act)
            if tool.act is loop.evaluate and replica.training:
                pack.notify(replica.job)
    if due:
        garbage.sweep()
    _end_those_at_their_end(pack)
    pack.shrink()


def _end_those_at_their_end(pack: Pack) -> None:
    for replica in pack.replicas:
        if (replica.at_end or not replica.training) and pack.stack.holds(replica.row):
            pack.end(replica)


def _stop(pack: Pack) -> None:
    """A signal ends all runs at the step they have reached, saved."""
    pack.look(leave=0)
    for replica in pack.replicas:
        if pack.stack.holds(replica.row):
            replica.job.stop_signal = pack.stop_signal
            pack.end(replica)
