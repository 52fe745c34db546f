"""Addition in a base: `base @ a + b = base` with reversed digits, from a bounded range whose pairs can be held out and counted.

Shape suffixes: B samples, N input tokens, M output tokens, C candidates for a sample, I digits.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from seedbed.errors import UserError
from seedbed.nn import rng
from seedbed.recipes.thinker.task import Samples, Shape, Task

# Held-out pairs do not depend on a run's seed: all runs agree on them.
HELD_SEED, HELD_STREAM = 0, 8
# The probability that a sample finds no valid candidate and takes the spare pair.
MISS = 1e-6


class Addition(Task):
    """Sums of two numbers below `max_value`; the length of a sample is the number of digits that its operands may have.

    The input is padded on the left, the answer on the right. `pick` says which pairs are drawn: those held out, the others
    (free), or any.
    """

    def __init__(self, base: int, max_value: int, held: float, pick: Literal["any", "free", "held"] = "any") -> None:
        self.name, self.base, self.symbols = f"add{base}", base, base
        self.max_value, self.held, self.pick = max_value, held, pick
        self.operators = ("@", "+", "=", f"base-{base}")
        self.length = _num_digits(max_value - 1, base)
        self.spare = self._find_spare()

    @property
    def num_pairs(self) -> int:
        return self.max_value**2

    def picking(self, pick: Literal["any", "free", "held"]) -> "Addition":
        """The same task with other pairs; without held-out pairs there is no difference."""
        return Addition(self.base, self.max_value, self.held, pick if self.held else "any")

    def shape(self, length: int) -> Shape:
        if self.base**length > 2**31:
            raise UserError(f"numbers of {length} digits in base {self.base} are too large; operands end at 2**31")
        return self._sizes(2 * length + 5, length + 1)

    def make(self, key_B: Tensor, length_B: Tensor, shape: Shape) -> Samples:
        # Operands are below these; lengths beyond training are not limited by `max_value`.
        end_B = torch.pow(self.base, length_B)
        end_B = torch.where(length_B > self.length, end_B, end_B.clamp_max(self.max_value))
        return self.write(*self._draw(key_B, end_B), shape)

    def write(self, a_B: Tensor, b_B: Tensor, shape: Shape) -> Samples:
        num_digits = shape.num_out - 1
        (a_BI, na_B1), (b_BI, nb_B1), (sum_BM, ns_B1) = (self._digits(v, num_digits + 1) for v in (a_B, b_B, a_B + b_B))
        # Positions count from the first token that is not PAD.
        position_BN = torch.arange(shape.num_in, device=a_B.device) - shape.num_in + na_B1 + nb_B1 + 5
        x_BN = a_BI.gather(-1, (position_BN - 2).clamp(0, num_digits))
        x_BN = torch.where(position_BN > na_B1 + 2, b_BI.gather(-1, (position_BN - 3 - na_B1).clamp(0, num_digits)), x_BN)
        marks = {"@": 1, "+": na_B1 + 2, "=": na_B1 + nb_B1 + 3, self.operators[-1]: na_B1 + nb_B1 + 4}
        for name, at in marks.items():
            x_BN = torch.where(position_BN == at, self.operator(name), x_BN)
        x_BN = torch.where(position_BN == 0, self.operator(self.operators[-1]), x_BN)
        keep_BM = torch.arange(shape.num_out, device=a_B.device) < ns_B1
        x_BN, y_BM = torch.where(position_BN < 0, self.pad, x_BN), torch.where(keep_BM, sum_BM, self.pad)
        return Samples(x_BN, y_BM, keep_BM, keep_BM)

    def pairs(self, number_B: Tensor) -> tuple[Tensor, Tensor]:
        """The pair with each number in 0..num_pairs-1."""
        return number_B // self.max_value, number_B % self.max_value

    def is_held(self, a: Tensor, b: Tensor) -> Tensor:
        """Whether a pair is held out: both orders of it or neither."""
        number = torch.minimum(a, b) << 31 | torch.maximum(a, b)
        return rng.uniform(rng.keys(HELD_SEED, number, HELD_STREAM), 1)[..., 0] < self.held

    def sample_lengths(self, a_B: Tensor, b_B: Tensor) -> Tensor:
        """The number of digits of the larger operand."""
        return self._digits(torch.maximum(a_B, b_B), self.length)[1][..., 0]

    def target(self, x: list[int]) -> list[int]:
        plus, equals = x.index(self.operator("+")), x.index(self.operator("="))
        rest = _value(x[2:plus], self.base) + _value(x[plus + 1 : equals], self.base)
        digits = [rest % self.base]
        while rest := rest // self.base:
            digits.append(rest % self.base)
        return digits

    def _draw(self, key_B: Tensor, end_B: Tensor) -> tuple[Tensor, Tensor]:
        """The first valid one of several candidates, without a host sync; the spare pair where none is valid."""
        miss = {"any": 0.0, "free": self.held, "held": 1 - self.held}[self.pick]
        num = math.ceil(math.log(MISS) / math.log(miss)) if miss else 1
        pair_BC2 = rng.integers(key_B, 2 * num, end_B.unsqueeze(-1)).unflatten(-1, (num, 2))
        a_BC, b_BC = pair_BC2.unbind(-1)
        if self.pick == "any":
            return a_BC[..., 0], b_BC[..., 0]
        fits_BC = self.is_held(a_BC, b_BC) == (self.pick == "held")
        rank_BC = fits_BC * torch.arange(num, 0, -1, device=key_B.device)
        best_B1, any_B = rank_BC.argmax(-1, keepdim=True), fits_BC.any(-1)
        a_B, b_B = (v_BC.gather(-1, best_B1)[..., 0] for v_BC in (a_BC, b_BC))
        if self.spare is None:
            return a_B, b_B
        return torch.where(any_B, a_B, self.spare[0]), torch.where(any_B, b_B, self.spare[1])

    def _find_spare(self) -> tuple[int, int] | None:
        """A valid pair of one-digit numbers, allowed at every length. A small base may hold out no such pair: None."""
        if self.pick == "any":
            return None
        end = min(self.base, self.max_value)
        number = torch.arange(end * end)
        a, b = number // end, number % end
        found = (self.is_held(a, b) == (self.pick == "held")).nonzero()
        if len(found):
            return int(a[found[0]]), int(b[found[0]])
        if self.pick == "free":
            raise UserError(
                f"data.held={self.held} leaves no pair of one-digit numbers in base {self.base} to train on; hold less"
            )
        return None

    def _digits(self, value_B: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """The digits, least significant first, and (..., 1) how many there are: at least one."""
        power_I = torch.pow(self.base, torch.arange(num, device=value_B.device))
        digit_BI = value_B.unsqueeze(-1) // power_I % self.base
        return digit_BI, (value_B.unsqueeze(-1) >= power_I[1:]).sum(-1, keepdim=True) + 1


def _num_digits(value: int, base: int) -> int:
    return 1 + _num_digits(value // base, base) if value >= base else 1


def _value(digits: list[int], base: int) -> int:
    return sum(digit * base**i for i, digit in enumerate(digits))
