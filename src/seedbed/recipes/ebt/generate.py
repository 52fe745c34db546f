"""Generation by walking: each new token is a candidate, or several, that go downhill before one is drawn.

Shape suffixes: B rows, N candidates of a row or rows that are filled, T time, L tokens of history, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from seedbed.data.tokenizers import TextStream, Tokenizer, encode_prompt
from seedbed.errors import UserError
from seedbed.nn import decoding
from seedbed.nn.decoding import READ_EVERY, Decoder
from seedbed.nn.sampling import Sampling, window_start
from seedbed.recipes.ebt.model import Memory
from seedbed.recipes.ebt.walk import GENERATION, STARTS, Draw, first_candidates, take_step

if TYPE_CHECKING:
    from seedbed.recipes.ebt.system import EnergySystem, PlainSystem


@dataclass(frozen=True)
class Thinking:
    """How long and how wide to think: steps, starts of which the lowest energy wins, and the fall that is too small."""

    steps: int
    best_of: int = 1
    early_stop: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"think={self.steps} is out of range: a prediction takes at least 1 step")
        if self.best_of < 1:
            raise UserError(f"best_of={self.best_of} is out of range: ask for at least 1 start")
        if not 0.0 <= self.early_stop < math.inf:
            raise UserError(f"early_stop={self.early_stop} is out of range: it is a fall of energy, and 0 never stops early")


class Thought(NamedTuple):
    """Where candidates have arrived: logits, energies, and how many steps each took."""

    z_BNV: Tensor
    energy_BN: Tensor
    steps_BN: Tensor

    def best(self) -> Thought:
        """The candidate of lowest energy in each row."""
        best_B1 = self.energy_BN.argmin(-1, keepdim=True)
        z_B1V = self.z_BNV.gather(1, best_B1[..., None].expand(-1, -1, self.z_BNV.shape[-1]))
        return Thought(z_B1V, self.energy_BN.gather(1, best_B1), self.steps_BN.gather(1, best_B1))


def think(system: EnergySystem, memories: list[Memory], z_BNV: Tensor, thinking: Thinking) -> Thought:
    """Walk; a candidate whose energy falls by less than `early_stop` stays where it is."""
    last = len(memories) - 1
    energy_BN = torch.full_like(z_BNV[..., 0], math.inf)
    awake_BN, steps_BN = torch.ones_like(energy_BN, dtype=torch.bool), torch.zeros_like(energy_BN)
    for number in range(thinking.steps):
        step = take_step(system.model, memories, z_BNV, number, system.alpha(), system.walk.space)
        # Landscapes have scales of their own: energies are compared within the last one.
        if thinking.early_stop and number > last:
            awake_BN = awake_BN & (energy_BN - step.energy_BT >= thinking.early_stop)
            if not awake_BN.any():
                break
        z_BNV = torch.where(awake_BN[..., None], step.z_BTV, z_BNV)
        energy_BN, steps_BN = step.energy_BT, steps_BN + awake_BN
    return Thought(z_BNV, system.model.energy(z_BNV.softmax(-1), memories[last], last), steps_BN)


class Starts:
    """First candidates by (seed, row, position, start), and what became of the chosen ones."""

    def __init__(self, system: EnergySystem, decoder: Decoder, thinking: Thinking, seed: int) -> None:
        self.system, self.decoder, self.thinking = system, decoder, thinking
        self.draw = Draw(seed, system.model.vocab)
        self.energy_BL = torch.zeros_like(decoder.history_BN, dtype=torch.float32)
        self.steps_BL = torch.zeros_like(self.energy_BL)

    def at(self, place_BT: Tensor, number: int) -> Tensor:
        """Start `number` at these positions of every row."""
        rows_B1 = torch.arange(len(place_BT), device=place_BT.device)[:, None]
        dtype, stream = self.system.model.embed.weight.dtype, GENERATION + number if number else STARTS
        # The first row starts as the first sample of training did: with equal seeds the two can be compared.
        return first_candidates(self.draw, self.system.walk, place_BT - 1 + (rows_B1 << 32), stream, dtype)

    def settle(self, thought: Thought) -> Tensor:
        """Note what the token about to be appended cost; the logits to draw it from."""
        chosen, place_B1 = thought.best(), self.decoder.count_B[:, None]
        self.energy_BL.scatter_(1, place_B1, chosen.energy_BN.float())
        self.steps_BL.scatter_(1, place_B1, chosen.steps_BN.float())
        return chosen.z_BNV[:, 0]


class UncachedDecoder(Decoder):
    """Reads the whole window again for every token, and walks at all of its places: the slow way, kept as the yardstick."""

    def __init__(
        self, system: EnergySystem, thinking: Thinking, prompts: list[list[int]], num: int, sampling: Sampling, seed: int
    ) -> None:
        super().__init__(system.model, prompts, num, sampling, seed)
        self.system, self.begin = system, Starts(system, self, thinking, seed)

    def advance(self) -> None:
        rows = list(range(len(self.lengths)))
        self.starts = [window_start(s, n, self.model.block) for s, n in zip(self.starts, self.lengths, strict=True)]
        tokens_BT, sizes = self._windows(rows, leave=0)
        first_B1 = torch.tensor(self.starts, device=tokens_BT.device)[:, None]
        place_BT = first_B1 + torch.arange(1, tokens_BT.shape[1] + 1, device=tokens_BT.device)
        memories, last_B = self.model.read(tokens_BT), torch.tensor(sizes, device=tokens_BT.device) - 1
        ends = []
        for number in range(self.begin.thinking.best_of):
            thought = think(self.system, memories, self.begin.at(place_BT, number), self.begin.thinking)
            ends.append([whole[torch.arange(len(rows), device=last_B.device), last_B] for whole in thought])
        self._append(self.begin.settle(Thought(*(torch.stack(parts, 1) for parts in zip(*ends, strict=True)))))
        self.lengths = [n + 1 for n in self.lengths]


class CachedDecoder(decoding.CachedDecoder):
    """Keeps the real stream's keys and values; a token costs one token of it, and the steps of its candidates."""

    def __init__(
        self,
        system: EnergySystem,
        thinking: Thinking,
        prompts: list[list[int]],
        num: int,
        sampling: Sampling,
        seed: int,
        *,
        capture: bool = False,
    ) -> None:
        self.system, self.thinking, self.seed = system, thinking, seed
        # To stop early the host must look.
        super().__init__(system.model, prompts, num, sampling, seed, capture=capture and not thinking.early_stop)

    def _open(self) -> None:
        self.begin = Starts(self.system, self, self.thinking, self.seed)
        self.caches = self.model.new_caches(len(self.lengths))
        self.counters = (*(cache.length_B for cache in self.caches), self.count_B)

    def _fill(self, rows: list[int]) -> None:
        tokens_NT, sizes = self._windows(rows, leave=1)
        rows_N = torch.tensor(rows, device=tokens_NT.device)
        for landscape, cache in enumerate(self.caches):
            self.model.fill(cache, rows_N, tokens_NT, landscape)
            cache.length_B[rows_N] = torch.tensor(sizes, device=tokens_NT.device) + self.model.num_prefix

    def _step(self, num_slots: int = 0) -> None:
        token_B1 = self.history_BN.gather(1, self.count_B[:, None] - 1)
        memories = self.model.for_landscapes([self.model.remember(cache, token_B1, num_slots) for cache in self.caches])
        z_BNV = torch.cat([self.begin.at(self.count_B[:, None], n) for n in range(self.thinking.best_of)], 1)
        self._append(self.begin.settle(think(self.system, memories, z_BNV, self.thinking)))


