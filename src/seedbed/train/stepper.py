"""One training step: batch, forward, backward, clip, optimizer; its result is read one step later.

All code that trains, measures or replays steps builds its engine with `build` and takes steps with a `Stepper`. Measurements
leave the device as one small vector, so that the host never waits for them.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Feed, Source
from seedbed.dist import SINGLE, Ranks
from seedbed.track import files, jsonl
from seedbed.train.engine import Engine, EvalEngine, mix, pick_device

if TYPE_CHECKING:
    from seedbed.train.protocols import Builder, Parts, Steps

Made = TypeVar("Made", bound=EvalEngine)
# The history of the last steps, written on incidents and at the end: what `replay` compares with. The data of a step follows from
# its sample counter, its random numbers from (seed, step), so a few numbers identify it.
HISTORY_STEPS = 16
HISTORY_FILE = "step_history.json"
OLD_HISTORY_FILE = "ring.json"


def build(
    recipe: Builder,
    config: Config,
    data: Any,
    device: torch.device | None = None,
    ranks: Ranks = SINGLE,
    make: Callable[..., Made] = Engine,
) -> Made:
    """The engine of a new system, with the initial weights of a run of this config."""
    configs.validate(config)  # with all registries
    device = device or pick_device(config.device)
    if device.type == "cuda":
        from seedbed.train import compile_cache

        compile_cache.enable()  # before the first of our kernels is compiled
    seed = mix(config.seed)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if ranks.mesh is None:
        system = recipe.build(config, data)
    else:  # shards are filled where they are: no rank ever holds the whole model
        from seedbed.nn.deferred import deferred_init

        with deferred_init():
            system = recipe.build(config, data)
    if config.dist.world > 1 or not ranks.is_single:
        from seedbed.train.capabilities import require_possible

        require_possible(system, config, ranks.degrees)
    if ranks.mesh is None:  # else its shards go there one by one
        system = system.to(device)
    return make(system, config, device, ranks) if ranks is not SINGLE else make(system, config, device)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured. `lr_factor` is the schedule's; `halted` means that it was not finite and changed nothing.

    `stop` means that a rank was asked to end the run.
    """

    step: int
    loss: float
    lr_factor: float = 1.0
    halted: bool = False
    stop: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> dict[str, float]:
        """The loss and all metrics."""
        return {"loss": self.loss, **self.metrics}


class EagerRunner:
    """Calls the engine's step as it is. `capture.StepRunner` compiles and captures it where that is asked for and possible."""

    def __init__(self, engine: Steps, feed: Parts, say: Callable[[str], None]) -> None:
        self.engine, self.feed, self.say = engine, feed, say
        self.mode, self.is_undecided = "off", False
        self.units: list[nn.Module] = []
        self.names: list[str] = []
        self.why_not = self._why_not_captured()
        self.ready: set[Hashable] = set()
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # captured steps

    def __call__(self) -> Tensor:
        """Run the loaded step; returns its measurements as one tensor, in the order of `names`."""
        measured = self.engine.step(self.feed.part)
        measured["lr_factor"], measured["halted"] = self.engine.lr_factor, self.engine.halted
        self.names = list(measured)
        shape = self.engine.halted.shape
        return torch.stack([v.detach().float().reshape(shape) for v in measured.values()])

    def prepare(self) -> None:
        """Compile and capture for the engine's present variant, changing nothing; here there is nothing to do."""
        self.ready.add(self.engine.variant)

    def settle(self, mode: str) -> None:
        """Apply the decision of `compile=auto`, which no eager runner waits for."""
        raise NotImplementedError

    def forget(self) -> None:
        """Release every captured step and its memory: the next step is captured again."""
        self.ready.clear()
        self.why_not = self._why_not_captured()

    @property
    def how(self) -> str:
        """In words, for the run's header: how a step runs."""
        config, compiled = self.engine.config, self._compiled()
        words = f"compiled ({', '.join(compiled)})" if compiled else "eager"
        if config.remat != "none":
            words += f", {config.remat} remat"
        if config.float8:
            from seedbed.train.float8 import num_float8

            words += f", float8: {num_float8(self.engine.system)} layers converted"
        return words + (f", not captured: {self.why_not}" if self.why_not else ", captured as one CUDA graph")

    def _compiled(self) -> list[str]:
        return [*([self.mode] if self.units else []), *sorted(self.engine.compiled)]

    def _why_not_captured(self) -> str:
        if self.engine.device.type != "cuda":
            return f"no CUDA graphs on {self.engine.device.type}"
        if self.engine.config.dist.is_sharded:
            return "FSDP2 allocates gathered weights on streams of its own"
        return "capture=off" if self.engine.config.capture == "off" else ""


