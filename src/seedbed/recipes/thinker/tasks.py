"""The tasks: samples drawn on the device as a pure function of their keys, with exact answers and no host in the way.

Shape suffixes: B samples, N input tokens, M output tokens. Token ids: symbols 0..V-1, PAD=V, BOS=V+1, operators from V+2 on.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from seedbed.errors import UserError
from seedbed.nn import dice


@dataclass(frozen=True)
class Shape:
    """Static sizes of the samples up to some length: tokens in and out, all token ids, and the symbols (answers use no other)."""

    num_in: int
    num_out: int
    vocab: int
    symbols: int


class Made(NamedTuple):
    """Samples, PAD-filled. The answer counts where `keep` is set; a loss may cover the rest of `learn`, which holds no PAD."""

    x_BN: Tensor
    y_BM: Tensor
    keep_BM: Tensor
    learn_BM: Tensor


class Task:
    """How samples of a length are drawn, and what the right answer is."""

    name: str = ""
    symbols: int
    length: int  # the longest sample that training shows
    operators: tuple[str, ...] = ()

    @property
    def pad(self) -> int:
        return self.symbols

    @property
    def bos(self) -> int:
        return self.symbols + 1

    def shape(self, length: int) -> Shape:
        """Static sizes for samples up to `length`."""
        return self._sizes(length, length)

    def make(self, key_B: Tensor, length_B: Tensor, shape: Shape) -> Made:
        """One sample per key, of the length asked for."""
        raise NotImplementedError

    def target(self, x: list[int]) -> list[int]:
        """The answer to one input without its PAD, in plain Python: the reference for `make`."""
        raise NotImplementedError

    def words(self, tokens: list[int]) -> str:
        """Tokens as a person reads them, without PAD."""
        names = {self.bos: "BOS"} | {self.symbols + 2 + i: name for i, name in enumerate(self.operators)}
        return " ".join(names.get(token, str(token)) for token in tokens if token != self.pad)

    def _sizes(self, num_in: int, num_out: int) -> Shape:
        return Shape(num_in, num_out, self.symbols + 2 + len(self.operators), self.symbols)


class StringTask(Task):
    """A random string of symbols and an answer of the same length, both from the left."""

    def __init__(self, name: str, symbols: int, length: int, answer: "Answer", target: Callable[[list[int]], list[int]]) -> None:
        self.name, self.symbols, self.length = name, symbols, length
        self._answer, self._target = answer, target

    def make(self, key_B: Tensor, length_B: Tensor, shape: Shape) -> Made:
        x_BN = dice.integers(key_B, shape.num_in, self.symbols)
        place_N = torch.arange(shape.num_in, device=key_B.device)
        y_BN = self._answer(x_BN, place_N, length_B.unsqueeze(-1)) % self.symbols
        inside_BN = place_N < length_B.unsqueeze(-1)
        return Made(torch.where(inside_BN, x_BN, self.pad), torch.where(inside_BN, y_BN, self.pad), inside_BN, inside_BN)

    def target(self, x: list[int]) -> list[int]:
        return [symbol % self.symbols for symbol in self._target(x)]


# (symbols [B, N], places [N], lengths [B, 1]) to the answer before it is taken modulo V; what lies beyond the length is ignored.
Answer = Callable[[Tensor, Tensor, Tensor], Tensor]


def _flip(x_BN: Tensor, place_N: Tensor, length_B1: Tensor) -> Tensor:
    return x_BN.gather(-1, (length_B1 - 1 - place_N).clamp_min(0))


def _roll(x_BN: Tensor, place_N: Tensor, length_B1: Tensor) -> Tensor:
    return x_BN.gather(-1, (place_N - x_BN[..., :1]) % length_B1)


def _sums(x: list[int]) -> list[int]:
    return [sum(x[: i + 1]) for i in range(len(x))]


_STRINGS: dict[str, tuple[Answer, Callable[[list[int]], list[int]]]] = {
    "copy": (lambda x_BN, place_N, length_B1: x_BN, lambda x: x),
    "flip": (_flip, lambda x: x[::-1]),
    "roll": (_roll, lambda x: [x[(i - x[0]) % len(x)] for i in range(len(x))]),
    "roll_num": (lambda x_BN, place_N, length_B1: x_BN + x_BN[..., :1], lambda x: [symbol + x[0] for symbol in x]),
    "cumsum": (lambda x_BN, place_N, length_B1: x_BN.cumsum(-1), _sums),
    "prefix": (lambda x_BN, place_N, length_B1: x_BN.cumsum(-1), _sums),
}


def find_task(name: str, vocab: int = 16, length: int = 10, base: int = 16, max_value: int = 1000, held: float = 0.0) -> Task:
    """The task of that name; each takes the settings that concern it."""
    if name in _STRINGS:
        return StringTask(name, 2 if name == "prefix" else vocab, length, *_STRINGS[name])
    names = task_names()
    near = difflib.get_close_matches(name, names, 3, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"there is no task {name!r}{hint}\nthere are: {', '.join(names)}")


def task_names() -> list[str]:
    """Every name that `find_task` knows."""
    return list(_STRINGS)


def trivial_baselines(batch: dict[str, Tensor]) -> dict[str, float]:
    """What answers without thought reach on a batch: copy the input, the commonest token, the commonest at each position."""
    x_BN, y_BM, keep_BM = batch["x"], batch["y"], batch["keep"]
    num_common = min(x_BN.shape[-1], y_BM.shape[-1])
    copied_BM = torch.full_like(y_BM, -1)
    copied_BM[:, :num_common] = x_BN[:, :num_common]
    count_MV = _counts(y_BM, keep_BM)
    guesses = {"copy": copied_BM, "commonest": count_MV.sum(0).argmax(), "per_position": count_MV.argmax(-1)}
    found = {}
    for name, guess in guesses.items():
        right_BM = (y_BM == guess) & keep_BM
        found[f"{name}_token"] = (right_BM.sum() / keep_BM.sum().clamp_min(1)).item()
        found[f"{name}_exact"] = (right_BM == keep_BM).all(-1).float().mean().item()
    return found


def _counts(y_BM: Tensor, keep_BM: Tensor) -> Tensor:
    """How often each token is the answer at each position."""
    count_MV = torch.zeros(y_BM.shape[-1], int(y_BM.max()) + 1, dtype=torch.int64, device=y_BM.device)
    return count_MV.scatter_add(1, y_BM.T, keep_BM.T.long())
