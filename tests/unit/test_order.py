"""The order of items: an exact permutation per epoch, the same however it is asked for."""

import numpy as np
import pytest

from seedbed.data import order
from seedbed.data.large_order import feistel
from seedbed.data.order import Order, key_of, table

SIZES = [1, 2, 3, 5, 64, 255, 256, 257, 1000, 1025]


@pytest.fixture(params=["table", "pieces"])
def way(request, monkeypatch):
    """Both ways of making a permutation: a table, and pieces computed on the fly (as for more than 10 million items)."""
    if request.param == "pieces":
        monkeypatch.setattr(order, "TABLE_LIMIT", 0)
        monkeypatch.setattr(order, "BLOCK", 100)
    return request.param


def sequence(source: Order, start: int, count: int, batch: int) -> list[tuple[int, int]]:
    pairs = []
    for first in range(start, start + count, batch):
        epoch_B, index_B = source.at(first, min(batch, start + count - first))
        pairs += zip(epoch_B.tolist(), index_B.tolist(), strict=True)
    return pairs


@pytest.mark.parametrize("num_items", SIZES)
def test_order_of_an_epoch_is_a_permutation(way, num_items):
    pairs = sequence(Order(num_items, seed=3), 0, 3 * num_items, batch=7)
    for epoch in range(3):
        part = pairs[epoch * num_items : (epoch + 1) * num_items]
        assert {e for e, _ in part} == {epoch}
        assert sorted(i for _, i in part) == list(range(num_items))


@pytest.mark.parametrize("num_items", [1, 3, 257, 1025])
@pytest.mark.parametrize("batch", [1, 3, 64, 1000, 5000])
def test_order_does_not_depend_on_the_batch_size(way, num_items, batch):
    count = 2 * num_items + 17
    assert sequence(Order(num_items, 1), 0, count, batch) == sequence(Order(num_items, 1), 0, count, count)


def test_order_random_access_equals_sequential(way):
    walked = sequence(Order(777, 5), 0, 4000, batch=64)
    jumper = Order(777, 5)
    for start in np.random.default_rng(0).permutation(3900)[:200].tolist():
        epoch_B, index_B = jumper.at(start, 64)
        assert list(zip(epoch_B.tolist(), index_B.tolist(), strict=True)) == walked[start : start + 64]


def test_order_of_ranks_covers_an_epoch(way):
    """World size is a way to cut the same sequence: two ranks of 8 see what one of 16 sees."""
    one, two = Order(100, 9), Order(100, 9)
    for step in range(20):
        whole = one.at(step * 16, 16)[1].tolist()
        assert two.at(step * 16, 8)[1].tolist() + two.at(step * 16 + 8, 8)[1].tolist() == whole


def test_order_differs_between_epochs_and_seeds(way):
    def epoch(seed, number):
        return tuple(Order(300, seed).at(300 * number, 300)[1].tolist())

    orders = {epoch(seed, number) for seed in range(10) for number in range(10)}
    assert len(orders) == 100
    assert tuple(range(300)) not in orders


@pytest.mark.parametrize("num_items", [2, 3, 5])
def test_small_permutations_are_all_about_equally_likely(num_items):
    """5! = 120 outcomes, 12,000 draws: 100 expected each, and 6 standard deviations are 60."""
    draws = [tuple(table(num_items, key_of(7, epoch)).tolist()) for epoch in range(12_000)]
    counts = np.unique(draws, axis=0, return_counts=True)[1]
    expected = 12_000 / [0, 1, 2, 6, 24, 120][num_items]
    assert len(counts) == [0, 1, 2, 6, 24, 120][num_items]
    assert abs(counts - expected).max() < 6 * expected**0.5


def test_order_positions_are_independent_of_item_numbers(way):
    """The correlation of position and item stays within 5 standard deviations of 0 in every epoch."""
    source = Order(2000, 11)
    for epoch in range(20):
        items = source.at(2000 * epoch, 2000)[1]
        assert abs(np.corrcoef(np.arange(2000), items)[0, 1]) < 5 / 2000**0.5


@pytest.mark.parametrize("num_items", [*SIZES, 4096, 65_537])
def test_feistel_is_a_bijection(num_items):
    for key in range(5):
        image = feistel(np.arange(num_items), num_items, key)
        assert np.array_equal(np.sort(image), np.arange(num_items))


def test_feistel_of_some_positions_is_feistel_of_all():
    positions = np.random.default_rng(1).integers(0, 1025, 50)
    assert np.array_equal(feistel(positions, 1025, 4), feistel(np.arange(1025), 1025, 4)[positions])


def test_order_unshuffled_is_sequential(way):
    assert Order(5, 1, shuffle=False).at(3, 9)[1].tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_order_of_huge_data_is_fast_to_create():
    source = Order(10**12, 1)
    epoch_B, index_B = source.at(5 * 10**12 - 3, 6)
    assert epoch_B.tolist() == [4, 4, 4, 5, 5, 5]
    assert len(set(index_B.tolist())) == 6 and index_B.min() >= 0 and index_B.max() < 10**12


def test_order_arrays_are_read_only():
    source = Order(10, 1)
    with pytest.raises(ValueError):
        source.at(0, 4)[1][0] = 7


def test_order_is_part_of_the_file_format():
    """Resumed runs rely on these numbers: they may change only together with a new major version."""
    assert Order(10, 1).at(0, 12)[1].tolist() == [2, 5, 4, 9, 6, 7, 1, 3, 8, 0, 3, 2]
    assert feistel(np.arange(10), 10, 1).tolist() == [0, 5, 9, 2, 4, 8, 7, 6, 3, 1]
