"""What a stepper asks of recipes, data and engines: interfaces for the type checker, which no run loads."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from seedbed.config import Config
from seedbed.train.system import Batch, System


class Builder(Protocol):
    """The part of a recipe that builds a system."""

    def build(self, config: Any, data: Any) -> System: ...


class Parts(Protocol):
    """Where a step's data comes from: a Feed, or the counters of many runs."""

    def part(self, k: int) -> Batch: ...


class Steps(Protocol):
    """What takes the steps: one run's Engine, or the Stack of many. Measurements have the shape of `halted`."""

    system: System
    config: Config
    device: torch.device
    variant: Hashable
    lr_factor: Tensor
    halted: Tensor
    compiled: set[str]

    def step(self, parts: Callable[[int], Batch]) -> dict[str, Tensor]: ...
    def dry_run(self) -> AbstractContextManager[None]: ...
