"""Evaluation on held-out text: every target of a split once, without noise, the mean over several initial predictions.

And inference curves: nats by number of steps and of samples, in and out of distribution, as table, picture and JSON.
Shape suffixes: B batch, T time, V vocabulary, K numbers of steps, N samples of the initial prediction, P positions.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.config import Config
from seedbed.data.corpus import open_corpus
from seedbed.data.text import TextData, TextSource, text_metrics, windows
from seedbed.errors import UserError
from seedbed.nn.cuda_graph import GraphedCalls
from seedbed.recipes.ebt.data import CountedText
from seedbed.recipes.ebt.optimize import EVALUATION, graphed_step, initial_predictions, optimize, optimize_step
from seedbed.train.engine import Engine, EvalEngine, fork_rng
from seedbed.train.stepper import Stepper
from seedbed.train.system import System

PICTURE, NUMBERS = "thinking.png", "thinking.json"


if TYPE_CHECKING:
    from seedbed.recipes.ebt.system import EnergySystem

NUM_SAMPLES = 3
# Logits, and tokens, that one batch of evaluation may hold: a step keeps the attention of every layer for its gradient.
EVAL_LOGITS = {"cuda": 1 << 28, "mps": 1 << 25, "cpu": 1 << 21}
EVAL_TOKENS = 1 << 14
# Steps on one context from which recording a CUDA graph of them, which takes as long as two, pays.
MANY_STEPS = 8

STEPS = (1, 2, 3, 4, 6, 8, 15, 30)
FACTORS = (0.25, 0.5, 2.0)


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
    for tokens_BT, counter_BT in engine.ranks.shard_of(found):
        contexts, targets_BT = model.encode_context(tokens_BT[:, :-1]), tokens_BT[:, 1:]
        for sample in range(num_samples):
            z_BTV = initial_predictions(system.noise, config, counter_BT, EVALUATION + sample, model.embed.weight.dtype)
            for number, step in enumerate(optimize(model, contexts, z_BTV, max(steps), system.alpha(), config.space), 1):
                if number in steps:
                    total_K[list(steps).index(number)] += token_nats(step.z_BTV, targets_BT).sum(-1).cpu().double().sum()
    total_K = engine.all_reduce_sum(total_K)
    return (total_K / (num_samples * source.num_targets)).tolist()


def token_nats(z_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(z_BTV.float().flatten(0, -2), targets_BT.flatten(), reduction="none").view(targets_BT.shape)


def report(per_token: float, source: TextSource) -> dict[str, float]:
    return text_metrics("nats", per_token * source.num_targets, source)


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


def inference_curves(system: EnergySystem, *, tokens: int, num_samples: int, texts: Sequence[str] = ()) -> dict[str, Any]:
    """Curves of the held-out part and of other texts; each on the first `tokens` targets, over `num_samples` samples."""
    sizes = {"trained_steps": system.mcmc.num_steps, "tokens": tokens, "starts": num_samples}
    found: dict[str, Any] = {**sizes, "sets": {}, "skipped": {}}
    for name, make in _texts(system, tokens, texts).items():
        try:
            found["sets"][name] = curve(system, make(), num_samples)
        except UserError as error:
            found["skipped"][name] = str(error).partition("\n")[0]
    return found


def curve(system: EnergySystem, source: CountedText, num_samples: int) -> dict[str, Any]:
    steps = sorted({*STEPS, system.mcmc.num_steps})
    nats_NKP, energy_NKP = measure(system, source, steps, num_samples)
    trained = steps.index(system.mcmc.num_steps)
    by_steps = nats_NKP.mean((0, 2)).tolist()
    selections = _selections(nats_NKP[:, trained], energy_NKP[:, trained])
    widths = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]
    return {
        "num_tokens": nats_NKP.shape[2],
        "steps": steps,
        "nats": by_steps,
        "perplexity": [math.exp(min(n, 700.0)) for n in by_steps],
        "gain": [1.0 - math.exp(min(n - by_steps[trained], 700.0)) for n in by_steps],
        "gap": first_energy(system, source) - energy_NKP[0, trained].mean().item(),
        "starts": widths,
        "by_starts": {name: [select(n) for n in widths] for name, select in selections.items()},
        "lowest_energy": [[_lowest(nats_NKP[:n, k], energy_NKP[:n, k]) for n in widths] for k in range(len(steps))],
        "rank_correlation": rank_correlation(energy_NKP[0, trained], nats_NKP[0, trained]),
        "alpha": {str(f): measure(system, source, [system.mcmc.num_steps], 1, f)[0].mean().item() for f in FACTORS},
    }


def measure(
    system: EnergySystem, source: CountedText, steps: list[int], num_samples: int, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Nats and energies of every target after these numbers of steps, for each sample of the initial prediction."""
    model, config = system.model, system.mcmc
    parts = []
    for tokens_BT, counter_BT in windows_with_counters(source, model.vocab, model.embed.weight.device):
        contexts, targets_BT = model.encode_context(tokens_BT[:, :-1]), tokens_BT[:, 1:]
        nats, energies, take = [], [], partial(graphed_step, GraphedCalls()) if max(steps) > MANY_STEPS else optimize_step
        given = {"alpha": factor * system.alpha(), "space": config.space, "take": take}
        for sample in range(num_samples):
            z_BTV = initial_predictions(system.noise, config, counter_BT, EVALUATION + sample, model.embed.weight.dtype)
            # One more step than needed: it measures the energy after the last one.
            for done, step in enumerate(optimize(model, contexts, z_BTV, max(steps) + 1, **given)):
                if done in steps:
                    energies.append(step.energy_BT.flatten().clone())
                if done + 1 in steps:
                    nats.append(token_nats(step.z_BTV, targets_BT).flatten())
        parts.append([torch.stack(rows).unflatten(0, (num_samples, -1)).cpu() for rows in (nats, energies)])
    nats_NKP, energy_NKP = (torch.cat(found, -1).double() for found in zip(*parts, strict=True))
    return nats_NKP, energy_NKP


