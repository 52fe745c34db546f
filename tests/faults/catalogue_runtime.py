"""Faults that only a live run shows: NaN, kicks, slow data, leaks, layers that die, rates that stray, numbers that never move.

`expected` holds kinds of events here. A fault begins at step `BEGIN` where it has a beginning.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from patching import EXAMPLE, ROOT, TOY, Fault
from torch import Tensor, nn

from seedbed.recipes import Recipe
from seedbed.train import engine, loop
from seedbed.train.system import System

GPT = "gpt/demo"
BEGIN = 60
Apply = Callable[[], AbstractContextManager[Any]]
FIRST = {TOY: "net.0", EXAMPLE: "net.0", GPT: "model.blocks.0.mlp.up"}
CUT = {TOY: "net.0", EXAMPLE: "net.0", GPT: "model.blocks.0.attention"}
SMALL = {
    TOY: ("data.num=960", "every.eval=50", "every.save=50", "every.log=5", "guard.window=32"),
    EXAMPLE: ("batch=64", "model.width=16", "every.eval=50", "every.sample=0", "every.save=50", "every.log=5", "guard.window=32"),
    GPT: ("model.depth=1", "model.width=32", "model.heads=2", "data.block=16", "batch=4", "limit.valid=8", "guard.window=32",
          "every.eval=50", "every.sample=0", "every.save=50", "every.log=5"),
}  # fmt: skip


def built(change: Callable[[System, Any], None]) -> Apply:
    """Every system is changed right after it was built."""

    @contextlib.contextmanager
    def apply() -> Iterator[None]:
        real = Recipe.build

        def build(self: Recipe, config: Any, data: Any) -> System:
            system = real(self, config, data)
            change(system, data)
            return system

        with patch.object(Recipe, "build", build):
            yield

    return apply


def before_step(act: Callable[[loop.Job], None], step: int = BEGIN, once: bool = True) -> Apply:
    """Something happens to the job right before a step, or before all from there on."""

    @contextlib.contextmanager
    def apply() -> Iterator[None]:
        real, done = loop.take_step, []

        def take(job: loop.Job) -> None:
            if job.step + 1 >= step and not (once and done):
                done.append(1)
                act(job)
            real(job)

        with patch.object(loop, "take_step", take):
            yield

    return apply


def hooked(name: str, spoil: Callable[[Tensor], Tensor], only: int = 0) -> Apply:
    """A module's result is spoiled in training, from call `BEGIN` on or for `only` one call."""

    def change(system: System, data: Any) -> None:
        calls = [0]

        def hook(module: nn.Module, given: Any, out: Tensor) -> Tensor:
            calls[0] += system.training
            due = calls[0] == only if only else calls[0] >= BEGIN
            return spoil(out) if system.training and due else out

        system.get_submodule(name).register_forward_hook(hook)

    return built(change)


def nan_gradient(out: Tensor) -> Tensor:
    out = out * 1.0
    out.register_hook(lambda grad: grad * float("nan"))
    return out


def poison(job: loop.Job) -> None:
    with torch.no_grad():
        next(job.system.parameters()).view(-1)[0] = float("nan")


def kick(job: loop.Job) -> None:
    with torch.no_grad():
        for param in job.system.parameters():
            param.mul_(8.0)


def slow(system: System, data: Any) -> None:
    real = data.train.locate

    def locate(epoch_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        time.sleep(0.004)
        return real(epoch_B, index_B)

    data.train.locate = locate


def leaking(size: int) -> Apply:
    def change(system: System, data: Any) -> None:
        kept: list[Tensor] = []
        real = system.loss

        def loss(batch: Any, engine: Any) -> Any:
            kept.append(torch.full((size,), 1.0))
            return real(batch, engine)

        system.loss = loss  # type: ignore[method-assign]

    return built(change)


def spare(system: System, data: Any) -> None:
    system.spare = nn.Linear(4, 4)


def explode(name: str) -> Callable[[loop.Job], None]:
    def act(job: loop.Job) -> None:
        with torch.no_grad():
            for param in job.system.get_submodule(name).parameters():
                param.fill_(40.0)

    return act


def stale(system: System, data: Any) -> None:
    kept: list[dict[str, float]] = []
    real = system.evaluate

    def evaluate(source: Any, engine: Any) -> dict[str, float]:
        kept.append(real(source, engine))
        return kept[0]

    system.evaluate = evaluate  # type: ignore[method-assign]


def flat_rate() -> AbstractContextManager[Any]:
    return patch.object(engine, "multiplier", lambda schedule, progress, step: 1.0)


def runtime(id: str, recipe: str, place: str, expected: str, apply: Apply, *settings: str) -> Fault:
    return Fault(f"{id}, {recipe.rpartition('/')[2]}", recipe, place, {expected}, apply, settings=settings)


def of(recipe: str) -> list[Fault]:
    """The faults that every recipe can have."""
    first, cut = FIRST[recipe], CUT[recipe]
    return [
        runtime("NaN in a forward pass", recipe, "model", "nonfinite", hooked(first, lambda out: out / 0.0, only=BEGIN)),
        runtime("NaN in a gradient only", recipe, "model", "nonfinite", hooked(first, nan_gradient, only=BEGIN)),
        runtime("NaN in a weight", recipe, "optimizer", "nonfinite", before_step(poison)),
        runtime("kick", recipe, "optimizer", "spike", before_step(kick)),
        runtime("slow loader", recipe, "data", "data_wait", built(slow)),
        runtime("leak on the host", recipe, "loop", "host_leak", leaking(200_000), "steps=640", "guard.window=128"),
        runtime("unused parameters", recipe, "model", "unused", built(spare)),
        runtime("layer that dies", recipe, "model", "dead", hooked(cut, lambda out: out.detach()), "steps=450"),
        runtime("layer that explodes", recipe, "optimizer", "exploding", before_step(explode(first), once=False)),
        runtime("schedule that never moves", recipe, "optimizer", "schedule", flat_rate),
        runtime("evaluation from a cache", recipe, "evaluation", "stuck_eval", built(stale)),
    ]


FAULTS = [*of(TOY), *of(EXAMPLE), *of(GPT)]
FAULTS.append(runtime("no learning at all", GPT, "optimizer", "floor", contextlib.nullcontext, "optim.lr=1e-8", "steps=260"))


def path_of(recipe: str) -> str:
    return str(ROOT / recipe) if recipe.endswith(".py") else recipe
