"""Evaluation on held-out text: every target of a split once, without noise, the mean over several initial predictions.

Shape suffixes: B batch, T time, V vocabulary, K numbers of steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource, windows
from seedbed.recipes.ebt.optimize import EVALUATION, initial_predictions, optimize
from seedbed.train.engine import Engine, fork_rng
from seedbed.train.stepper import Stepper
from seedbed.train.system import System, own_share

if TYPE_CHECKING:
    from seedbed.recipes.ebt.system import EnergySystem
    from seedbed.train.engine import EvalEngine

NUM_SAMPLES = 3
# Logits, and tokens, that one batch of evaluation may hold: a step keeps the attention of every layer for its gradient.
EVAL_LOGITS = {"cuda": 1 << 28, "mps": 1 << 25, "cpu": 1 << 21}
EVAL_TOKENS = 1 << 14


def windows_with_counters(source: TextSource, vocab: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of a split, and the counters of their initial predictions: positions in the window, the same in each.

    So a part of a split scores the same alone as within the whole.
    """
    batch = max(1, min(EVAL_LOGITS[device.type] // vocab, EVAL_TOKENS) // source.block)
    for tokens_BT in windows(source, batch, device):
        size = tokens_BT.shape[1] - 1
        yield tokens_BT, torch.arange(size, device=device).expand(len(tokens_BT), size)


def nats_by_steps(
    system: EnergySystem, source: TextSource, steps: Sequence[int], engine: EvalEngine, samples: int = NUM_SAMPLES
) -> list[float]:
    """Nats per token after each of these numbers of steps, over every target of the split and `samples` samples."""
    model, config = system.model, system.config.model.mcmc
    num_samples = samples if config.initial_condition == "normal" else 1
    total_K = torch.zeros(len(steps), dtype=torch.float64)
    found = windows_with_counters(source, model.vocab, model.embed.weight.device)
    for tokens_BT, counter_BT in own_share(found, engine):
        contexts, targets_BT = model.encode_context(tokens_BT[:, :-1]), tokens_BT[:, 1:]
        for sample in range(num_samples):
            z_BTV = initial_predictions(system.noise, config, counter_BT, EVALUATION + sample, model.embed.weight.dtype)
            for number, step in enumerate(optimize(model, contexts, z_BTV, max(steps), system.alpha(), config.space), 1):
                if number in steps:
                    total_K[list(steps).index(number)] += token_nats(step.z_BTV, targets_BT).sum(-1).cpu().double().sum()
    total_K = engine.all_reduce_sum(total_K)
    return (total_K / (num_samples * source.num_targets)).tolist()


def token_nats(z_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Nats of each target under logits."""
    return F.cross_entropy(z_BTV.float().flatten(0, -2), targets_BT.flatten(), reduction="none").view(targets_BT.shape)


def report(per_token: float, source: TextSource) -> dict[str, float]:
    """Nats per token first: it decides which checkpoint is best. Bits per byte compare across tokenizers."""
    numbers = {"nats": per_token, "perplexity": math.exp(min(per_token, 700.0))}
    if source.num_target_bytes:
        numbers["bits_per_byte"] = per_token * source.num_targets / (math.log(2) * source.num_target_bytes)
    return numbers


def train_control(system: System, config: Config, data: TextData, judged: TextSource, device: torch.device) -> dict[str, float]:
    """Train a freshly built plain system to the end of the run's schedule; its numbers on `judged`, and the seconds it took."""
    config = replace(config, compile="off", ema=0.0, ema2=0.0)
    with fork_rng(device), torch.enable_grad():
        engine = Engine(system.to(device), config, device)
        with closing(Stepper(engine, data.train)) as stepper:
            start = time.perf_counter()
            for step in range(config.steps):
                stepper.step(step, step * config.batch, (step + 1) / config.steps, config.steps)
                stepper.pop_result()
            seconds = time.perf_counter() - start
    with engine.evaluating():
        return {**system.evaluate(judged, engine), "seconds": seconds}
