"""The registry of tasks by name, and the accuracy of trivial answers.

Shape suffixes: B samples, N input tokens, M output tokens, V tokens, L symbols of a sample.
"""

import difflib
import itertools
import re
from dataclasses import replace

import torch
from torch import Tensor

from seedbed.errors import UserError
from seedbed.nn import rng
from seedbed.recipes.thinker import chomsky
from seedbed.recipes.thinker.addition import Addition
from seedbed.recipes.thinker.task import Rule, Samples, Shape, StringTask, Task, flip


def _roll(x_BN: Tensor, position_M: Tensor, length_B1: Tensor) -> Tensor:
    return x_BN.gather(-1, (position_M - x_BN[..., :1]) % length_B1)


SUMS = Rule(lambda x_BN, position_M, length_B1: x_BN.cumsum(-1), lambda x: list(itertools.accumulate(x)))
STRINGS = {
    "copy": Rule(lambda x_BN, position_M, length_B1: x_BN, lambda x: x),
    "flip": Rule(flip, lambda x: x[::-1]),
    "roll": Rule(_roll, lambda x: [x[(i - x[0]) % len(x)] for i in range(len(x))]),
    "roll_num": Rule(lambda x_BN, position_M, length_B1: x_BN + x_BN[..., :1], lambda x: [symbol + x[0] for symbol in x]),
    "cumsum": SUMS,
    "prefix": replace(SUMS, symbols=2),
    **chomsky.STRINGS,
}


class Mirrored(Task):
    """From BOS alone: random symbols, the same backwards, EOS. Only the second half is predictable, and counts.

    EOS is the last symbol, so that answers stay among the symbols.
    """

    name = "mirrored"

    def __init__(self, vocab: int, length: int) -> None:
        self.symbols, self.length, self.eos = vocab + 1, length, vocab

    def shape(self, length: int) -> Shape:
        return self._sizes(1, 2 * length + 1)

    def make(self, key_B: Tensor, length_B: Tensor, shape: Shape) -> Samples:
        symbol_BL, length_B1 = rng.integers(key_B, shape.num_out // 2, self.eos), length_B.unsqueeze(-1)
        position_M = torch.arange(shape.num_out, device=key_B.device)
        index_BM = torch.minimum(position_M, 2 * length_B1 - 1 - position_M).clamp_min(0)
        y_BM = torch.where(position_M == 2 * length_B1, self.eos, symbol_BL.gather(-1, index_BM))
        learn_BM = position_M <= 2 * length_B1
        x_B1 = torch.full_like(length_B1, self.bos)
        return Samples(x_B1, torch.where(learn_BM, y_BM, self.pad), learn_BM & (position_M >= length_B1), learn_BM)

    def target(self, x: list[int]) -> list[int]:
        """The whole sequence that begins with the symbols `x`."""
        return [*x, *x[::-1], self.eos]

    def to_text(self, tokens: list[int]) -> str:
        return " ".join("EOS" if token == self.eos else Task.to_text(self, [token]) for token in tokens if token != self.pad)


def find_task(name: str, vocab: int = 16, length: int = 10, base: int = 16, max_value: int = 1000, held: float = 0.0) -> Task:
    """The task of that name; each takes the settings that concern it. `add7` is `add` in base 7."""
    number = re.fullmatch(r"add(\d*)", name)
    if number and 2 <= int(number[1] or base) <= 16:
        return Addition(int(number[1] or base), max_value, held)
    if held:
        raise UserError(f"data.held={held} holds out pairs of operands, which only addition has; task {name!r} needs held=0")
    if name in STRINGS:
        return StringTask(name, STRINGS[name], vocab, length)
    if name in chomsky.OTHERS:
        return chomsky.OTHERS[name](length)
    if name == Mirrored.name:
        return Mirrored(vocab, length)
    near = difflib.get_close_matches(name, task_names(), 3, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"there is no task {name!r}{hint}\nthere are: {', '.join(task_names())}")


def task_names() -> list[str]:
    """Every name that `find_task` knows; of addition, the one that takes its base from the settings and the one in base 16."""
    return [*STRINGS, *chomsky.OTHERS, Mirrored.name, "add", "add16"]


def trivial_baselines(batch: dict[str, Tensor]) -> dict[str, float]:
    """The accuracy of trivial answers on a batch: the input, the most frequent token, the most frequent at each position."""
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
