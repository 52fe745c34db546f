"""The recipe under test with one config. Systems, batches and probes are built on demand and shared between checks."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from seedbed import config as configs
from seedbed import errors
from seedbed.config import Config
from seedbed.data.feed import Data, Feed, Source
from seedbed.errors import UserError
from seedbed.recipes import Recipe
from seedbed.train import capabilities
from seedbed.train.engine import Engine, fork_rng, mix
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, System

if TYPE_CHECKING:
    from seedbed.checks.registry import Check
    from seedbed.report.findings import Finding

CPU = torch.device("cpu")
# An unusual batch size, so that confused axes raise or show.
ROWS = 5
PERTURBATION = 0.05
# Fields of any recipe: their small size, and the stride by which they grow until the config is valid.
SMALL = {f"model.{name}": size for name, size in (("depth", (2, 1)), ("num_layers", (2, 1)), ("width", (32, 8)))}
SMALL |= {f"{group}.{name}": (11, 1) for group in ("model", "data") for name in ("block", "context", "length")}

T = TypeVar("T")


class Subject:
    """A recipe with one config. Everything is built lazily; what several checks use is built once.

    `config` is that of the run, `small` the same on the CPU with reduced depth, width and length (unless `full`).
    `data` is what the run has opened already, if any. With `quick`, training waits: slow tests are left to a full check.
    `unsure` is the severity of what only a recipe's rules make a fault; empty for that of the check.
    """

    unsure: ClassVar[Literal["", "note"]] = ""
    engine_type: type[Engine] = Engine

    def __init__(
        self,
        recipe: Recipe,
        preset: str | None,
        config: Config,
        root: Path,
        *,
        full: bool = False,
        quick: bool = False,
        data: Data | None = None,
    ) -> None:
        self.recipe, self.preset, self.config, self.root, self.full, self.quick = recipe, preset, config, root, full, quick
        plain = configs.override(config, [*configs.PLAIN, "device=cpu", "precision=fp32"])
        self.small: Config
        self.small, self.shrunk = (plain, {}) if full else shrink(plain, recipe.check_settings(plain))
        self._kept: dict[Any, Any] = {}
        self._opened = data

    @property
    def name(self) -> str:
        if self.recipe.name.endswith(".py"):
            return f"{Path(self.recipe.name).name}:{self.preset}"
        return f"{self.recipe.name}/{self.preset}"

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Returns `make()`, cached under `key`. Callers must not modify the result."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def version(self, check: Check) -> Callable[[Subject], Finding] | str:
        """What runs as this check, or the reason for which it cannot."""
        if not check.needs:
            return check.run
        if self.probe is None:
            return "the recipe has no probe()"
        absent = [name for name in check.needs if not self.probe.declares(name)]
        return f"the recipe's probe does not declare {', '.join(absent)}" if absent else check.run

    def advice(self, finding: Finding, id: str) -> tuple[str, str]:
        """The place and the remedy of a finding, as they are shown."""
        return finding.where, f"{finding.fix}; then: seedbed check {self.name} --only {id}"

    # ---- data --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def data(self) -> Data:
        """The data of the small config, a subset of the run's data where the recipe supports it."""
        return self.recipe.check_data(self.small, self.real_data) if self.shrunk else self.real_data

    def with_data(self, data: Data) -> Subject:
        """The same subject with other data of its small config; nothing is shared."""
        other = copy.copy(self)
        other.__dict__ = {k: v for k, v in self.__dict__.items() if k != "probe"} | {"data": data, "_kept": {}}
        return other

    @functools.cached_property
    def real_data(self) -> Data:
        """The data as the run opens it, opened once."""
        return self.recipe.open_data(self.config) if self._opened is None else self._opened

    def batch(self, n: int = 0, size: int = ROWS) -> Batch:
        """A copy of the n-th training batch of `size` items."""
        feed = self.once(("feed", size), lambda: self.feed(self.data.train, size))
        feed.load(n * size)
        return {k: v.clone() for k, v in feed.part(0).items()}

    def feed(self, source: Source, size: int) -> Feed:
        return Feed(source, batch=size, parts=1, seed=self.config.seed, device=CPU)

    # ---- systems -----------------------------------------------------------------------------------------------------

    def fresh_system(self, seed: int | None = None, config: Config | None = None) -> System:
        """A new system, initialised as a run initialises it: CPU, float32, training mode."""
        chosen = config or self.small
        seed = mix(self.config.seed if seed is None else seed)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self.recipe.build(chosen, self.data if chosen is self.small else self.real_data)

    def fresh_engine(self, *assignments: str, seed: int | None = None) -> Engine:
        """A new engine and system of the small config, with `key=value` overrides."""
        config = configs.override(self.small, assignments) if assignments else self.small
        return self.engine_type(self.fresh_system(seed), config, CPU)

    def perturbed(self) -> System:
        """A system in evaluation mode with noise added to every parameter, in float64 where the recipe supports it.

        Zero-initialised outputs would hide every dependence behind them. Shared: do not modify it.
        """
        return self.once("perturbed", self._perturb)

    def _perturb(self, dtype: torch.dtype = torch.float64) -> System:
        # Rebuilt, not copied: a system may hold its data, which can be large.
        system = self.fresh_system().eval()
        add_noise(system, PERTURBATION)
        if dtype == torch.float32:
            return system
        try:
            self.loss_of(system.double(), to_dtype(self.batch(), dtype))
        except RuntimeError:
            return self._perturb(torch.float32)
        return system

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the perturbed system."""
        return next((p.dtype for p in self.perturbed().parameters()), torch.float64)

    def perturbed_batch(self, n: int = 0) -> Batch:
        """A batch in the dtype of the perturbed system."""
        return to_dtype(self.batch(n), self.dtype)

    @functools.cached_property
    def probe(self) -> Probe | None:
        """The probe of the perturbed system on the first batch."""
        return capabilities.probe(self.perturbed(), self.perturbed_batch())

    @property
    def declared(self) -> Any:
        """The probe, or an empty one where there is none. Untyped: what a check names in `needs` is never None."""
        nothing: Any = None
        return self.probe or Probe({}, nothing, nothing)

    def loss_of(self, system: System, batch: Batch, seed: int = 0, variant: Any = None) -> Tensor:
        """The training loss by the system's own `update`, with the random numbers of one seed.

        Of the first step variant unless `variant` names another.
        """
        recorder = Recorder(system, self.small, CPU)
        recorder.variant = system.variant(0, self.small.steps) if variant is None else variant
        torch.manual_seed(mix(self.config.seed, seed))
        system.update(batch, recorder)
        assert recorder.norms, "update() never called engine.minimize"
        return torch.stack(list(recorder.norms.values())).sum()

    # ---- places ------------------------------------------------------------------------------------------------------

    def preset_line(self) -> str:
        """Source line of the preset; the recipe's name where the config is of none."""
        make = self.recipe.presets.get(self.preset or "")
        return source_line(make) if make else self.recipe.name

    def loss_line(self) -> str:
        """Source line of the recipe's `loss`, or of its `update`."""
        kind = type(self.perturbed())
        return source_line(kind.loss if kind.loss is not System.loss else kind.update)

    def module_line(self, system: System, name: str) -> str:
        """Source line of the forward of a module, or of the nearest enclosing one that is not part of torch."""
        path = own_path(system, name)
        return source_line(type(system.get_submodule(path)).forward) if path else self.loss_line()

    def first_moved(self, *runs: Callable[[], Any], select: Callable[[Tensor], Tensor | None] = lambda x: x) -> str:
        """The first module in execution order whose selected output, or what it gives to a module inside, differs in two runs of
        the perturbed system: its line and name; empty when there is none."""
        system = self.perturbed()
        for (name, _, a), (_, _, b) in zip(*(outputs(system, run, inputs=True) for run in runs), strict=False):
            if a.shape != b.shape or not a.is_floating_point():
                continue
            part_a, part_b = select(a), select(b)
            if part_a is not None and part_b is not None and float((part_a - part_b).abs().max()) > 1e-6 * spread(a):
                return f"{self.module_line(system, name)}; first module that moves: {name or 'the system'}"
        return ""

    def objective_line(self) -> str:
        """Source line on which the loss is reduced to a scalar; the line of `loss` where that is unknown."""
        return self.once("objective line", self._find_objective)

    def _find_objective(self) -> str:
        from seedbed.checks.watch_ops import Reductions

        system = self.perturbed()
        with Reductions() as seen, torch.enable_grad():
            self.loss_of(system, self.perturbed_batch())
        return seen.line or self.loss_line()

    def module_init_line(self, system: System, name: str) -> str:
        """Source line of the __init__ of the innermost module of the recipe's own that holds a tensor."""
        return source_line(type(system.get_submodule(own_path(system, name.rpartition(".")[0]))).__init__)

    def batch_line(self) -> str:
        """Source line of the function that makes a batch from raw rows."""
        return source_line(type(self.data.train).batch)


