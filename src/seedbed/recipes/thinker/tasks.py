"""The tasks by name, six of them of Delétang et al. (2023), drawn as their published sampler does; accuracy of trivial answers.

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
from seedbed.recipes.thinker.addition import Addition
from seedbed.recipes.thinker.task import Rule, Samples, Shape, StringTask, Task, flip

# Numbers of more bits are zero so rarely that setting a bit has no visible effect.
EXACT_BITS = 16
BUCKETS = 5


def _odds_first(x_BN: Tensor, position_M: Tensor, length_B1: Tensor) -> Tensor:
    """Positions 1, 3, 5, ... counted from 0 come first, as in the published code and not as in its description."""
    num_odd_B1 = length_B1 // 2
    index_BM = torch.where(position_M < num_odd_B1, 2 * position_M + 1, 2 * (position_M - num_odd_B1))
    return x_BN.gather(-1, index_BM.clamp_max(x_BN.shape[-1] - 1))


def _sorted(x_BN: Tensor, position_M: Tensor, length_B1: Tensor) -> Tensor:
    """Counting sort: the symbol at a position is the number of symbols whose smaller and equal ones all come before it."""
    inside_BN = torch.arange(x_BN.shape[-1], device=x_BN.device) < length_B1
    up_to = [((x_BN <= symbol) & inside_BN).sum(-1, keepdim=True) for symbol in range(BUCKETS - 1)]
    return sum(((position_M >= end_B1).long() for end_B1 in up_to), torch.zeros_like(position_M))


class MissingDuplicate(Task):
    """A string twice in a row with one symbol masked by a 2, and a 3 at the end of an odd length: what is masked?"""

    name, symbols = "missing_duplicate", 4

    def shape(self, length: int) -> Shape:
        return self._sizes(length, 1)

    def make(self, key_B: Tensor, length_B: Tensor, shape: Shape) -> Samples:
        word_BN, length_B1 = rng.bits(key_B, shape.num_in + 1), length_B.unsqueeze(-1)
        half_B1 = (length_B1 // 2).clamp_min(1)
        hidden_B1 = word_BN[..., :1] * (2 * half_B1) >> 32
        bit_BN = word_BN[..., 1:] >> 31
        position_N = torch.arange(shape.num_in, device=key_B.device)
        x_BN = torch.where(position_N == hidden_B1, 2, bit_BN.gather(-1, position_N % half_B1))
        x_BN = torch.where(position_N == 2 * half_B1, 3, x_BN)
        # A single token has no room for a string: it is a 1, and so is its answer.
        x_BN = torch.where(length_B1 == 1, 1, x_BN)
        y_B1 = torch.where(length_B1 == 1, 1, bit_BN.gather(-1, hidden_B1 % half_B1))
        keep_B1 = torch.ones_like(y_B1, dtype=torch.bool)
        return Samples(torch.where(position_N < length_B1, x_BN, self.pad), y_B1, keep_B1, keep_B1)

    def target(self, x: list[int]) -> list[int]:
        half = len(x) // 2
        return [x[(x.index(2) + half) % (2 * half)]] if half else [1]


class BinaryAddition(Task):
    """Two positive numbers of random widths, little-endian, around a 2; the sum ends with a 2, and zeros fill it to n + 1.

    Counted is what comes up to and including the 2; the zeros may be learned.
    """

    name, symbols = "binary_addition", 3

    def shape(self, length: int) -> Shape:
        return self._sizes(length, length + 1)

    def make(self, key_B: Tensor, length_B: Tensor, shape: Shape) -> Samples:
        length_B1 = length_B.unsqueeze(-1)
        word_BW = rng.bits(key_B, 3 + 2 * shape.num_out)
        first_B1 = 1 + (word_BW[..., :1] * (length_B1 - 2).clamp_min(1) >> 32)
        # Two tokens or one hold a single number, 0..2 or 0, and no separator.
        first_B1 = torch.where(length_B1 < 3, length_B1, first_B1)
        a_BM = _number(word_BW[..., 1:2], word_BW[..., 3::2], first_B1)
        b_BM = _number(word_BW[..., 2:3], word_BW[..., 4::2], length_B1 - 1 - first_B1)
        position_M = torch.arange(shape.num_out, device=key_B.device)
        small_B1 = torch.where(length_B1 == 2, word_BW[..., 1:2] * 3 >> 32, 0)
        a_BM = torch.where(length_B1 < 3, small_B1 >> position_M.clamp_max(2) & 1, a_BM)
        x_BM = torch.where(position_M < first_B1, a_BM, b_BM.gather(-1, (position_M - first_B1 - 1).clamp_min(0)))
        x_BM = torch.where(position_M == first_B1, 2, x_BM)
        x_BN = torch.where(position_M < length_B1, x_BM, self.pad)[..., : shape.num_in]
        sum_BM = _sum(a_BM, b_BM, position_M)
        end_B1 = (sum_BM * (position_M + 1)).amax(-1, keepdim=True).clamp_min(1)
        y_BM = torch.where(position_M == end_B1, 2, sum_BM)
        keep_BM, learn_BM = position_M <= end_B1, position_M <= length_B1
        return Samples(x_BN, torch.where(learn_BM, y_BM, self.pad), keep_BM, learn_BM)

    def target(self, x: list[int]) -> list[int]:
        cut = x.index(2) if 2 in x else len(x)
        total = sum(bit << i for part in (x[:cut], x[cut + 1 :]) for i, bit in enumerate(part))
        bits = [int(bit) for bit in reversed(f"{total:b}")]
        return [*bits, 2, *[0] * (len(x) - len(bits))]


def _number(small_B1: Tensor, word_BM: Tensor, width_B1: Tensor) -> Tensor:
    """The bits of a number uniform in 1..2^width - 1, zero beyond the width."""
    position_M = torch.arange(word_BM.shape[-1], device=word_BM.device)
    inside_BM = position_M < width_B1
    value_B1 = 1 + (small_B1 * ((1 << width_B1.clamp(0, EXACT_BITS)) - 1) >> 32)
    long_BM = (word_BM >> 31) * inside_BM
    # Never zero.
    long_BM = torch.where((position_M == 0) & (long_BM.sum(-1, keepdim=True) == 0), 1, long_BM)
    bit_BM = torch.where(width_B1 > EXACT_BITS, long_BM, value_B1 >> position_M.clamp_max(EXACT_BITS) & 1)
    return bit_BM * inside_BM


def _sum(a_BM: Tensor, b_BM: Tensor, position_M: Tensor) -> Tensor:
    """Bits of the sum. A position has a carry if the last position so far with equal bits had ones: no loop is needed."""
    open_BM = a_BM ^ b_BM
    last_BM = torch.where(open_BM == 0, position_M, -1).cummax(-1).values
    carry_BM = a_BM.gather(-1, last_BM.clamp_min(0)) * (last_BM >= 0)
    return open_BM ^ torch.cat((torch.zeros_like(carry_BM[..., :1]), carry_BM[..., :-1]), -1)


OTHERS = {task.name: task for task in (MissingDuplicate, BinaryAddition)}


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
    "reverse_string": Rule(flip, lambda x: x[::-1], symbols=2),
    "duplicate_string": Rule(lambda x_BN, at_M, n_B1: x_BN.gather(-1, at_M % n_B1), lambda x: x + x, symbols=2, copies=2),
    "odds_first": Rule(_odds_first, lambda x: x[1::2] + x[::2], symbols=2),
    "bucket_sort": Rule(_sorted, sorted, symbols=BUCKETS),
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
    if name in OTHERS:
        return OTHERS[name](length)
    if name == Mirrored.name:
        return Mirrored(vocab, length)
    near = difflib.get_close_matches(name, task_names(), 3, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"there is no task {name!r}{hint}\nthere are: {', '.join(task_names())}")


def task_names() -> list[str]:
    """Every name that `find_task` knows; of addition, the one that takes its base from the settings and the one in base 16."""
    return [*STRINGS, *OTHERS, Mirrored.name, "add", "add16"]


def trivial_baselines(batch: dict[str, Tensor]) -> dict[str, float]:
    """The accuracy of trivial answers on a batch: the input, the most frequent token, the most frequent at each position."""
    x_BN, y_BM, keep_BM = batch["x"], batch["y"], batch["keep"]
    num_common = min(x_BN.shape[-1], y_BM.shape[-1])
    copied_BM = torch.full_like(y_BM, -1)
    copied_BM[:, :num_common] = x_BN[:, :num_common]
    # How often each token is the answer at each position.
    count_MV = torch.zeros(y_BM.shape[-1], int(y_BM.max()) + 1, dtype=torch.int64, device=y_BM.device)
    count_MV = count_MV.scatter_add(1, y_BM.T, keep_BM.T.long())
    guesses = {"copy": copied_BM, "commonest": count_MV.sum(0).argmax(), "per_position": count_MV.argmax(-1)}
    found = {}
    for name, guess in guesses.items():
        right_BM = (y_BM == guess) & keep_BM
        found[f"{name}_token"] = (right_BM.sum() / keep_BM.sum().clamp_min(1)).item()
        found[f"{name}_exact"] = (right_BM == keep_BM).all(-1).float().mean().item()
    return found
