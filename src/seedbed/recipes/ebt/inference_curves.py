"""Inference curves: nats by number of steps and of samples, in and out of distribution, with baselines.

Shape suffixes: N samples of the initial prediction, K numbers of steps, P positions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seedbed.data.corpus import open_corpus
from seedbed.data.text import TextSource
from seedbed.errors import UserError
from seedbed.recipes.ebt.data import CountedText
from seedbed.recipes.ebt.evaluate import token_nats, windows_with_counters
from seedbed.recipes.ebt.optimize import EVALUATION, initial_predictions, optimize

if TYPE_CHECKING:
    from seedbed.recipes.ebt.system import EnergySystem

STEPS = (1, 2, 3, 4, 6, 8, 15, 30)
FACTORS = (0.25, 0.5, 2.0)


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
    """All the numbers of one text."""
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
        nats, energies = [], []
        for sample in range(num_samples):
            z_BTV = initial_predictions(system.noise, config, counter_BT, EVALUATION + sample, model.embed.weight.dtype)
            # One more step than needed: it measures the energy after the last one.
            for done, step in enumerate(optimize(model, contexts, z_BTV, max(steps) + 1, factor * system.alpha(), config.space)):
                if done in steps:
                    energies.append(step.energy_BT.flatten())
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


# ---- texts in and out of distribution --------------------------------------------------------------------------------


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
