"""Counted randomness: even, independent in every argument, and the same however it is asked for.

Everything here is a fixed function of its arguments, so a limit of five standard deviations is not a matter of luck.
"""

import itertools
import math

import pytest
import torch
from helpers import assert_close_in_float
from torch import Tensor

from seedbed.nn import rng

INDEX = torch.arange(20_000)
GOLDEN_KEYS = [-1719356517188572798, 1218765470319777938, -4147351966147629607]
GOLDEN_BITS = [[3890832010, 4105491025], [1074408903, 1592185753], [660043818, 130431238]]
GOLDEN_INTEGERS = [[90, 95, 39], [25, 37, 30], [15, 3, 73]]
DRAWS = {
    "bits": rng.bits,
    "uniform": rng.uniform,
    "normal": rng.normal,
    "integers": lambda key, num: rng.integers(key, num, 10),
}


def flip_bit(value: Tensor, bit: int) -> Tensor:
    return value ^ (1 << bit if bit < 63 else -(2**63))


def assert_same_draw(name: str, one: Tensor, other: Tensor) -> None:
    """In every bit; normal numbers but for the roundings of a logarithm, a root, a cosine and a product."""
    if name == "normal":
        assert_close_in_float(one, other, 4)
    else:
        assert torch.equal(one, other)


def assert_even(cells: Tensor, num_cells: int) -> None:
    """Numbers in [0, num_cells) fall evenly: chi-squared within five standard deviations of its mean."""
    count = torch.bincount(cells.flatten(), minlength=num_cells).double()
    assert len(count) == num_cells
    expected = cells.numel() / num_cells
    chi, freedom = ((count - expected) ** 2 / expected).sum().item(), num_cells - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom) + 5


def assert_independent(a: Tensor, b: Tensor) -> None:
    """High and low bits of two sets of words make even pairs."""
    for i, j in itertools.product((0, 14, 28), repeat=2):
        assert_even((a >> i & 15) * 16 + (b >> j & 15), 256)
    assert_even((a ^ b) & 255, 256)
    assert_even((a - b) & 255, 256)


def test_rng_numbers_are_fixed():
    """These decide what every run sees: another function makes every recorded seed another run."""
    key = rng.keys(1, torch.tensor([0, 1, 2**40]), 2)
    assert key.tolist() == GOLDEN_KEYS
    assert rng.bits(key, 2).tolist() == GOLDEN_BITS
    assert rng.integers(key, 3, 100).tolist() == GOLDEN_INTEGERS


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("num", [0, 1, 2, 5, 8, 33])
def test_rng_longer_draw_begins_with_the_shorter_one(name, num):
    key = rng.keys(3, INDEX[:50], 1)
    longer = DRAWS[name](key, 40)
    assert longer.shape == (50, 40)
    assert_same_draw(name, DRAWS[name](key, num), longer[:, :num])


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_over_seeds_and_samples_equals_single_calls(name):
    seeds, index = torch.tensor([0, 1, 5, 2**31]), INDEX[:7]

    def draw(seed: Tensor | int, index: Tensor) -> Tensor:
        return DRAWS[name](rng.keys(seed, index, 4), 6)

    alone = torch.stack([draw(seed, index) for seed in seeds.tolist()])
    assert_same_draw(name, torch.func.vmap(draw, (0, None))(seeds, index), alone)
    assert_same_draw(name, torch.stack([draw(seed, index) for seed in seeds]), alone)
    each = torch.func.vmap(torch.func.vmap(draw, (None, 0)), (0, None))(seeds, index)
    assert_same_draw(name, each, alone)
    assert_same_draw(name, DRAWS[name](rng.keys(1, index.view(7, 1), 4), 6), alone[1].unsqueeze(1))


def test_rng_keys_of_a_stream_are_distinct():
    index = torch.cat([INDEX, INDEX + 2**32 - 10_000, INDEX << 33, INDEX + 2**62]).unique()
    for seed, stream in itertools.product((0, 1, 2**31), (0, 1, 16)):
        assert len(rng.keys(seed, index, stream).unique()) == len(index)


def test_rng_keys_of_streams_and_seeds_are_distinct():
    keys = torch.cat([rng.keys(seed, INDEX[:2000], stream) for seed in range(8) for stream in range(32)])
    assert len(keys.unique()) == len(keys)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_rng_bytes_are_uniform(shift):
    assert_even(rng.bits(rng.keys(0, INDEX, 0), 16) >> shift & 255, 256)
    assert_even(rng.bits(rng.keys(0, INDEX[:1], 0), 100_000) >> shift & 255, 256)


@pytest.mark.parametrize("high", [1, 2, 3, 10, 16, 1000, 65_537])
def test_rng_integers_are_uniform(high):
    drawn = rng.integers(rng.keys(2, INDEX, 0), 32, high)
    assert drawn.dtype == torch.int64 and drawn.min() >= 0
    assert_even(drawn, high)


