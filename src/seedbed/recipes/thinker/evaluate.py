"""Evaluation of a thinker: exact match, the leak check, the quick evaluation during training, and the answer as ONNX.

Shape suffixes: B samples, N input and M output tokens, K latents, T steps, S output steps, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.errors import UserError
from seedbed.recipes.thinker.batch_settings import EVALUATION, BatchSettings
from seedbed.recipes.thinker.data import TaskSource
from seedbed.recipes.thinker.model import States
from seedbed.recipes.thinker.presets import BY_ENDS
from seedbed.recipes.thinker.program import NAMED, Program, parse_program
from seedbed.recipes.thinker.tasks import trivial_baselines
from seedbed.train.export_onnx import Function, OnnxNetwork

if TYPE_CHECKING:
    from seedbed.recipes.thinker.system import ThinkerSystem

Batch = dict[str, Tensor]

# Noise at evaluation is the same for every run.
SEED = 0
# Limit of the values in the largest tensors of an evaluation batch.
MAX_VALUES = {"cuda": 1 << 28, "mps": 1 << 25, "cpu": 1 << 23}
NUM_QUICK = {"cuda": 4096, "mps": 1024, "cpu": 1024}
# Standard errors above the trivial answer at which an accuracy without the right input is a leak.
SIGMAS = 3.0


@dataclass(frozen=True)
class Inference:
    """Settings of inference: number of latents, output steps, the draw of the noise, and the program."""

    latents: int
    steps: tuple[int, ...]
    draw: int = 0
    program: Program | None = None


@dataclass
class Score:
    """Accuracies at each output step; by position, and samples, at the last of them."""

    steps: tuple[int, ...]
    exact_S: Tensor
    token_S: Tensor
    position_M: Tensor
    nats: float
    num: int

    @property
    def exact(self) -> float:
        return float(self.exact_S[-1])

    @property
    def token(self) -> float:
        return float(self.token_S[-1])

    @property
    def num_wrong(self) -> int:
        return round((1.0 - self.exact) * self.num)


@dataclass(frozen=True)
class Leak:
    """The accuracy without the right input, and the limit that chance allows."""

    accuracy: float
    limit: float
    moved: float

    @property
    def found(self) -> bool:
        return self.accuracy > self.limit or self.moved > 0.0

    def __str__(self) -> str:
        if self.moved > 0.0:
            return f"LEAK: an answer moves by {self.moved:.3g} when later targets change"
        word = "LEAK: " if self.found else ""
        return f"{word}{self.accuracy:.2%} of tokens right with the input of another sample, at most {self.limit:.2%} by luck"


def as_trained(system: ThinkerSystem, draw: int = 0) -> Inference:
    """As many latents and steps as training went up to."""
    return Inference(system.latents.high, (system.steps.high,), draw)


def evaluation_settings(system: ThinkerSystem, inference: Inference, device: torch.device) -> BatchSettings:
    """The noise and the program of an evaluation; random programs are evaluated with the one that allows everything."""
    num_steps, config = inference.steps[-1], system.config.model
    program = inference.program or system.program
    program = program or parse_program(NAMED["everything"], num_steps, config.n_memory, config.static_memory)
    assert program is not None
    table_T5 = torch.tensor(program.rows(num_steps), dtype=torch.float32, device=device)
    sigma = torch.tensor(config.noise, device=device)
    seed, weight_T = torch.tensor(SEED, device=device), torch.ones(num_steps, device=device)
    return BatchSettings(seed, table_T5, weight_T, sigma, stream=EVALUATION + inference.draw)


@torch.no_grad()
def predict(system: ThinkerSystem, batch: Batch, inference: Inference) -> Tensor:
    """Logits (S, B, M, V) at the steps of `look`: of the queries, or of the target stream where it is alone."""
    setting, keep = evaluation_settings(system, inference, batch["x"].device), tuple(step - 1 for step in inference.steps)
    return system.model.logits(batch, setting, inference.latents, inference.steps[-1], keep)[-1]


@torch.no_grad()
def states_of(system: ThinkerSystem, batch: Batch, inference: Inference) -> States:
    """The states at the steps of `look`."""
    setting, keep = evaluation_settings(system, inference, batch["x"].device), tuple(step - 1 for step in inference.steps)
    return system.model.unroll(batch, setting, inference.latents, inference.steps[-1], keep)


def batches(system: ThinkerSystem, source: TaskSource, inference: Inference, num: int) -> Iterator[Batch]:
    """The first `num` samples of a source in batches that fit into memory."""
    device, model = next(system.parameters()).device, system.config.model
    shape = source.shape
    rows = (inference.latents + shape.num_in) * model.heads * inference.latents + 4 * model.width * inference.latents
    seen = inference.latents + (shape.num_out if model.output.self_attn else 0)
    answer = shape.num_out * (2 * shape.vocab + 4 * model.width + model.heads * seen)
    size = max(1, min(num, MAX_VALUES[device.type] // (rows + len(inference.steps) * (inference.latents * model.width + answer))))
    for start in range(0, num, size):
        yield source.batch({"index": torch.arange(start, min(num, start + size), device=device)})


def right_answers(logits_SBMV: Tensor, batch: Batch) -> Tensor:
    """(S, B, M): whether the likeliest token is the right one, or the position does not count."""
    return (logits_SBMV.argmax(-1) == batch["y"]) | ~batch["keep"]


def score(system: ThinkerSystem, source: TaskSource, inference: Inference, num: int) -> Score:
    """Exact match, token accuracy and cross-entropy over the first `num` samples."""
    totals: list[Tensor] = []
    for batch in batches(system, source, inference, num):
        logits_SBMV, keep_BM = predict(system, batch, inference), batch["keep"]
        right_SBM = right_answers(logits_SBMV, batch)
        exact_S, token_S = right_SBM.all(-1).sum(-1), (right_SBM & keep_BM).sum((-2, -1))
        position_M, count_M = (right_SBM[-1] & keep_BM).sum(0), keep_BM.sum(0)
        nats_BM = F.cross_entropy(logits_SBMV[-1].mT, batch["y"], reduction="none")
        parts = [part.double().cpu() for part in (exact_S, token_S, position_M, count_M, (nats_BM * keep_BM).sum())]
        totals = [a + b for a, b in zip(totals, parts, strict=True)] if totals else parts
    exact_S, token_S, position_M, count_M, nats = totals
    count = count_M.sum().clamp_min(1)
    return Score(inference.steps, exact_S / num, token_S / count, position_M / count_M.clamp_min(1), float(nats / count), num)


def leak_check(system: ThinkerSystem, source: TaskSource, num: int) -> Leak:
    """Every sample gets the input of another one: what is right then cannot come from the input.

    An answer of the target stream may follow from the targets before it, so there only the first position is compared with
    chance; beyond it, no answer may change when targets from its own position on are exchanged.
    """
    inference = as_trained(system)
    batch = next(batches(system, source, inference, num))
    stream = system.config.model.target_stream
    wrong = {**batch, "x": batch["x"].roll(1, 0)}
    logits_BMV = predict(system, wrong, inference)[-1]
    keep_BM = batch["keep"]
    if stream == "only":
        keep_BM = batch["learn"] & (torch.arange(keep_BM.shape[-1], device=keep_BM.device) == 0)
    right_BM = (logits_BMV.argmax(-1) == batch["y"]) & keep_BM
    share_B = right_BM.sum(-1) / keep_BM.sum(-1).clamp_min(1)
    luck = trivial_baselines({**batch, "keep": keep_BM})["per_position_token"]
    error = float(share_B.double().std()) / math.sqrt(len(share_B))
    accuracy = float(right_BM.sum() / keep_BM.sum().clamp_min(1))
    return Leak(accuracy, luck + SIGMAS * error, _moved(system, batch, inference) if stream != "off" else 0.0)


def _moved(system: ThinkerSystem, batch: Batch, inference: Inference) -> float:
    """The change of answers when the targets from their own position on are those of another sample; 0 up to rounding."""
    place = batch["y"].shape[-1] // 2
    other = torch.cat((batch["y"][:, :place], batch["y"].roll(1, 0)[:, place:]), 1)
    streams, worst = [], 0.0
    for y_BM in (batch["y"], other):
        states = states_of(system, {**batch, "y": y_BM}, inference)
        assert states.stream_SBMD is not None
        streams.append((states.stream_SBMD[-1][:, : place + 1], states.state_SBKD[-1]))
    for one, two in zip(*streams, strict=True):
        scale = float(one.double().abs().mean()) + 1e-12
        worst = max(worst, float((one - two).double().abs().max()) / scale)
    return worst if worst > 1e-3 else 0.0


def quick_evaluation(system: ThinkerSystem, source: TaskSource) -> dict[str, float]:
    """The evaluation during training: samples of the full length, with the trained numbers of steps and latents.

    After a leak there is no other number.
    """
    device = next(system.parameters()).device
    num, full = NUM_QUICK[device.type], source.at(source.task.length)
    if leak_check(system, full, num).found:
        return {"error": 1.0, "leak": 1.0}
    found = score(system, full, as_trained(system), num)
    trivial = trivial_baselines(next(batches(system, full, as_trained(system), num)))
    best = max(value for name, value in trivial.items() if name.endswith("_token"))
    numbers = {"error": 1.0 - found.exact, "exact": found.exact, "token": found.token, "loss": found.nats}
    return {**numbers, "trivial_token": best, "leak": 0.0}


def onnx_network(system: ThinkerSystem) -> OnnxNetwork:
    """Logits after the last step, with as many latents and steps as in training. `sample_index` decides the noise, as it does
    in evaluation."""
    config, sizes = system.config.model, system.model.sizes

    def answer(x_BN: Tensor, index_B: Tensor, learn_BM: Tensor | None = None) -> Tensor:
        y_BM = x_BN.new_zeros(len(x_BN), sizes.num_out)  # only its shape is used
        batch = {"x": x_BN, "y": y_BM, "index": index_B}
        batch |= {} if learn_BM is None else {"learn": learn_BM}
        return predict(system, batch, as_trained(system))[-1]

    if config.target_stream == "only":
        raise UserError("model.target_stream=only: its answer depends on the targets, which an exported network does not get")
    inputs = {"tokens": torch.zeros(2, sizes.num_in, dtype=torch.long), "sample_index": torch.arange(2)}
    axes = {"tokens": ("batch", str(sizes.num_in)), "sample_index": ("batch",)}
    if config.positions.kind in BY_ENDS:
        inputs["used"], axes["used"] = torch.ones(2, sizes.num_out, dtype=torch.bool), ("batch", str(sizes.num_out))
    axes["logits"] = ("batch", str(sizes.num_out), str(sizes.vocab))
    facts = {
        "latents": system.latents.high,
        "steps": system.steps.high,
        "pad": sizes.pad,
        "sample_index": "any whole number per row: it decides the noise of the first state",
        "used": "which output positions the answer has",
        "cache": "none",
    }
    facts = {name: value for name, value in facts.items() if name != "used" or "used" in inputs}
    return OnnxNetwork(Function(system, answer), inputs, axes, "logits", facts)
