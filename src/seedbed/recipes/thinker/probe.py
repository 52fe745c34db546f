"""Probe of the thinker for the checks, made of the code that trains it. B rows, M output tokens, S output steps, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.recipes.thinker.model import select_rows
from seedbed.recipes.thinker.task import Task
from seedbed.train.engine import EvalEngine
from seedbed.train.probe import Probe

if TYPE_CHECKING:
    from seedbed.recipes.thinker.system import ThinkerSystem

Batch = dict[str, Tensor]


def build_probe(system: ThinkerSystem, batch: Batch) -> Probe:
    """The outputs of the queries, and what to expect of them. A stream of targets has the targets as inputs."""
    model, task, shape = system.model, system.source.task, system.source.shape
    num_latents, num_steps = system.variant(0, system.config.steps)
    output_steps = system.output_steps(num_steps)

    def predict(b: Batch) -> Tensor:
        setting = system.batch_settings(b["index"], num_latents, num_steps)
        return torch.cat([one.permute(1, 2, 0, 3) for one in model.logits(b, setting, num_latents, num_steps, output_steps)], 2)

    def objective(logits_BMSV: Tensor, b: Batch) -> Tensor:
        weight_S = select_rows(system.batch_settings(b["index"], num_latents, num_steps).weight_T, output_steps)
        parts = logits_BMSV.permute(2, 0, 1, 3).split(len(output_steps))
        return torch.stack([model.score(part, b, weight_S) for part in parts]).sum()

    loss = system.config.model.loss
    held = (lambda: _held(system, batch)) if loss.steps == "progressive" or loss.backprop_steps else None
    dead = ("model.start.latent",) if 0 < loss.backprop_steps < num_steps else ()
    ranges = {name: (0.0, float(shape.vocab - 1)) for name in ("x", "y")}
    ranges["length"] = (1.0, float(task.length))
    if system.config.model.target_stream != "off":
        ranges["x"] = (float(batch["x"].min()), float(shape.vocab - 1))
        return Probe(
            batch=batch,
            predict=predict,
            objective=objective,
            ranges=ranges,
            lower_bound=0.0,
            held=held,
            dead=dead,
            constant=("length",),
        )
    return Probe(
        batch=batch,
        predict=predict,
        objective=objective,
        inputs="x",
        targets="y",
        mask="learn",
        rule=lambda b: _rule(task, b),
        ranges=ranges,
        oracle=lambda b: 50.0 * F.one_hot(b["y"], shape.vocab)[:, :, None].expand(-1, -1, len(output_steps), -1).double(),
        lower_bound=0.0,
        order="full" if batch["x"].shape[1] <= batch["y"].shape[1] else None,  # needs an output for every input position
        at_init=lambda b: math.log(shape.vocab),
        baselines=lambda b: {"one of the symbols": math.log(shape.symbols)},
        held=held,
        dead=dead,
        constant=("length",),
    )


@torch.no_grad()
def _held(system: ThinkerSystem, batch: Batch) -> Callable[[], Tensor]:
    """The training loss as a function of the weights, with the states at which gradients stop held at their present values."""
    engine = EvalEngine(system, system.config, next(system.parameters()).device)
    engine.variant = system.variant(0, system.config.steps)
    states: list[Tensor] = []

    def loss(stop_gradient: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        system.model.stop_gradient = stop_gradient  # type: ignore[method-assign]
        try:
            return system.loss(batch, engine)[0]
        finally:
            del system.model.stop_gradient

    def record(x: Tensor, here: Tensor | None) -> Tensor:
        states.append(x)
        return x

    def replayed() -> Tensor:
        at = iter(states)
        return loss(lambda x, here: next(at) if here is None else torch.where(here, next(at), x))

    loss(record)
    return replayed


def _rule(task: Task, batch: Batch) -> Tensor:
    """The answers by the reference in plain Python, -1 beyond them."""
    expected_BM = torch.full_like(batch["y"], -1)
    for row, x in enumerate(batch["x"].tolist()):
        answer = task.target([token for token in x if token != task.pad])
        expected_BM[row, : len(answer)] = torch.tensor(answer, device=expected_BM.device)
    return expected_BM
