"""The thinker opened up for the checks, by the code that trains it. B rows, M output tokens, S answers, V vocabulary."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.recipes.thinker.model import picked
from seedbed.recipes.thinker.task import Task
from seedbed.train.probe import Probe

if TYPE_CHECKING:
    from seedbed.recipes.thinker.system import ThinkerSystem

Batch = dict[str, Tensor]


def open_up(system: ThinkerSystem, batch: Batch) -> Probe:
    """What the queries answer to an input, and what to expect of it. A stream of targets has the targets for its inputs."""
    model, task, shape = system.model, system.source.task, system.source.shape
    num_latents, num_steps = system.variant(0, system.config.steps)
    answers = system.answers(num_steps)

    def predict(b: Batch) -> Tensor:
        setting = system.setting(b["index"], num_latents, num_steps)
        return torch.cat([one.permute(1, 2, 0, 3) for one in model.logits(b, setting, num_latents, num_steps, answers)], 2)

    def objective(logits_BMSV: Tensor, b: Batch) -> Tensor:
        weight_S = picked(system.setting(b["index"], num_latents, num_steps).weight_T, answers)
        parts = logits_BMSV.permute(2, 0, 1, 3).split(len(answers))
        return torch.stack([model.score(part, b, weight_S) for part in parts]).sum()

    whole = system.source.curriculum.kind == "fixed"
    ranges = {name: (0.0, float(shape.vocab - 1)) for name in ("x", "y")}
    ranges["length"] = (float(task.length) if whole else 1.0, float(task.length))
    if system.config.model.flow != "off":
        ranges["x"] = (float(batch["x"].min()), float(shape.vocab - 1))
        return Probe(batch=batch, predict=predict, objective=objective, ranges=ranges, lower_bound=0.0)
    return Probe(
        batch=batch,
        predict=predict,
        objective=objective,
        inputs="x",
        targets="y",
        mask="learn",
        rule=lambda b: _rule(task, b),
        ranges=ranges,
        oracle=lambda b: 50.0 * F.one_hot(b["y"], shape.vocab)[:, :, None].expand(-1, -1, len(answers), -1).double(),
        lower_bound=0.0,
        order="full" if batch["x"].shape[1] <= batch["y"].shape[1] else None,  # said of tapes that lie side by side
        at_init=lambda b: math.log(shape.vocab),
        baselines=lambda b: {"one of the symbols": math.log(shape.symbols)},
    )


def _rule(task: Task, batch: Batch) -> Tensor:
    """The answers by the reference in plain Python, -1 where it says nothing."""
    expected_BM = torch.full_like(batch["y"], -1)
    for row, x in enumerate(batch["x"].tolist()):
        answer = task.target([token for token in x if token != task.pad])
        expected_BM[row, : len(answer)] = torch.tensor(answer, device=expected_BM.device)
    return expected_BM
