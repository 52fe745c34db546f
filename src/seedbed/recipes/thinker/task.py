"""Tasks: samples of a length, drawn on the device as a pure function of their keys, and the right answer.

Shape suffixes: B samples, N input tokens, M output tokens. Token ids: symbols 0..V-1, PAD=V, BOS=V+1, operators from V+2 on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from seedbed.nn import rng

# (symbols [B, N], output positions [M], lengths [B, 1]) to the answer modulo V; values beyond the length are ignored.
Answer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Static sizes of the samples up to some length: tokens in and out, all token ids, and the symbols (answers use no other)."""

    num_in: int
    num_out: int
    vocab: int
    symbols: int


class Samples(NamedTuple):
    """Samples, PAD-filled. The answer counts where `keep` is set; a loss may cover all of `learn`, where `y` is not PAD."""

    x_BN: Tensor
    y_BM: Tensor
    keep_BM: Tensor
    learn_BM: Tensor


class Task:
    """Draws samples of a length, and knows the right answer."""

    name: str
    symbols: int
    length: int  # the longest sample that training shows
    operators: tuple[str, ...] = ()

    def __init__(self, length: int) -> None:
        self.length = length

    @property
    def pad(self) -> int:
        return self.symbols

    @property
    def bos(self) -> int:
        return self.symbols + 1

    def operator(self, name: str) -> int:
        return self.symbols + 2 + self.operators.index(name)

    def shape(self, length: int) -> Shape:
        return self._sizes(length, length)

    def make(self, key_B: Tensor, length_B: Tensor, shape: Shape) -> Samples:
        """One sample per key, of the given lengths."""
        raise NotImplementedError

    def target(self, x: list[int]) -> list[int]:
        """The answer to one input without its PAD, in plain Python: the reference for `make`."""
        raise NotImplementedError

    def to_text(self, tokens: list[int]) -> str:
        """Tokens as text, without PAD."""
        names = {self.bos: "BOS"} | {self.operator(name): name for name in self.operators}
        return " ".join(names.get(token, str(token)) for token in tokens if token != self.pad)

    def _sizes(self, num_in: int, num_out: int) -> Shape:
        return Shape(num_in, num_out, self.symbols + 2 + len(self.operators), self.symbols)


@dataclass(frozen=True)
class Rule:
    """The answer to a string: on the device, and in plain Python. The answer is `copies` times as long as the string.

    `symbols` is set where the task fixes the number of symbols.
    """

    answer: Answer
    target: Callable[[list[int]], list[int]]
    symbols: int | None = None
    copies: int = 1


def flip(x_BN: Tensor, position_M: Tensor, length_B1: Tensor) -> Tensor:
    """The answer that is the string backwards."""
    return x_BN.gather(-1, (length_B1 - 1 - position_M).clamp_min(0))


class StringTask(Task):
    """A string of random symbols and an answer by rule, both from the left."""

    def __init__(self, name: str, rule: Rule, symbols: int, length: int) -> None:
        self.name, self.rule, self.length = name, rule, length
        self.symbols = rule.symbols or symbols

    def shape(self, length: int) -> Shape:
        return self._sizes(length, self.rule.copies * length)

    def make(self, key_B: Tensor, length_B: Tensor, shape: Shape) -> Samples:
        x_BN, length_B1 = rng.integers(key_B, shape.num_in, self.symbols), length_B.unsqueeze(-1)
        position_N, position_M = (torch.arange(num, device=key_B.device) for num in (shape.num_in, shape.num_out))
        y_BM = self.rule.answer(x_BN, position_M, length_B1) % self.symbols
        keep_BM = position_M < self.rule.copies * length_B1
        x_BN = torch.where(position_N < length_B1, x_BN, self.pad)
        return Samples(x_BN, torch.where(keep_BM, y_BM, self.pad), keep_BM, keep_BM)

    def target(self, x: list[int]) -> list[int]:
        return [symbol % self.symbols for symbol in self.rule.target(x)]