def probe_of(system: System, batch: Batch) -> Any:
    """The probe of a system that has one. Untyped: what a check names in `needs` is never None."""
    return capabilities.probe(system, batch)


class Recorder(Engine):
    """An engine that records losses and skips the backward pass."""

    variant: Any

    def minimize(self, loss: Tensor, name: str = "main") -> None:
        self.norms[name] = loss


@torch.no_grad()
def add_noise(system: System, size: float) -> None:
    """Adds noise to every parameter, the same each time."""
    rng = torch.Generator().manual_seed(7)
    for param in system.parameters():
        param += size * torch.randn(param.shape, generator=rng).to(param.dtype)


def own_path(system: System, path: str) -> str:
    """Path of the innermost module at or above `path` that is not of torch or a library; empty for the system itself."""
    while path and is_installed(type(system.get_submodule(path))):
        path = path.rpartition(".")[0]
    return path


@functools.cache
def is_installed(source: str | Callable[..., Any]) -> bool:
    """Whether a source file, or that of a class or function, is Python's or that of an installed package other than this one."""
    if not isinstance(source, str):
        module = sys.modules.get(source.__module__)
        return is_installed(getattr(module, "__file__", None) or "")
    own, known = Path(errors.__file__).parent, ("<", sysconfig.get_paths()["stdlib"], str(Path(torch.__file__).parent))
    inside = {"site-packages", "dist-packages"} & {*Path(source).parts} or source.startswith(known)
    return bool(inside) and not Path(source).is_relative_to(own)