def first_energy(system: EnergySystem, source: CountedText) -> float:
    """The mean energy of the first initial predictions, in the last landscape."""
    model, config, parts = system.model, system.mcmc, []
    for tokens_BT, counter_BT in windows_with_counters(source, model.vocab, model.embed.weight.device):
        z_BTV = initial_predictions(system.noise, config, counter_BT, EVALUATION, model.embed.weight.dtype)
        context = model.encode_context(tokens_BT[:, :-1])[-1]
        parts.append(model.energy(z_BTV.softmax(-1), context, config.num_landscapes - 1).flatten())
    return torch.cat(parts).double().mean().item()


def _selections(nats_NP: Tensor, energy_NP: Tensor) -> dict[str, Callable[[int], float]]:
    """Ways to make one prediction of several: lowest energy, at random, average of the distributions, and oracle."""
    return {
        "lowest energy": lambda n: _lowest(nats_NP[:n], energy_NP[:n]),
        "at random": lambda n: nats_NP[:n].mean().item(),
        "average of all": lambda n: -(torch.logsumexp(-nats_NP[:n], 0) - math.log(n)).mean().item(),
        "oracle": lambda n: nats_NP[:n].amin(0).mean().item(),
    }


def _lowest(nats_NP: Tensor, energy_NP: Tensor) -> float:
    return nats_NP.gather(0, energy_NP.argmin(0, keepdim=True)).mean().item()


