"""Probe of the thinker for the checks, made of the code that trains it. B rows, M output tokens, S output steps, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.recipes.thinker.model import select_rows
from seedbed.recipes.thinker.program import LOOKUP, WRITE
from seedbed.recipes.thinker.task import Task
from seedbed.train.probe import Probe
from seedbed.train.stop_gradient import held_loss

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
    dead = ("model.start.latent",) if 0 < loss.backprop_steps < num_steps else ()
    ranges = {name: (0.0, float(shape.vocab - 1)) for name in ("x", "y")}
    ranges["length"] = (1.0, float(task.length))
    from seedbed.recipes.thinker import definitions

    known: dict[str, Any] = {
        "ranges": ranges,
        "lower_bound": 0.0,
        "held": lambda: held_loss(system, batch, (num_latents, num_steps)),
        "dead": dead,
        "constant": ("length",),
        "definitions": definitions.of(system),
    }
    recall = _recall(system, batch, num_latents, num_steps) if model.num_memory else None
    probe = Probe(batch=batch, predict=predict, objective=objective, recall=recall, **known, **_stages(system))
    if system.config.model.target_stream != "off":
        ranges["x"] = (float(batch["x"].min()), float(shape.vocab - 1))
        # Targets are inputs of those after them: there are none that predictions do not see.
        return replace(probe, inputs="y", order="strict", uses=("x",), mask="learn")
    return replace(
        probe,
        inputs="x",
        targets="y",
        mask="learn",
        decode=lambda row: task.to_text(row.tolist()),
        rule=lambda b: _rule(task, b),
        oracle=lambda b: 50.0 * F.one_hot(b["y"], shape.vocab)[:, :, None].expand(-1, -1, len(output_steps), -1).double(),
        order="full" if batch["x"].shape[1] <= batch["y"].shape[1] else None,  # needs an output for every input position
        at_init=lambda b: math.log(shape.vocab),
        baselines=lambda b: {"one of the symbols": math.log(shape.symbols)},
        calls={"model.cell.0": ("model.start", system.steps.high)} if loss.steps in ("all", "last") else None,
        chance=("model.decoder", {"token": 1 / shape.vocab, "exact": shape.vocab**-shape.num_out}),
    )


def _recall(
    system: ThinkerSystem, batch: Batch, num_latents: int, num_steps: int
) -> tuple[dict[int, bool], Callable[[int, bool], Tensor]]:
    """Steps that write a state which the next step or, after the last one, the decoder looks up, or which none does."""
    model, setting = system.model, system.batch_settings(batch["index"], num_latents, num_steps)
    rows, write = setting.program_T5.tolist(), model.write
    asked = [bool(row[LOOKUP]) for row in (*rows[1:num_steps], rows[num_steps - 1])]  # after each step
    asked[-1] = asked[-1] and model.ask is not None
    known = {t: asked[t] for t in range(num_steps) if rows[t][WRITE] and (asked[t] or not any(asked[t:]))}

    def predict(step: int, is_other: bool) -> Tensor:
        turn, last = count(), min(step + 1, num_steps - 1) if known[step] else num_steps - 1
        other = lambda memory, z_BKD, on: write(memory, -z_BKD if is_other and next(turn) == step else z_BKD, on)  # noqa: E731
        with patch.object(model, "write", other):
            return torch.cat(model.logits(batch, setting, num_latents, last + 1, (last,)))

    return known, predict


def _stages(system: ThinkerSystem) -> dict[str, Any]:
    """How the curriculum is tested, where there is one; a mixed one shows samples beyond its stage."""
    if not system.is_staged:
        return {}
    right = lambda batch, *rest: (torch.zeros(()), torch.ones_like(batch["y"], dtype=torch.float32))  # noqa: E731
    entry = "length" if system.config.data.curriculum.kind == "gated" else ""
    return {"perfect": lambda: patch.object(system.model, "forward", right), "stage_entry": entry}


def _rule(task: Task, batch: Batch) -> Tensor:
    """The answers by the reference in plain Python, -1 beyond them."""
    expected_BM = torch.full_like(batch["y"], -1)
    for row, x in enumerate(batch["x"].tolist()):
        answer = task.target([token for token in x if token != task.pad])
        expected_BM[row, : len(answer)] = torch.tensor(answer, device=expected_BM.device)
    return expected_BM
