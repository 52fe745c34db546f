"""Counter-based random numbers, a pure function of (seed, counter, stream): the same inside vmap, a pack or a CUDA graph.

Shape suffixes: B samples (any leading shape), J draws of one sample.
"""

import math
from typing import Any

import torch
from torch import Tensor

WORD = 0xFFFFFFFF  # 32-bit arithmetic in int64 lanes
_GOLDEN = 0x9E3779B9
_NUM_ROUNDS = 3


def keys(seed: Tensor | int, index_B: Tensor, stream: Tensor | int) -> Tensor:
    """One key per sample; within one seed and stream no two indices share a key. `stream` names what the draws are for.

    Seeds are in [0, 2**32).
    """
    root = _mix((seed & WORD) ^ _mix(stream + 1))
    # A Feistel network: a bijection for any round function.
    left_B, right_B = (index_B >> 32) & WORD, index_B & WORD
    for turn in range(1, _NUM_ROUNDS + 1):
        left_B, right_B = right_B, left_B ^ _mix(right_B ^ (root ^ _mix(turn)))
    return (left_B << 32) | right_B


def bits(key_B: Tensor, num: int) -> Tensor:
    """int64 in [0, 2**32), `num` per key. Number j does not depend on `num`: a longer draw begins with the shorter one."""
    # Not a product: compiled code would treat it as index arithmetic, in 32 bits.
    start_J = _mix(_mix(torch.arange(num, device=key_B.device) ^ _GOLDEN))
    high_B1, low_B1 = (key_B >> 32 & WORD).unsqueeze(-1), (key_B & WORD).unsqueeze(-1)
    return _mix(_mix(low_B1 ^ start_J) ^ high_B1)


def uniform(key_B: Tensor, num: int) -> Tensor:
    """float32 in [0, 1), on a grid of 2**-24 so that 1 is never reached by rounding."""
    return (bits(key_B, num) >> 8).to(torch.float32) * 2.0**-24


def normal(key_B: Tensor, num: int) -> Tensor:
    """float32 with mean 0 and variance 1; numbers 2i and 2i+1 are the two coordinates of one point (Box and Muller)."""
    pairs = bits(key_B, num + num % 2).to(torch.float32).unflatten(-1, (-1, 2))
    # The added half keeps the logarithm finite.
    radius = ((pairs[..., 0] + 0.5) * 2.0**-32).log().mul(-2.0).sqrt()
    angle = pairs[..., 1] * (2.0**-32 * 2 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(-2)[..., :num]


def integers(key_B: Tensor, num: int, high: int | Tensor) -> Tensor:
    """int64 in [0, high), for `high` up to 2**31; a tensor is broadcast against the result (..., num)."""
    return bits(key_B, num) * high >> 32


def _mix(x: Any) -> Any:
    """A bijection of 32-bit numbers in which every bit affects all others, for tensors and Python integers.

    The factors are below 2**31, so that no product exceeds 63 bits. The shift makes a new tensor, the rest is in place, since
    memory traffic dominates.
    """
    for shift, factor in ((16, 0x2C1B3C6D), (15, 0x297A2D39)):
        shifted = x >> shift
        shifted ^= x
        shifted *= factor
        shifted &= WORD
        x = shifted
    return x ^ x >> 15