class Readback:
    """A short queue of measurement vectors on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.queue: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, step: int, vector: Tensor) -> None:
        event = None
        if self.on_cuda:
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            vector = host.copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.queue.append((step, vector, event))

    def pop(self, leave: int) -> tuple[int, list[Any]] | None:
        """The oldest measurements, once more than `leave` are under way."""
        if len(self.queue) <= leave:
            return None
        step, vector, event = self.queue.popleft()
        if event:
            event.synchronize()
        return step, vector.tolist()

    def drop(self) -> None:
        self.queue.clear()


class StepQueue:
    """A step as one call, compiled and captured where asked for, and a queue of results on their way to the host."""

    def __init__(self, engine: Steps, feed: Parts, say: Callable[[str], None]) -> None:
        self.runner = EagerRunner(engine, feed, say)
        if engine.device.type == "cuda" or engine.config.compile != "off" or engine.compiled:
            from seedbed.train.capture import StepRunner

            self.runner = StepRunner(engine, feed, say)
        self.readback = Readback(engine.device)

    def launch(self, step: int) -> None:
        """Launch the step that was set up, and queue its result."""
        self.readback.push(step, self.runner())

    def pop_result(self, lag: int = 1) -> StepResult | None:
        """The oldest unread result, once more than `lag` are outstanding."""
        found = self.readback.pop(lag)
        return self.result(*found) if found else None

    def result(self, step: int, values: list[float]) -> StepResult:
        """The record of one run's measurements, in the order of the step's output."""
        metrics = dict(zip(self.runner.names, values, strict=True))
        loss, lr_factor, halted = metrics.pop("loss"), metrics.pop("lr_factor"), metrics.pop("halted")
        return StepResult(step, loss, lr_factor, bool(halted), bool(metrics.pop("stop", 0.0)), metrics)


class Stepper(StepQueue):
    """Steps of one engine on its own feed; `compiling` surrounds what is compiled and captured."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        say: Callable[[str], None] = print,
        compiling: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.engine, self.compiling = engine, compiling
        config, share = engine.config, (engine.ranks.rank, engine.ranks.world)
        shape = {"batch": config.batch, "parts": config.accum, "share": share}
        self.feed = Feed(source, seed=config.seed, device=engine.device, **shape)
        with compiling():  # torch's compiler is loaded
            super().__init__(engine, self.feed, say)

    def load(self, step: int, counter: int, num_steps: int) -> None:
        """Load the items from `counter` on; a new variant of the step is compiled and captured."""
        self.engine.variant = self.engine.system.variant(step, num_steps)
        self.feed.load(counter)
        if self.engine.variant not in self.runner.ready:
            with self.compiling():
                self.runner.prepare()

    def run(self, step: int, progress: float, lr_factor: float | None = None) -> None:
        """Take the loaded step, which follows `step` others; its random numbers follow from `step`."""
        self.engine.begin(step, progress, lr_factor)
        self.launch(step + 1)

    def step(self, step: int, counter: int, progress: float, num_steps: int) -> None:
        self.load(step, counter, num_steps)
        self.run(step, progress)

    def close(self) -> None:
        self.runner.graphs.clear()  # NCCL waits for its captured collectives before it ends
        self.feed.close()


class StepHistory:
    """A ring of entries [step, counter, items before it, variant, measurements]."""

    def __init__(self, size: int = HISTORY_STEPS) -> None:
        self.entries: deque[list[Any]] = deque(maxlen=size)

    def add(self, step: int, counter: int, items: int, variant: Hashable) -> None:
        """Add a step before it is taken."""
        self.entries.append([step, counter, items, variant, None])

    def record(self, result: StepResult) -> None:
        """Add the result of a step, which arrives one step later."""
        for entry in reversed(self.entries):
            if entry[0] == result.step:
                entry[4] = result
                return

    def to_json(self, **facts: Any) -> dict[str, Any]:
        """Plain values; non-finite numbers become strings."""
        return {**facts, "steps": [_entry(*entry) for entry in self.entries]}

    def write(self, folder: Path, **facts: Any) -> None:
        files.write_atomic(folder / HISTORY_FILE, jsonl.pretty(self.to_json(**facts)))


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The steps that the run in this folder wrote last; raises UserError where there is no readable file."""
    name = HISTORY_FILE if (folder / HISTORY_FILE).exists() else OLD_HISTORY_FILE
    return jsonl.read_object(folder / name).get("steps", [])


def _entry(step: int, counter: int, items: int, variant: Hashable, result: StepResult | None) -> dict[str, Any]:
    shown = {"step": step, "counter": counter, "items": items, "variant": None if variant is None else repr(variant)}
    if result is None:
        return shown
    values = {**result.measured, "lr_factor": result.lr_factor, "halted": float(result.halted)}
    return shown | {name: format_number(value) for name, value in values.items()}


def format_number(value: float) -> float | str:
    """A number as JSON can hold it: nan and inf as strings, all others exactly."""
    return value if math.isfinite(value) else str(value)