def test_rng_integers_with_a_tensor_of_bounds():
    key, high = rng.keys(0, INDEX[:5], 0), torch.tensor([1, 2, 7, 100, 2**31])
    each = torch.stack([rng.integers(key[i], 9, int(high[i])) for i in range(5)])
    assert torch.equal(rng.integers(key, 9, high.unsqueeze(-1)), each)


NEIGHBOURS = {
    "samples": lambda words: (words[1:], words[:-1]),
    "samples far apart": lambda words: (words[10_000:], words[:-10_000]),
    "elements": lambda words: (words[:, 1:], words[:, :-1]),
    "samples and elements": lambda words: (words[1:, 1:], words[:-1, :-1]),
    "seeds": lambda words: (words, rng.bits(rng.keys(8, INDEX, 3), 16)),
    "streams": lambda words: (words, rng.bits(rng.keys(7, INDEX, 4), 16)),
    "seed and stream exchanged": lambda words: (words, rng.bits(rng.keys(3, INDEX, 7), 16)),
    "upper half of the index": lambda words: (words, rng.bits(rng.keys(7, INDEX + 2**32, 3), 16)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_rng_neighbours_are_independent(name):
    assert_independent(*NEIGHBOURS[name](rng.bits(rng.keys(7, INDEX, 3), 16)))


@pytest.mark.parametrize("argument", ["index", "seed", "key"])
def test_rng_avalanche_of_arguments(argument):
    index = INDEX + 123_456_789_012
    key, width = rng.keys(5, index, 0), {"index": 63, "seed": 32, "key": 64}[argument]
    words = rng.bits(key, 1)[:, 0]
    for bit in range(width):
        if argument == "index":
            other = rng.keys(5, flip_bit(index, bit), 0)
        else:
            other = rng.keys(5 ^ 1 << bit, index, 0) if argument == "seed" else flip_bit(key, bit)
        moved = (words ^ rng.bits(other, 1)[:, 0]).unsqueeze(-1) >> torch.arange(32) & 1
        share = moved.double().mean(0)
        assert (share - 0.5).abs().max() < 0.025, f"bit {bit}"


def test_rng_avalanche_of_indices():
    index = INDEX + 123_456_789_012
    for bit in range(63):
        moved = (rng.keys(5, index, 0) ^ rng.keys(5, flip_bit(index, bit), 0)).unsqueeze(-1) >> torch.arange(64) & 1
        assert (moved.double().mean(0) - 0.5).abs().max() < 0.025, f"bit {bit}"


def test_normal_numbers_are_normal():
    z = rng.normal(rng.keys(0, INDEX, 5), 50).double().flatten()
    num = len(z)
    for power, (mean, spread) in {1: (0, 1), 2: (1, 2**0.5), 3: (0, 15**0.5), 4: (3, 96**0.5)}.items():
        assert abs((z**power).mean().item() - mean) < 5 * spread / num**0.5
    cdf = torch.special.ndtr(z.sort().values)
    assert (cdf - (torch.arange(num) + 0.5) / num).abs().max() < 1.95 / num**0.5  # Kolmogorov and Smirnov, 1 in 1000
    assert 4.5 < z.abs().max() < 6.8


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_normal_numbers_are_uncorrelated(lag):
    z = rng.normal(rng.keys(0, INDEX, 6), 40).double()
    for power in (1, 2):
        a, b = (part.flatten() - part.mean() for part in (z[:, lag:] ** power, z[:, :-lag] ** power))
        assert abs((a @ b / (a.norm() * b.norm())).item()) < 5 / len(a) ** 0.5


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1])
def test_rng_extreme_words_give_valid_numbers(monkeypatch, word):
    monkeypatch.setattr(rng, "bits", lambda key, num: torch.full((*key.shape, num), word))
    key = torch.zeros(1, dtype=torch.int64)
    assert 0 <= rng.uniform(key, 1).item() < 1
    assert rng.normal(key, 2).isfinite().all()
    for high in (1, 3, 2**31):
        assert 0 <= rng.integers(key, 1, high).item() < high


def test_rng_floats_are_float32_for_any_default():
    key = rng.keys(0, INDEX[:9], 0)
    usual = rng.uniform(key, 4), rng.normal(key, 4)
    torch.set_default_dtype(torch.float64)
    try:
        unusual = rng.uniform(key, 4), rng.normal(key, 4)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(usual, unusual, strict=True):
        assert b.dtype == torch.float32 and torch.equal(a, b)


def test_rng_leaves_torch_generators_unchanged():
    before = torch.get_rng_state()
    rng.normal(rng.keys(0, INDEX[:9], 0), 4)
    assert torch.equal(before, torch.get_rng_state())
