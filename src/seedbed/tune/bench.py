"""The workbench of the instruments: a recipe made ready to step, a state that can be put back, a folder for what comes out."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Data, Feed
from seedbed.errors import UserError
from seedbed.recipes import Recipe, find
from seedbed.track.files import write_atomic
from seedbed.track.run import full_name
from seedbed.train.capture import Readback, StepRunner
from seedbed.train.engine import Engine, forked_dice, mix, pick_device


@dataclass(frozen=True)
class Bench:
    """A recipe with its config and data. Systems are built from it as often as an instrument needs a fresh one."""

    name: str
    recipe: Recipe
    config: Config
    data: Data
    device: torch.device

    @classmethod
    def open(cls, name: str, assignments: list[str], device: str | None = None) -> Bench:
        """From names on a command line; a device given here goes before the config's."""
        recipe, preset = find(name)
        config = configs.override(recipe.preset(preset), assignments)
        if device:
            config = replace(config, device=device)
        if config.dist.world > 1:
            raise UserError("instruments measure one device: set dist.replicate=1 dist.shard=1; `plan --world N` tells of many")
        assert preset is not None
        return cls(full_name(recipe.name, preset), recipe, config, recipe.open_data(config), pick_device(config.device))

    def build(self, config: Config | None = None, make: Callable[..., Engine] = Engine) -> Engine:
        """A new system on the device with the weights that a run would start from, and its engine."""
        config = config or self.config
        torch.manual_seed(mix(config.seed))
        return make(self.recipe.build(config, self.data).to(self.device), config, self.device)


class Rig:
    """An engine with its feed and its step, run as the loop runs them: prepared once, measurements read one step late."""

    def __init__(self, engine: Engine, data: Data, say: Callable[[str], None]) -> None:
        config = engine.config
        self.engine = engine
        self.feed = Feed(data.train, batch=config.batch, parts=config.accum, seed=config.seed, device=engine.device)
        self.runner = StepRunner(engine, self.feed, say)
        self.readback = Readback(engine.device)

    def load(self, step: int, counter: int) -> None:
        """The items of a step made ready; a step of a new kind is compiled and captured."""
        self.engine.variant = self.engine.system.variant(step, self.engine.config.steps)
        self.feed.load(counter)
        self.runner.prepare()

    def begin(self, step: int, rate: float | None = None) -> None:
        self.engine.begin(step, min((step + 1) / self.engine.config.steps, 1.0), rate)

    def step(self, step: int, counter: int, rate: float | None = None) -> None:
        """One step as the loop takes it; `rate` goes before the schedule's multiplier."""
        self.load(step, counter)
        self.begin(step, rate)
        self.readback.push(step, self.runner())

    def read(self, leave: int = 1) -> dict[str, float] | None:
        """The oldest measurements that have not been read, once more than `leave` are under way."""
        found = self.readback.pop(leave)
        return dict(zip(self.runner.names, found[1], strict=True)) if found else None

    def take_steps(self, num_steps: int) -> None:
        """Train for a while, from the first item on."""
        for step in range(num_steps):
            self.step(step, step * self.engine.config.batch)
            self.read()
        self.readback.drop()
        synchronize(self.engine.device)

    def seconds_per_step(self, seconds: float, fewest: int = 3, rounds: int = 3) -> float:
        """The wall time of a step, the median of rounds of `fewest` steps or more; training goes on meanwhile.

        The median, because a neighbour's burst of work on this machine is not the step's.
        """
        times = []
        for _ in range(rounds):
            start, done = time.perf_counter(), 0
            while done < fewest or time.perf_counter() - start < seconds / rounds:
                self.take_steps(fewest)
                done += fewest
            times.append((time.perf_counter() - start) / done)
        return statistics.median(times)

    def close(self) -> None:
        self.feed.close()


@contextlib.contextmanager
def rigged(engine: Engine, data: Data, say: Callable[[str], None]) -> Iterator[Rig]:
    """A rig whose feed is closed whatever happens."""
    rig = Rig(engine, data, say)
    try:
        yield rig
    finally:
        rig.close()


@contextlib.contextmanager
def preserved(engine: Engine) -> Iterator[None]:
    """Whatever is trained inside, everything is put back after: weights, buffers, optimizers, averages, guard and dice."""
    system = engine.system
    live = _live(engine)
    # On the host: a second copy on the device could be what no longer fits.
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in live.items()}
    own, training, variant = copy.deepcopy(system.state()), system.training, engine.variant
    with forked_dice(engine.device):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in live.items():
                    tensor.copy_(kept[name])  # in place: captured graphs keep their addresses
            system.load_state(own)
            system.train(training)
            engine.variant = variant


def _live(engine: Engine) -> dict[str, Tensor]:
    saved = {f"{file}/{name}": t for file, group in engine.tensors().items() for name, t in group.items()}
    return saved | {f"buffer/{n}": b for n, b in engine.system.named_buffers()} | {"halted": engine.halted}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def num_parameters(system: torch.nn.Module) -> int:
    return sum(p.numel() for p in system.parameters())


def output_folder(root: Path, verb: str, name: str) -> Path:
    """`tune/VERB-RECIPE-PRESET/` beside the runs folder; git ignores it, so that no later run counts as dirty."""
    top = Path(root).parent / "tune"
    short = name.rpartition("/")[2] if ".py" in name else name
    folder = top / f"{verb}-{re.sub(r'[^A-Za-z0-9._-]+', '-', short)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (top / ".gitignore").write_text("*\n")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
    return folder


def save_result(folder: Path, result: dict[str, Any]) -> None:
    """The numbers beside the pictures, for scripts."""
    try:
        write_atomic(folder / "result.json", json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
