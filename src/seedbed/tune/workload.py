"""A recipe with config and data, ready to step; a context that restores state; output folders of the instruments."""

import contextlib
import copy
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.recipes import Recipe, find
from seedbed.track.run import full_name
from seedbed.train.engine import Engine, cpu_threads, fork_rng, pick_device
from seedbed.train.stepper import Made, Stepper, build


@dataclass(frozen=True)
class Workload:
    """A recipe with its config and data. Instruments build as many systems from it as they need."""

    name: str
    recipe: Recipe
    config: Config
    data: Data
    device: torch.device

    @classmethod
    def open(cls, name: str, assignments: list[str]) -> "Workload":
        """From the words of a command line."""
        recipe, preset = find(name)
        config = configs.override(recipe.preset(preset), assignments)
        if config.dist.world > 1:
            raise UserError("instruments measure one device: set dist.replicate=1 dist.shard=1; `plan --world N` estimates many")
        assert preset is not None
        return cls(full_name(recipe.name, preset), recipe, config, recipe.open_data(config), pick_device(config.device))

    def build(self, config: Config | None = None, make: Callable[..., Made] = Engine) -> Made:
        """A new system on the device with the weights that a run would start from, and its engine."""
        return build(self.recipe, config or self.config, self.data, self.device, make=make)


class Rig(Stepper):
    """Steps as a run takes them, from its first one on, to be measured."""

    def progress(self, step: int) -> float:
        return min((step + 1) / self.engine.config.steps, 1.0)

    def take_step(self, step: int) -> None:
        self.step(step, step * self.engine.config.batch, self.progress(step), self.engine.config.steps)

    def take_steps(self, num_steps: int) -> None:
        """Train for a while, from the first item on."""
        for step in range(num_steps):
            self.take_step(step)
            self.pop_result()
        self.readback.drop()
        synchronize(self.engine.device)

    def seconds_per_step(self, seconds: float, fewest: int = 3, rounds: int = 3) -> float:
        """Seconds per step: the median over rounds of at least `fewest` steps, so that bursts of other load do not count."""
        times = []
        for _ in range(rounds):
            start, done = time.perf_counter(), 0
            while done < fewest or time.perf_counter() - start < seconds / rounds:
                self.take_steps(fewest)
                done += fewest
            times.append((time.perf_counter() - start) / done)
        return statistics.median(times)


@contextlib.contextmanager
def rigged(engine: Engine, data: Data, say: Callable[[str], None]) -> Iterator[Rig]:
    """A rig whose feed is closed whatever happens."""
    with cpu_threads(engine.system.num_cpu_threads), contextlib.closing(Rig(engine, data.train, say)) as rig:
        yield rig


@contextlib.contextmanager
def preserved(engine: Engine) -> Iterator[None]:
    """Restores weights, buffers, optimizers, averages, guard and random generators, whatever is trained inside."""
    system = engine.system
    live = {f"{file}/{name}": t for file, group in engine.tensors().items() for name, t in group.items()}
    live |= {f"buffer/{n}": b for n, b in system.named_buffers()} | {"halted": engine.halted}
    # On the host: a second copy on the device might not fit.
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in live.items()}
    own, training, variant = copy.deepcopy(system.state()), system.training, engine.variant
    with fork_rng(engine.device):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in live.items():
                    tensor.copy_(kept[name])  # in place: captured graphs keep their addresses
            system.load_state(own)
            system.train(training)
            engine.variant = variant


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def num_parameters(system: torch.nn.Module) -> int:
    return sum(p.numel() for p in system.parameters())


def output_folder(root: Path, verb: str, name: str) -> Path:
    """`tune/VERB-RECIPE-PRESET/` beside the runs folder; git ignores it, so that no later run counts as dirty."""
    top = Path(root).parent / "tune"
    short = name.rpartition("/")[2] if ".py" in name else name
    folder = top / f"{verb}-{re.sub(r'[^A-Za-z0-9._-]+', '-', short)}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (top / ".gitignore").write_text("*\n")
    return folder


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Whatever cannot be written inside is a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