def rank_correlation(x_P: Tensor, y_P: Tensor) -> float:
    """Spearman's rank correlation."""
    ranks = [v.argsort().argsort().double() for v in (x_P, y_P)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def _texts(system: EnergySystem, tokens: int, texts: Sequence[str]) -> dict[str, Callable[[], CountedText]]:
    """Makers by name: a text may have characters that the run's tokenizer does not know."""
    own = system.config.data.text
    sets = {"held-out": lambda: held_out_part(system.data.valid, tokens)}
    if system.tokenizer is None:
        return sets
    others = [name for name in ("reference", "stdlib") if name != own]
    for name in (*others, *texts):
        sets[name] = lambda name=name: _encoded(system, _first_characters(name, 8 * tokens), tokens)
    sets["dyck"] = lambda: _encoded(system, dyck(4 * tokens), tokens)
    sets["sums"] = lambda: _encoded(system, sums(4 * tokens), tokens)
    return sets


def _encoded(system: EnergySystem, text: str, tokens: int) -> CountedText:
    assert system.tokenizer is not None
    return held_out_part(system.data.valid, tokens, system.tokenizer.encode(text))


def held_out_part(held_out: TextSource, tokens: int, ids: np.ndarray | None = None) -> CountedText:
    """The first targets of the held-out part, or of other tokens in its place."""
    part = (held_out.tokens if ids is None else ids)[: tokens + 1]
    return CountedText(part, min(held_out.block, len(part) - 1), "blocks", held_out.seed, held_out.token_bytes)


def _first_characters(name: str, num: int) -> str:
    text = ""
    for chunk in open_corpus(name).chunks():
        text += chunk.text
        if len(text) >= num:
            break
    return text[:num]


def dyck(num: int) -> str:
    """Lines of well-nested brackets of three kinds."""
    rng, text = random.Random(1), ""
    while len(text) < num:
        line, stack = "", []
        for _ in range(rng.randrange(8, 40)):
            if stack and rng.random() < 0.5:
                line += stack.pop()
            else:
                opening, closing = rng.choice(("()", "[]", "{}"))
                line, stack = line + opening, [*stack, closing]
        text += line + "".join(reversed(stack)) + "\n"
    return text[:num]


def sums(num: int) -> str:
    """Lines such as 17+204=221."""
    rng, text = random.Random(1), ""
    while len(text) < num:
        a, b = rng.randrange(1000), rng.randrange(1000)
        text += f"{a}+{b}={a + b}\n"
    return text[:num]


def table(found: dict[str, Any]) -> str:
    """Nats per token after 1, 2, 3... steps, a line per text; then those of several samples at the trained number of steps."""
    sets = found["sets"]
    longest = max((len(name) for name in [*sets, "nats per token, steps:"]), default=0)
    steps = next(iter(sets.values()))["steps"]
    head = "".join(f"{str(k) + '*' * (k == found['trained_steps']):>8}" for k in steps)
    lines = [f"{'nats per token, steps:':<{longest}}{head}   energy gap   best of"]
    for name, curve in sets.items():
        numbers = "".join(f"{n:8.3f}" for n in curve["nats"])
        wide = curve["by_starts"]["lowest energy"]
        lines.append(f"{name:<{longest}}{numbers}{curve['gap']:13.3f}   {curve['starts'][-1]}: {wide[0]:.3f} -> {wide[-1]:.3f}")
    if "plain" in found:
        lines.append(f"{'plain transformer':<{longest}}{found['plain']['nats']:8.3f}   the same size, data and number of updates")
    lines += [f"{name}: not measured: {why}" for name, why in found["skipped"].items()]
    return "\n".join([*lines, "* as trained; only what falls beyond the trained number of steps is a gain by more steps"])


def write(found: dict[str, Any], folder: Path) -> tuple[Path, ...]:
    """The numbers and the picture; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NUMBERS).write_text(json.dumps(found, indent=1) + "\n")
    _draw(found, folder / PICTURE)
    return folder / PICTURE, folder / NUMBERS


def _draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    longer, wider = figure.subplots(1, 2)
    for number, (name, curve) in enumerate(found["sets"].items()):
        colour = f"C{number}"
        longer.plot(curve["steps"], curve["perplexity"], marker="o", markersize=3, color=colour, label=name)
        for name, style in (("lowest energy", "-"), ("at random", ":"), ("average of all", "--")):
            label = name if not number else None
            wider.plot(curve["starts"], curve["by_starts"][name], linestyle=style, color=colour, label=label)
    longer.axvline(found["trained_steps"], color="tab:red", alpha=0.4, label="as trained")
    if "plain" in found:
        longer.axhline(found["plain"]["perplexity"], color="tab:gray", linestyle=":", label="plain transformer, held-out")
    longer.set(title="more optimisation steps", xlabel="steps", ylabel="perplexity", yscale="log")
    wider.set(title="best of several samples", xlabel="samples", ylabel="nats per token")
    for axis in (longer, wider):
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
