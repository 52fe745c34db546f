"""The interface between recipes and the loop: a `System` holds a model and its objective.

Below it, what training asks for where a recipe offers it: protocols found by `isinstance`; capabilities.py has the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase as fnmatch
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from seedbed.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from seedbed.data.feed import Source
    from seedbed.train.engine import Engine, EvalEngine
    from seedbed.train.job import Action
    from seedbed.train.watch import Alarm

T = TypeVar("T")
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """Output for a person to look at: a text, or files (images, videos)."""

    text: str = ""
    files: tuple[Path, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A request for a sample: the given options, a folder for files, and a callback for streamed text."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    write: Callable[[str], None] | None = None

    def read(self, kind: type[T] | None = None, **old: Any) -> T:
        """The options as a dataclass of options; an unknown option is an error."""
        if kind is None:
            names = f" with the fields {', '.join(old)}" if old else ""
            raise UserError(f"Request.read takes a dataclass of options{names}; declare it as `sample_options` of the System")
        if not self.options:
            return kind()
        from seedbed.train.options import read_options

        return read_options(kind, self.options)


def option(default: Any, help: str = "", *, low: float = -inf, high: float = inf, needs_data: bool = False) -> Any:
    """A field of options: its default, one line of help, its valid range, and whether it needs the training data."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "needs_data": needs_data})


@dataclass(frozen=True)
class NoOptions:
    """Samples without options."""


def over_ranks(total: float, engine: EvalEngine) -> float:
    """A sum over this rank's share as the sum over all."""
    return engine.all_reduce_sum(torch.tensor(total, dtype=torch.float64)).item()


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share an optimizer and its numbers; `lr` and `weight_decay` are base values."""

    name: str
    kind: str
    lr: float
    weight_decay: float
    params: dict[str, nn.Parameter]


class System(nn.Module):
    """A recipe's model and objective. Override `loss`; override `update` only when there is more than one loss.

    `stage_metric` names the metric that is the stage of a curriculum: when it changes, the loss may jump.
    `auto_compile` is what `compile=auto` compiles where that pays; `compile_options` go to `torch.compile` as they are.
    `evaluation_steers` means that evaluations influence training, so that their number is part of the run.
    `num_cpu_threads` is the best number of CPU threads for its tensors, 0 for torch's default; `actions` are run between steps,
    in addition to evaluating, sampling and saving (`Action` of train/job.py).
    `sample_options` is the dataclass of options that `sample` reads; its fields are made by `option`.
    `higher_is_better` names the metrics of `evaluate` of which more is better, with * and ? as in file names.
    """

    stage_metric: ClassVar[str] = ""
    auto_compile: ClassVar[Literal["blocks", "whole"]] = "blocks"
    compile_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    evaluation_steers: ClassVar[bool] = False
    num_cpu_threads: int = 0
    actions: Sequence[Action] = ()
    sample_options: ClassVar[type] = NoOptions
    higher_is_better: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.__module__.startswith("seedbed."):  # a user's
            from seedbed.train.recipe_mistakes import refuse_old_names

            refuse_old_names(cls)

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over this batch's targets, and further measurements."""
        raise NotImplementedError

    def update(self, batch: Batch, engine: Engine) -> dict[str, Tensor]:
        """One step on one batch: call `engine.minimize` once per optimizer."""
        loss, extra = self.loss(batch, engine)
        engine.minimize(loss)
        return {"loss": loss.detach(), **extra}

    def num_targets(self, batch: Batch) -> Tensor | int:
        """The number of targets that the loss of this batch averages over; micro-batches are weighted by it."""
        return len(next(iter(batch.values())))

    def evaluate(self, source: Source, engine: EvalEngine) -> dict[str, float]:
        """The recipe's metrics on validation data, exact and deterministic. The first one decides `best`."""
        raise NotImplementedError

    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        """A sample for a person to look at, during training or on request. Deterministic for equal weights and options."""
        return Sample()

    def compile_units(self) -> Iterator[nn.Module]:
        """The modules that `compile=blocks` compiles one by one."""
        return iter(())

    def variant(self, step: int, num_steps: int) -> Hashable:
        """What the host decides before a step (a length, a number of iterations); every value is captured separately."""
        return None

    def state(self) -> dict[str, Any]:
        """Further state of the objective that a checkpoint must keep, as plain JSON values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""


def maximized(system: System, numbers: Mapping[str, float]) -> list[str]:
    """The metrics of which more is better."""
    return [name for name in numbers if any(fnmatch(name, pattern) for pattern in system.higher_is_better)]


# ---- capabilities that every training run asks for ----------------------------------------------------------------------


@runtime_checkable
class Described(Protocol):
    def describe(self) -> dict[str, Any]:
        """What is printed before step 0, next to the number of parameters."""
        ...


def describe(system: System) -> dict[str, Any]:
    return system.describe() if isinstance(system, Described) else {}


@runtime_checkable
class CountsFlops(Protocol):
    def flops_per_item(self) -> float:
        """Floating-point operations to train on one item, forward and backward."""
        ...


def flops_per_item(system: System) -> float:
    """Floating-point operations to train on one item; 0 when unknown."""
    return float(system.flops_per_item()) if isinstance(system, CountsFlops) else 0.0


@runtime_checkable
class HasAlarms(Protocol):
    def alarms(self, measured: dict[str, float], progress: float) -> list[Alarm]:
        """What the recipe's own measurements warn of at a log point; each kind is raised once in a run."""
        ...


def alarms(system: System, measured: dict[str, float], progress: float) -> list[Alarm]:
    return system.alarms(measured, progress) if isinstance(system, HasAlarms) else []


@runtime_checkable
class HasOptimizers(Protocol):
    def named_optimizers(self) -> dict[str, nn.Module]:
        """The modules that have an optimizer of their own, by its name. "main" is the one of the loss."""
        ...


def named_optimizers(system: System) -> dict[str, nn.Module]:
    """The modules by the name of their optimizer; one called "main" unless the recipe says otherwise."""
    return system.named_optimizers() if isinstance(system, HasOptimizers) else {"main": system}


@runtime_checkable
class HasRankLocalBuffers(Protocol):
    def rank_local_buffers(self) -> frozenset[str]:
        """Saved buffers that differ between ranks; checkpoints keep the primary rank's, with the optimizer."""
        ...


def rank_local_buffers(system: System) -> frozenset[str]:
    return system.rank_local_buffers() if isinstance(system, HasRankLocalBuffers) else frozenset()


@runtime_checkable
class HasBaselines(Protocol):
    def baselines(self, batch: Batch) -> dict[str, float]:
        """The losses of trivial predictors by name, easiest first: a model that learns gets below the first."""
        ...


def baselines(system: System, batch: Batch) -> dict[str, float]:
    """Of the system itself or of its probe; none where neither declares any."""
    if isinstance(system, HasBaselines):
        return system.baselines(batch)
    from seedbed.train import capabilities

    probe = capabilities.probe(system, batch)
    return probe.baselines(probe.batch) if probe and probe.baselines else {}
