"""Generation: for each new token one or several predictions are optimised, and the one of lowest energy is sampled from.

Shape suffixes: B rows, N predictions of a row or rows that are filled, T time, L tokens of history, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from seedbed.errors import UserError
from seedbed.nn import decoding
from seedbed.nn.decoding import Decoder, Prefill, Sampling
from seedbed.recipes.ebt.model import Context
from seedbed.recipes.ebt.optimize import GENERATION, INITIAL, CounterNormal, initial_predictions, optimize_step

if TYPE_CHECKING:
    from seedbed.recipes.ebt.system import EnergySystem, PlainSystem


@dataclass(frozen=True)
class OptimizeOptions:
    """Inference-time optimisation: steps, samples of which the lowest energy is kept, and the energy decrease to stop at."""

    num_steps: int
    best_of: int = 1
    early_stop: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.early_stop < math.inf:
            raise UserError(f"early_stop={self.early_stop} is out of range: it is a decrease of energy, and 0 never stops early")


class Optimized(NamedTuple):
    """Optimised predictions: logits, energies, and the number of steps of each."""

    z_BNV: Tensor
    energy_BN: Tensor
    steps_BN: Tensor

    def best(self) -> Optimized:
        """The prediction of lowest energy in each row."""
        best_B1 = self.energy_BN.argmin(-1, keepdim=True)
        z_B1V = self.z_BNV.gather(1, best_B1[..., None].expand(-1, -1, self.z_BNV.shape[-1]))
        return Optimized(z_B1V, self.energy_BN.gather(1, best_B1), self.steps_BN.gather(1, best_B1))


def optimize_predictions(system: EnergySystem, contexts: list[Context], z_BNV: Tensor, options: OptimizeOptions) -> Optimized:
    """Predictions after `options.num_steps`; one whose energy decreases by less than `early_stop` stops there."""
    last = len(contexts) - 1
    energy_BN = torch.full_like(z_BNV[..., 0], math.inf)
    active_BN, steps_BN = torch.ones_like(energy_BN, dtype=torch.bool), torch.zeros_like(energy_BN)
    for number in range(options.num_steps):
        step = optimize_step(system.model, contexts, z_BNV, number, system.alpha(), system.mcmc.space)
        # Landscapes have scales of their own: energies are compared within the last one.
        if options.early_stop and number > last:
            active_BN = active_BN & (energy_BN - step.energy_BT >= options.early_stop)
            if not active_BN.any():
                break
        z_BNV = torch.where(active_BN[..., None], step.z_BTV, z_BNV)
        energy_BN, steps_BN = step.energy_BT, steps_BN + active_BN
    return Optimized(z_BNV, system.model.energy(z_BNV.softmax(-1), contexts[last], last), steps_BN)


class InitialPredictions:
    """Initial predictions by (seed, row, position, sample), and the energies and steps of the chosen ones."""

    def __init__(self, system: EnergySystem, decoder: Decoder, options: OptimizeOptions, seed: int) -> None:
        self.system, self.decoder, self.options = system, decoder, options
        self.noise = CounterNormal(seed, system.model.vocab)
        self.energy_BL = torch.zeros_like(decoder.history_BN, dtype=torch.float32)
        self.steps_BL = torch.zeros_like(self.energy_BL)

    def at(self, counter_BT: Tensor, number: int) -> Tensor:
        """Sample `number` at these positions of every row."""
        rows_B1 = torch.arange(len(counter_BT), device=counter_BT.device)[:, None]
        dtype, stream = self.system.model.embed.weight.dtype, GENERATION + number if number else INITIAL
        # The first row starts as the first sample of training does: with equal seeds the two can be compared.
        return initial_predictions(self.noise, self.system.mcmc, counter_BT - 1 + (rows_B1 << 32), stream, dtype)

    def record_best(self, optimized: Optimized) -> Tensor:
        """Record energy and steps of the next token; the logits to sample it from."""
        chosen, position_B1 = optimized.best(), self.decoder.count_B[:, None]
        self.energy_BL.scatter_(1, position_B1, chosen.energy_BN.float())
        self.steps_BL.scatter_(1, position_B1, chosen.steps_BN.float())
        return chosen.z_BNV[:, 0]


class CachedDecoder(decoding.CachedDecoder):
    """Caches the real stream's keys and values: a token costs one token of it, and the steps of its predictions."""

    def __init__(
        self,
        system: EnergySystem,
        options: OptimizeOptions,
        prompts: list[list[int]],
        num: int,
        sampling: Sampling,
        seed: int,
        *,
        capture: bool = False,
    ) -> None:
        self.system, self.options, self.seed = system, options, seed
        # An early stop is decided on the host.
        super().__init__(system.model, prompts, num, sampling, seed, capture=capture and not options.early_stop)

    def _open(self) -> None:
        self.initial = InitialPredictions(self.system, self, self.options, self.seed)
        self.caches = self.model.new_caches(len(self.lengths))
        self.counters = (*(cache.length_B for cache in self.caches), self.count_B)

    def _fill(self, rows: list[int]) -> None:
        tokens_NT, sizes = self._windows(rows, leave=1)
        rows_N = torch.tensor(rows, device=tokens_NT.device)
        for landscape, cache in enumerate(self.caches):
            self.model.prefill(cache, rows_N, tokens_NT, landscape)
            cache.length_B[rows_N] = torch.tensor(sizes, device=tokens_NT.device) + self.model.num_prefix

    def step(self, num_slots: int = 0) -> None:
        token_B1 = self.history_BN.gather(1, self.count_B[:, None] - 1)
        contexts = self.model.per_landscape([self.model.decode_token(cache, token_B1, num_slots) for cache in self.caches])
        z_BNV = torch.cat([self.initial.at(self.count_B[:, None], n) for n in range(self.options.best_of)], 1)
        self._append(self.initial.record_best(optimize_predictions(self.system, contexts, z_BNV, self.options)))


class PlainDecoder(decoding.CachedDecoder):
    def __init__(self, system: PlainSystem, *args, **kwargs) -> None:
        super().__init__(system.model, *args, **kwargs)

    def _prefill(self, tokens_NT: Tensor, layers: list[Prefill]) -> None:
        self.model(tokens_NT, self.model.rope(torch.arange(tokens_NT.shape[1], device=tokens_NT.device)), layers)

    def step(self, num_slots: int = 0) -> None:
        token_B1 = self.history_BN.gather(1, self.count_B[:, None] - 1)
        logits_B1V = self.model(token_B1, self.model.rope(self.cache.length_B[:, None]), self.cache.decode(num_slots))
        self.cache.length_B += 1
        self._append(logits_B1V[:, 0])
