"""What more thinking buys: nats against steps and against starts, in and out of distribution, with their controls.

Shape suffixes: N starts, K numbers of steps, P positions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seedbed.data.corpus import open_corpus
from seedbed.data.text import TextSource
from seedbed.errors import UserError
from seedbed.recipes.ebt.data import CountedText
from seedbed.recipes.ebt.evaluate import placed_windows, token_nats
from seedbed.recipes.ebt.walk import EVALUATION, first_candidates, walk

if TYPE_CHECKING:
    from seedbed.recipes.ebt.system import EnergySystem

STEPS = (1, 2, 3, 4, 6, 8, 15, 30)
FACTORS = (0.25, 0.5, 2.0)


def thinking_curves(system: EnergySystem, *, tokens: int, starts: int, texts: tuple[str, ...] = ()) -> dict[str, Any]:
    """The curves of the held-out part and of texts unlike it; each on the first `tokens` targets, over `starts` starts."""
    found: dict[str, Any] = {"trained_steps": system.walk.steps, "tokens": tokens, "starts": starts, "sets": {}, "skipped": {}}
    for name, make in _sets(system, tokens, texts).items():
        try:
            found["sets"][name] = curve(system, make(), starts)
        except UserError as error:
            found["skipped"][name] = str(error).partition("\n")[0]
    return found


def curve(system: EnergySystem, source: CountedText, starts: int) -> dict[str, Any]:
    """All the numbers of one text."""
    steps = sorted({*STEPS, system.walk.steps})
    nats_NKP, energy_NKP = measure(system, source, steps, starts)
    trained = steps.index(system.walk.steps)
    by_steps = nats_NKP.mean((0, 2)).tolist()
    ways = _ways(nats_NKP[:, trained], energy_NKP[:, trained])
    widths = [2**i for i in range(starts.bit_length()) if 2**i <= starts]
    return {
        "num_tokens": nats_NKP.shape[2],
        "steps": steps,
        "nats": by_steps,
        "perplexity": [math.exp(min(n, 700.0)) for n in by_steps],
        "gain": [1.0 - math.exp(min(n - by_steps[trained], 700.0)) for n in by_steps],
        "gap": first_energy(system, source) - energy_NKP[0, trained].mean().item(),
        "starts": widths,
        "by_starts": {name: [way(n) for n in widths] for name, way in ways.items()},
        "lowest_energy": [[_lowest(nats_NKP[:n, k], energy_NKP[:n, k]) for n in widths] for k in range(len(steps))],
        "rank_correlation": rank_correlation(energy_NKP[0, trained], nats_NKP[0, trained]),
        "alpha": {str(f): measure(system, source, [system.walk.steps], 1, f)[0].mean().item() for f in FACTORS},
    }


def measure(
    system: EnergySystem, source: CountedText, steps: list[int], starts: int, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Nats and energies of every target after these numbers of steps, from each of the starts."""
    model, config = system.model, system.walk
    parts: list[tuple[Tensor, Tensor]] = []
    for tokens_BT, place_BT in placed_windows(source, model.vocab, model.embed.weight.device):
        memories, targets_BT = model.read(tokens_BT[:, :-1]), tokens_BT[:, 1:]
        rows = []
        for start in range(starts):
            z_BTV = first_candidates(system.draw, config, place_BT, EVALUATION + start, model.embed.weight.dtype)
            nats, energies = [], []
            # One more step than asked for: it tells the energy of where the last one led.
            for done, step in enumerate(walk(model, memories, z_BTV, max(steps) + 1, factor * system.alpha(), config.space)):
                if done in steps:
                    energies.append(step.energy_BT.flatten())
                if done + 1 in steps:
                    nats.append(token_nats(step.z_BTV, targets_BT).flatten())
            rows.append((torch.stack(nats), torch.stack(energies)))
        parts.append((torch.stack([n for n, _ in rows]).cpu(), torch.stack([e for _, e in rows]).cpu()))
    return torch.cat([n for n, _ in parts], -1).double(), torch.cat([e for _, e in parts], -1).double()


