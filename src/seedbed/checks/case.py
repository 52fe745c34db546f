"""The thing under test: a recipe with one config, built as often and in as many forms as the checks need."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from seedbed import config as configs
from seedbed import errors
from seedbed.config import Config
from seedbed.data.feed import Data, Feed, Source
from seedbed.errors import UserError
from seedbed.recipes import Recipe
from seedbed.train.engine import Engine, forked_dice, mix
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, System

CPU = torch.device("cpu")
# A size of its own for the batch, so that an axis taken for another raises or shows.
ROWS = 5
SHAKE = 0.05
# By the last part of a field's name: what it is shrunk to, and in which steps it may grow back until the config is legal.
SMALL = {"depth": (2, 1), "num_layers": (2, 1), "width": (32, 8), "block": (11, 1), "context": (11, 1), "length": (11, 1)}

T = TypeVar("T")


class Recorder(Engine):
    """An engine that stops before the backward pass and keeps the losses."""

    variant: Any

    def descend(self, loss: Tensor, name: str = "main") -> None:
        self.norms[name] = loss


class Case:
    """One recipe and config. Nothing is built before a check asks; what several checks share is built once.

    `config` is the run as asked for, `small` the same on the CPU with depth, width and length cut down (unless `full`).
    """

    def __init__(self, recipe: Recipe, preset: str | None, config: Config, root: Path, *, full: bool = False) -> None:
        self.recipe, self.preset, self.config, self.root, self.full = recipe, preset, config, root, full
        plain = configs.override(config, [*configs.PLAIN, "device=cpu", "precision=fp32"])
        self.small: Config
        self.small, self.shrunk = (plain, {}) if full else shrink(plain)
        self._kept: dict[Any, Any] = {}

    @property
    def name(self) -> str:
        if self.recipe.name.endswith(".py"):
            return f"{Path(self.recipe.name).name}:{self.preset}"
        return f"{self.recipe.name}/{self.preset}"

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives, made when it is first asked for; later askers get the same object and must not change it."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    # ---- data --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def data(self) -> Data:
        """The data as the small config opens it."""
        return self.recipe.open_data(self.small)

    @functools.cached_property
    def real_data(self) -> Data:
        """The data as the run would open it."""
        return self.recipe.open_data(self.config)

    def batch(self, n: int = 0, size: int = ROWS) -> Batch:
        """The n-th training batch of `size` items, copied: a check may write into it."""
        feed = self.once(("feed", size), lambda: self.feed(self.data.train, size))
        feed.load(n * size)
        return {k: v.clone() for k, v in feed.part(0).items()}

    def feed(self, source: Source, size: int, *, seed: int | None = None, shuffle: bool = True) -> Feed:
        seed = self.config.seed if seed is None else seed
        return Feed(source, batch=size, parts=1, seed=seed, device=CPU, shuffle=shuffle)

    # ---- systems -----------------------------------------------------------------------------------------------------

    def fresh_system(self, seed: int | None = None, config: Config | None = None) -> System:
        """A new system as the run would initialise it, on the CPU in float32, in training mode."""
        chosen = config or self.small
        seed = mix(self.config.seed if seed is None else seed)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self.recipe.build(chosen, self.data if chosen is self.small else self.real_data)

    def fresh_engine(self, *assignments: str, seed: int | None = None) -> Engine:
        """A new engine on a new system of the small config, with further `key=value` changes."""
        config = configs.override(self.small, assignments) if assignments else self.small
        system = self.fresh_system(seed)
        return Engine(system, config, CPU)

    def shaken(self) -> System:
        """A copy in evaluation mode with noise on every parameter, in float64 where the recipe bears it.

        Zero-initialised outputs would hide every dependence behind them; noise opens them. Shared: do not change it.
        """
        return self.once("shaken", self._shake)

    def _shake(self, dtype: torch.dtype = torch.float64) -> System:
        # Built anew, not copied: a system may hold its data, and that can be large.
        system = self.fresh_system().eval()
        dice = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for param in system.parameters():
                param += SHAKE * torch.randn(param.shape, generator=dice).to(param.dtype)
        if dtype == torch.float32:
            return system
        try:
            self.loss_of(system.double(), to_dtype(self.batch(), dtype))
        except RuntimeError:
            return self._shake(torch.float32)
        return system

    @property
    def dtype(self) -> torch.dtype:
        """What the shaken system computes in."""
        return next((p.dtype for p in self.shaken().parameters()), torch.float64)

    def shaken_batch(self, n: int = 0, size: int = ROWS) -> Batch:
        """A batch in the dtype of the shaken system."""
        return to_dtype(self.batch(n, size), self.dtype)

    @functools.cached_property
    def probe(self) -> Probe | None:
        """The shaken system opened up on the first batch."""
        return self.shaken().probe(self.shaken_batch())

    def birth_probe(self, size: int = ROWS) -> Probe | None:
        """A system as initialised, opened up, in evaluation mode."""
        return self.fresh_system().eval().probe(self.batch(size=size))

    def loss_of(self, system: System, batch: Batch, dice: int = 0) -> Tensor:
        """The loss that training would descend, by the system's own `update`, with the random numbers of `dice`."""
        recorder = Recorder(system, self.small, CPU)
        recorder.variant = system.variant(0, self.small.steps)
        torch.manual_seed(mix(self.config.seed, dice))
        system.update(batch, recorder)
        assert recorder.norms, "update() never called engine.descend"
        return torch.stack([loss for loss in recorder.norms.values()]).sum()

    # ---- places ------------------------------------------------------------------------------------------------------

    @staticmethod
    def locate(thing: Any) -> str:
        """`file:line Class.method` of a module's forward, a method, a function or a class."""
        return place(type(thing).forward if isinstance(thing, nn.Module) and not isinstance(thing, System) else thing)

    def loss_place(self) -> str:
        """Where inputs and targets are told apart: the recipe's `loss`, or its `update`."""
        kind = type(self.shaken())
        return place(kind.loss if kind.loss is not System.loss else kind.update)

    def module_place(self, system: System, name: str) -> str:
        """The forward of a module, or of the nearest one around it that is not torch's own."""
        path = own_path(system, name)
        return place(type(system.get_submodule(path)).forward) if path else self.loss_place()

    def objective_place(self) -> str:
        """The line on which the loss becomes one number; where `loss` is written when that cannot be seen."""
        return self.once("objective place", self._find_objective)

    def _find_objective(self) -> str:
        from seedbed.checks.watch_ops import Reductions

        system = self.shaken()
        with Reductions() as seen, torch.no_grad():
            self.loss_of(system, self.shaken_batch())
        return seen.place or self.loss_place()

    def maker(self, system: System, name: str) -> str:
        """Where the innermost module of the recipe's own that holds a tensor is written: torch's modules need no mending."""
        return place(type(system.get_submodule(own_path(system, name.rpartition(".")[0]))).__init__)

    def batch_place(self) -> str:
        """Where a batch is made from raw rows."""
        return place(type(self.data.train).batch)