class PlainDecoder(decoding.CachedDecoder):
    """The plain transformer's tokens."""

    def __init__(self, system: PlainSystem, *args, **kwargs) -> None:
        super().__init__(system.model, *args, **kwargs)

    def _open(self) -> None:
        self.cache = self.model.new_cache(len(self.lengths))
        self.counters = (self.cache.length_B, self.count_B)

    def _fill(self, rows: list[int]) -> None:
        tokens_NT, sizes = self._windows(rows, leave=1)
        rows_N = torch.tensor(rows, device=tokens_NT.device)
        if tokens_NT.shape[1]:
            rope = self.model.rope(torch.arange(tokens_NT.shape[1], device=tokens_NT.device))
            self.model(tokens_NT, rope, self.cache.prefill(rows_N))
        self.cache.length_B[rows_N] = torch.tensor(sizes, device=tokens_NT.device)

    def _step(self, num_slots: int = 0) -> None:
        token_B1 = self.history_BN.gather(1, self.count_B[:, None] - 1)
        logits_B1V = self.model(token_B1, self.model.rope(self.cache.length_B[:, None]), self.cache.decode(num_slots))
        self.cache.length_B += 1
        self._append(logits_B1V[:, 0])


class Written(NamedTuple):
    """Text after a prompt, token by token, with the energy and the steps of each where the model has energies."""

    text: str
    tokens: list[int]
    energies: list[float]
    steps: list[float]


@torch.no_grad()
def write(decoder: Decoder, tokenizer: Tokenizer, num: int, on_piece: Callable[[int, str], None] | None = None) -> list[Written]:
    """Let a decoder write `num` tokens in every row; `on_piece(row, text)` hears each piece as soon as it is whole."""
    streams, ids = [TextStream(tokenizer) for _ in decoder.lengths], [[] for _ in decoder.lengths]
    done = 0
    # Compiled modules would be compiled again for every length met here.
    with torch.compiler.set_stance("force_eager"):
        for portion in decoder.run(num, READ_EVERY if decoder.history_BN.is_cuda else 1):
            done += len(portion[0])
            for row, some in enumerate(portion):
                ids[row] += some
                piece = streams[row].push(some, last=done == num)
                if on_piece and piece:
                    on_piece(row, piece)
    return [Written(stream.text, ids[row], *_costs(decoder, row, num)) for row, stream in enumerate(streams)]


def _costs(decoder: Decoder, row: int, num: int) -> tuple[list[float], list[float]]:
    begin = getattr(decoder, "begin", None)
    if begin is None:
        return [], []
    end = decoder.lengths[row]
    return begin.energy_BL[row, end - num : end].tolist(), begin.steps_BL[row, end - num : end].tolist()


def prompt_rows(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    """The ids of each prompt."""
    return [encode_prompt(tokenizer, prompt) for prompt in prompts]