def first_energy(system: EnergySystem, source: CountedText) -> float:
    """The mean energy of the first start, in the landscape in which walks end."""
    model, config, parts = system.model, system.walk, []
    for tokens_BT, place_BT in placed_windows(source, model.vocab, model.embed.weight.device):
        z_BTV = first_candidates(system.draw, config, place_BT, EVALUATION, model.embed.weight.dtype)
        memory = model.read(tokens_BT[:, :-1])[-1]
        parts.append(model.energy(z_BTV.softmax(-1), memory, config.landscapes - 1).flatten())
    return torch.cat(parts).double().mean().item()


def _ways(nats_NP: Tensor, energy_NP: Tensor) -> dict[str, Callable[[int], float]]:
    """Ways to make one answer of several: by energy, by chance, by averaging distributions, and by knowing the answer."""
    return {
        "lowest energy": lambda n: _lowest(nats_NP[:n], energy_NP[:n]),
        "at random": lambda n: nats_NP[:n].mean().item(),
        "average of all": lambda n: -(torch.logsumexp(-nats_NP[:n], 0) - math.log(n)).mean().item(),
        "oracle": lambda n: nats_NP[:n].amin(0).mean().item(),
    }


def _lowest(nats_NP: Tensor, energy_NP: Tensor) -> float:
    return nats_NP.gather(0, energy_NP.argmin(0, keepdim=True)).mean().item()


def rank_correlation(x_P: Tensor, y_P: Tensor) -> float:
    """Spearman's: whether low energy goes with low loss, whatever the scale of either."""
    ranks = [v.argsort().argsort().double() for v in (x_P, y_P)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


# ---- texts in and out of distribution --------------------------------------------------------------------------------


def _sets(system: EnergySystem, tokens: int, texts: tuple[str, ...]) -> dict[str, Callable[[], CountedText]]:
    """By name, each made when its turn comes: its characters may be unknown to the run's tokenizer."""
    own = system.config.data.text
    sets = {"held-out": lambda: held_out_part(system.data.valid, tokens)}
    if system.tokenizer is None:
        return sets
    others = [name for name in ("reference", "stdlib") if name != own]
    for name in (*others, *texts):
        sets[name] = lambda name=name: _encoded(system, _head(open_corpus(name).pieces(), 8 * tokens), tokens)
    sets["dyck"] = lambda: _encoded(system, dyck(4 * tokens), tokens)
    sets["sums"] = lambda: _encoded(system, sums(4 * tokens), tokens)
    return sets


def _encoded(system: EnergySystem, text: str, tokens: int) -> CountedText:
    assert system.tokenizer is not None
    ids, like = system.tokenizer.encode(text)[: tokens + 1], system.data.valid
    return CountedText(ids, min(like.block, len(ids) - 1), "blocks", like.seed, like.token_bytes)


def held_out_part(held_out: TextSource, tokens: int) -> CountedText:
    """The first targets of the held-out part."""
    part = held_out.tokens[: tokens + 1]
    return CountedText(part, min(held_out.block, len(part) - 1), "blocks", held_out.seed, held_out.token_bytes)


def _head(pieces: Iterator[Any], num: int) -> str:
    text = ""
    for piece in pieces:
        text += piece.text
        if len(text) >= num:
            break
    return text[:num]


def dyck(num: int) -> str:
    """Lines of well-nested brackets of three kinds."""
    dice, text = random.Random(1), ""
    while len(text) < num:
        line, stack = "", []
        for _ in range(dice.randrange(8, 40)):
            if stack and dice.random() < 0.5:
                line += stack.pop()
            else:
                opening, closing = dice.choice(("()", "[]", "{}"))
                line, stack = line + opening, [*stack, closing]
        text += line + "".join(reversed(stack)) + "\n"
    return text[:num]


def sums(num: int) -> str:
    """Lines such as 17+204=221."""
    dice, text = random.Random(1), ""
    while len(text) < num:
        a, b = dice.randrange(1000), dice.randrange(1000)
        text += f"{a}+{b}={a + b}\n"
    return text[:num]