def own_path(system: System, path: str) -> str:
    """The innermost module at or above a path that is not torch's own; the system itself has the empty path."""
    while path and type(system.get_submodule(path)).__module__.startswith("torch."):
        path = path.rpartition(".")[0]
    return path


def shrink(config: Config) -> tuple[Config, dict[str, tuple[Any, Any]]]:
    """A legal config with small depth, width and length, and what was changed."""
    small, changes = config, {}
    for key, value in configs.flatten(config).items():
        start, stride = SMALL.get(key.rpartition(".")[2], (0, 0))
        if not start or not isinstance(value, int) or not key.startswith(("model.", "data.")):
            continue
        for size in range(start, value, stride):
            try:
                small = configs.override(small, [f"{key}={size}"])
            except UserError:
                continue
            changes[key] = (value, size)
            break
    return small, changes


def to_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point entries in another dtype."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def num_rows(batch: Batch) -> int:
    return max((len(v) for v in batch.values() if v.ndim), default=0)


def take_rows(batch: Batch, index: Any) -> Batch:
    """Some rows of every entry that has rows."""
    count = num_rows(batch)
    return {k: v[index] if v.ndim and len(v) == count else v for k, v in batch.items()}


def spread(x: Tensor) -> float:
    """The mean size of a tensor's entries, by which changes are measured; never zero."""
    return max(float(x.detach().double().abs().mean()), 1e-12) if x.numel() else 1e-12


def limit_for(x: Tensor, exact: float = 1e-9, coarse: float = 1e-5) -> float:
    """How far rounding may move a result, by its dtype. Measured: allowed influence at most 8e-16, real leaks 2.7 and more."""
    return exact if x.dtype == torch.float64 else coarse


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave every random generator, flag and thread count as it was found."""
    flags = torch.get_default_dtype(), torch.get_num_threads(), torch.get_deterministic_debug_mode()
    with forked_dice(CPU), torch.enable_grad():
        torch.manual_seed(0)
        # Models this small run faster on one thread, and many times faster on a machine that has other work.
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_default_dtype(flags[0])
            torch.set_num_threads(flags[1])
            # Not use_deterministic_algorithms: that loads the compiler, which takes seconds.
            torch.set_deterministic_debug_mode(flags[2])


def place(thing: Any) -> str:
    """`file:line name` of a function, method or class, with the file as short as it can be while it is found."""
    thing = inspect.unwrap(thing)
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    try:
        path, line = inspect.getsourcefile(thing), inspect.getsourcelines(thing)[1]
    except (TypeError, OSError):
        return name
    return f"{short(path or '?')}:{line} {name}"


def short(path: str | Path) -> str:
    """A path below the package from its name on, below the present folder relative to it, else in full."""
    path, home = Path(path), Path(errors.__file__).parent
    for base in (home.parent, Path.cwd()):
        if path.is_relative_to(home if base == home.parent else base):
            return str(path.relative_to(base))
    return str(path)


def outputs(system: nn.Module, run: Callable[[], Any]) -> list[tuple[str, nn.Module, Tensor]]:
    """What every module gave during `run`, in the order in which they finished."""
    seen: list[tuple[str, nn.Module, Tensor]] = []

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple | list) and out else out
            if isinstance(first, Tensor):
                seen.append((name, module, first.detach().clone()))

        return keep

    hooks = [module.register_forward_hook(hook(name)) for name, module in system.named_modules() if name]
    try:
        run()
    finally:
        for handle in hooks:
            handle.remove()
    return seen


def first_module_that_moves(
    system: nn.Module,
    run_a: Callable[[], Any],
    run_b: Callable[[], Any],
    select: Callable[[Tensor], Tensor | None],
    limit: float = 1e-6,
) -> tuple[str, nn.Module] | None:
    """The first module in execution order whose selected output differs between two runs."""
    for (name, module, a), (_, _, b) in zip(outputs(system, run_a), outputs(system, run_b), strict=False):
        if a.shape != b.shape or not a.is_floating_point():
            continue
        part_a, part_b = select(a), select(b)
        if part_a is not None and part_b is not None and float((part_a - part_b).abs().max()) > limit * spread(a):
            return name, module
    return None
