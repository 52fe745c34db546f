"""Parts of the thinker written a second time. B samples, M output tokens, S output steps, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.nn import rng
from seedbed.recipes.thinker import curriculum, evaluate
from seedbed.recipes.thinker.addition import Addition
from seedbed.recipes.thinker.batch_settings import draw_settings, settings_tensors
from seedbed.recipes.thinker.data import TaskSource
from seedbed.recipes.thinker.program import OUTPUT
from seedbed.recipes.thinker.task import StringTask

if TYPE_CHECKING:
    from seedbed.recipes.thinker.system import ThinkerSystem

NUM, CPU = 4096, torch.device("cpu")


def of(system: ThinkerSystem) -> dict[str, Callable[[], Iterator[tuple]]]:
    parts = {"data": data, "objective": loss, "model": model, "evaluation": metrics}
    return {place: lambda part=part: part(system) for place, part in parts.items()}


def data(system: ThinkerSystem) -> Iterator[tuple]:
    """Lengths cover their range, and held-out pairs are held out in both orders."""
    source, kinds = system.source, replace(system.config.data.curriculum, share=0.5)
    key_B = rng.keys(1, torch.arange(NUM), 0)
    ranges = {"uniform": (1, 5), "gated": (1, 5), "mixed": (1, 9), "mostly": (1, 9), "fixed": (9, 9)}
    for kind, (low, high) in ranges.items():
        made = curriculum.lengths(key_B, 9 if kind == "mostly" else 5, replace(kinds, kind=kind), 9)
        yield f"lengths of a {kind} curriculum", curriculum.lengths, made.unique(), [*range(low, high + 1)]
        share = {"mixed": 0.5 / 9, "mostly": 0.5 + 0.5 / 9, "fixed": 1.0}.get(kind, 0.2)
        yield f"share of the longest ({kind})", curriculum.lengths, (made == high).double().mean(), share, 0.2
    task, pair_B2 = source.task, rng.integers(key_B, 2, 97)
    if isinstance(task, StringTask):
        drawn = source.at(task.length).make(torch.arange(NUM), 1)["x"].unique()
        yield "symbols of the inputs", type(task).make, drawn, [*range(task.symbols)]
    if isinstance(task, Addition):
        held, turned = (Addition(task.base, 97, 0.3, "free").is_held(*pair.unbind(-1)) for pair in (pair_B2, pair_B2.flip(-1)))
        yield "pairs that are held out, in the other order", Addition.is_held, turned, held
        yield "share of the pairs that are held out", Addition.is_held, held.double().mean(), 0.3, 0.15


def loss(system: ThinkerSystem) -> Iterator[tuple]:
    """Weights of the steps, and cross-entropy over targets with a loss, then over steps."""
    config, steps = system.config.model, system.steps
    if config.loss.steps in ("all", "last") and not config.loss.backprop_steps and system.program is not None:
        table, rows = settings_tensors(config, 1, steps.high, CPU), system.program.rows(steps.high)
        found = draw_settings(table, torch.tensor(0), steps.high, None, torch.tensor(steps.high)).weight_T
        asked = {steps.high} if config.loss.steps == "last" else {*steps.values()}
        raw = [float(config.loss.base) ** (t + 1 - steps.high) * rows[t][OUTPUT] * (t + 1 in asked) for t in range(steps.high)]
        yield "weights of the steps", (settings_tensors, draw_settings), found, [value / sum(raw) for value in raw]
    logits = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    y, learn, weight_S = torch.arange(12).view(3, 4) % 6, torch.arange(12).view(3, 4) % 5 != 0, torch.tensor([0.3, 0.7])
    nats = [F.cross_entropy(part[learn], y[learn]) for part in logits]
    found = system.model.score(logits, {"y": y, "learn": learn}, weight_S)
    yield "loss of the steps", type(system.model).score, found, 0.3 * nats[0] + 0.7 * nats[1]
    staged = replace(system.config.data.curriculum, kind="gated", start=2, window=3, threshold=0.5, min_steps=3)
    stage, seen = curriculum.first(staged, 9), list[int]()
    for hits in (1, 0, 4, 2, 2, 2, 0, 4, 4):  # of 4, in windows of three steps: too few, just enough, enough
        stage = curriculum.advance(stage, torch.tensor(hits), torch.tensor(4), staged, 9)
        seen.append(int(curriculum.limit(stage)))
    yield "longest samples after each step", curriculum.advance, seen, [2, 2, 2, 2, 2, 3, 3, 3, 4]
    setting = SimpleNamespace(weight_T=torch.tensor([0.3, 0.7, 0.0]))
    with patch.object(system.model, "logits", lambda *given: [torch.cat((logits, logits[:1]))]):
        right = system.model({"y": y, "learn": learn}, setting, 1, 3, (0, 1, 2))[1]
    yield "answers of the last step with a weight", type(system.model).forward, right, (logits[1].argmax(-1) == y).float()


def model(system: ThinkerSystem) -> Iterator[tuple]:
    """What the latents read and start from; what padding is embedded as changes nothing."""
    from seedbed.recipes.thinker.model import Start, Thinker, sinusoids

    angle_LF = torch.arange(5)[:, None] * 100.0 ** (-torch.arange(4) / 4)
    wanted = torch.cat((angle_LF.sin(), angle_LF.cos()), 1)
    yield "sines and cosines of positions", sinusoids, sinusoids(torch.arange(5), 8, 100.0), wanted

    block = system.model.cell[0]
    batch, first = system.source.make(torch.arange(64), 1), evaluate.evaluation_settings(system, evaluate.as_trained(system), CPU)
    rows = list[Tensor]()
    with patch.object(block, "context", lambda rows_BCD: rows.append(rows_BCD) or type(block).context(block, rows_BCD)):
        evaluate.states_of(system, batch, evaluate.as_trained(system))
    read_BND = rows[0][:, 1 : 1 + batch["x"].shape[1]] - system.model.embed(batch["x"])
    num = len((read_BND[0] * 1e4).round().unique(dim=0))
    yield "inputs less their embeddings: positions that differ", Thinker.unroll, num, read_BND.shape[1]
    one, none = (system.model.start(batch["index"], first._replace(sigma=torch.tensor(sigma)), 2) for sigma in (1.0, 0.0))
    noise = (one - none).detach()
    spread = [noise.std(), 1.0 + (noise[1:] * noise[:-1]).mean(), 1.0 + (noise[:, 0] * noise[:, 1]).mean()]
    yield "spread of initial states, and what samples and latents share", Start.forward, spread, [1.0, 1.0, 1.0], 0.1
    source = system.source
    wanted = TaskSource(source.task, replace(source.curriculum, kind="uniform"), 1, source.streams)
    batch, weight, found = wanted.make(torch.arange(16), 1), system.model.embed.weight, list[Tensor]()
    kept = weight.detach().clone()
    with torch.no_grad():
        for _ in range(2):
            found.append(evaluate.states_of(system, batch, evaluate.as_trained(system)).state_SBKD[-1])
            weight[source.task.pad] = weight[source.task.pad].roll(1)
        weight.copy_(kept)
    yield "states when padding is embedded otherwise", Thinker.unroll, found[1], found[0]


def metrics(system: ThinkerSystem) -> Iterator[tuple]:
    """Planted answers, of which every fourth sample has one wrong token; draws differ, and samples have the full length."""
    source, lengths = system.data.valid, []
    assert isinstance(source, TaskSource)
    settings = [evaluate.evaluation_settings(system, evaluate.as_trained(system, n), CPU) for n in range(3)]
    yield "streams of three draws of noise", evaluate.evaluation_settings, len({one.stream for one in settings}), 3
    yield "draws that share noise with training", evaluate.evaluation_settings, any(one.stream == 0 for one in settings), False

    def planted(system: Any, batch: dict[str, Tensor], inference: evaluate.Inference) -> Tensor:
        lengths.append(batch["length"])
        token_BM, wrong_B = batch["y"].clone(), batch["index"] % 4 == 0
        token_BM[wrong_B, 0] = (token_BM[wrong_B, 0] + 1) % 2
        return 20.0 * (F.one_hot(token_BM, source.shape.vocab) * batch["keep"][..., None]).float()[None]

    mixed = TaskSource(source.task, replace(source.curriculum, kind="uniform"), source.seed, source.streams)

    with patch.object(evaluate, "predict", planted):
        found = evaluate.score(system, mixed, evaluate.as_trained(system), 64)
        logits_BMV = planted(system, batch := mixed.make(torch.arange(64), source.seed), evaluate.as_trained(system))[0]
        quick = evaluate.quick_evaluation(system, source)
        full = source.at(source.task.length).make(torch.arange(64), source.seed)
    first_B = (batch["index"] % 4 == 0) & batch["keep"][:, 0]
    wanted = [1.0 - first_B.double().mean(), 1.0 - first_B.sum() / batch["keep"].sum()]
    wanted += [F.cross_entropy(logits_BMV[batch["keep"]], batch["y"][batch["keep"]])]
    yield "exact match, right tokens and nats", evaluate.score, [found.exact, found.token, found.nats], wanted
    yield "lengths of the evaluation", evaluate.quick_evaluation, torch.cat(lengths[2:]).unique(), full["length"].unique()
    if not quick["leak"]:
        yield "error and exact match", evaluate.quick_evaluation, quick["error"] + quick["exact"], 1.0