def shrink(config: Config, settings: Mapping[str, Any] | None = None) -> tuple[Config, dict[str, tuple[Any, Any]]]:
    """A valid config with small depth, width and length, and the changes; `settings` are the recipe's own overrides."""
    small, changes = config, {}
    full = configs.flatten(config)
    if settings:
        with contextlib.suppress(UserError):  # may conflict with the user's settings
            small = configs.override(small, [f"{key}={value}" for key, value in settings.items()])
        changes = {key: (full[key], new) for key, new in configs.flatten(small).items() if full[key] != new}
    for key, value in full.items():
        start, stride = SMALL.get(key, (0, 0))
        if not start or key in changes or not isinstance(value, int):
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
    """Indexes the rows of every entry that has rows."""
    count = num_rows(batch)
    return {k: v[index] if v.ndim and len(v) == count else v for k, v in batch.items()}


def repeat_rows(batch: Batch, times: int) -> Batch:
    """Repeats every row `times` times."""
    return take_rows(batch, torch.arange(num_rows(batch)).repeat_interleave(times))


def spread(x: Tensor) -> float:
    """The mean absolute value of a tensor, the scale for relative changes; never zero."""
    return max(float(x.detach().double().abs().mean()), 1e-12) if x.numel() else 1e-12


def limit_for(x: Tensor, exact: float = 1e-9, coarse: float = 1e-5) -> float:
    """Allowed rounding error by dtype. Measured: legitimate influence at most 8e-16, real leaks 2.7 and more."""
    return exact if x.dtype == torch.float64 else coarse


@contextlib.contextmanager
def preserve_global_state() -> Iterator[None]:
    """Restores random generators, default dtype, thread count and determinism flags."""
    flags = torch.get_default_dtype(), torch.get_num_threads(), torch.get_deterministic_debug_mode()
    with fork_rng(CPU), torch.enable_grad():
        torch.manual_seed(0)
        # Models this small run faster on one thread, especially on a busy machine.
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_default_dtype(flags[0])
            torch.set_num_threads(flags[1])
            # Not use_deterministic_algorithms: that loads the compiler, which takes seconds.
            torch.set_deterministic_debug_mode(flags[2])


def source_line(thing: Any) -> str:
    """`file:line name` of a function, method or class, with a short path."""
    thing = inspect.unwrap(thing)
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    try:
        path, line = inspect.getsourcefile(thing), inspect.getsourcelines(thing)[1]
    except (TypeError, OSError):
        return name
    return f"{short(path or '?')}:{line} {name}"


def short(path: str | Path) -> str:
    """A path relative to the package or to the working directory, else in full."""
    path, home = Path(path), Path(errors.__file__).parent
    for base in (home.parent, Path.cwd()):
        if path.is_relative_to(home if base == home.parent else base):
            return str(path.relative_to(base))
    return str(path)


def outputs(system: nn.Module, run: Callable[[], Any], inputs: bool = False) -> list[tuple[str, nn.Module, Tensor]]:
    """The output of every module during `run`, in order of completion; with `inputs` also what each got, named by its caller."""
    seen: list[tuple[str, nn.Module, Tensor]] = []

    def keep(name: str, module: nn.Module, value: Any) -> None:
        first = value[0] if isinstance(value, tuple | list) and value else value
        if isinstance(first, Tensor):
            seen.append((name, module, first.detach().clone()))

    def hooks(name: str, module: nn.Module) -> Iterator[Any]:
        yield module.register_forward_hook(lambda module, given, out: keep(name, module, out))
        if inputs:
            caller = own_path(system, name.rpartition(".")[0])  # type: ignore[arg-type]
            yield module.register_forward_pre_hook(lambda _, given: keep(caller, system.get_submodule(caller), given))

    with contextlib.ExitStack() as stack:
        for handle in (handle for name, module in system.named_modules() if name for handle in hooks(name, module)):
            stack.enter_context(handle)
        run()
    return seen
