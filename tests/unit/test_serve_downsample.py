"""Curves for a screen: thinned without losing extremes, smoothed, cut to a window."""

import numpy as np
import pytest

from seedbed.serve.views import clip_to, downsample, smooth


@pytest.mark.parametrize("seed", range(8))
def test_downsampling_keeps_extremes_order_and_ends(seed: int):
    rng = np.random.default_rng(seed)
    n, num = int(rng.integers(1, 5000)), int(rng.integers(10, 800))
    x, y = np.arange(n, dtype=float), rng.normal(size=n)
    if seed % 2:
        y[rng.integers(0, n, n // 10)] = np.nan
    known = ~np.isnan(y)
    px, py = downsample(x, y, num)
    assert len(px) <= num + 2
    if known.any():
        assert py.min() == np.nanmin(y) and py.max() == np.nanmax(y)
        assert (px[0], px[-1]) == (x[known][0], x[known][-1])
    assert np.all(np.diff(px) > 0) and np.array_equal(py, y[px.astype(int)])
    if known.sum() <= num:
        assert np.array_equal(px, x[known])


def test_downsampling_keeps_spikes():
    y = np.zeros(100_000)
    y[54_321] = 9.0
    assert 9.0 in downsample(np.arange(100_000.0), y, 200)[1]


def test_smoothing():
    y = np.random.default_rng(0).normal(size=300)
    assert np.array_equal(smooth(y, 0.0), y)
    assert np.allclose(smooth(np.full(50, 3.0), 0.97), 3.0)
    assert smooth(y, 0.9)[10:].std() < y.std() / 2
    gap = np.array([1.0, np.nan, np.inf, 1.0])
    assert np.allclose(smooth(gap, 0.5), 1.0)


def average(y: np.ndarray, weight: float) -> np.ndarray:
    """The same, value by value."""
    out, level, total = np.empty_like(y), 0.0, 0.0
    for index, value in enumerate(y.tolist()):
        if np.isfinite(value):
            level, total = weight * level + (1 - weight) * value, weight * total + (1 - weight)
        out[index] = level / total if total else np.nan
    return out


@pytest.mark.parametrize("num", [1, 2, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize("weight", [0.0, 0.3, 0.97, 0.9999])
def test_smoothing_by_blocks_is_smoothing_value_by_value(num: int, weight: float):
    rng = np.random.default_rng(num)
    y = rng.normal(3, 1, num)
    y[rng.integers(0, num, num // 4)] = np.nan
    y[rng.integers(0, num, num // 8)] = np.inf
    # At 0.9999 the first sums are divided by 1e-4, which takes four digits.
    np.testing.assert_allclose(smooth(y, weight), average(y, weight), rtol=1e-10)


def test_clipping_keeps_one_point_beyond_its_edges():
    x = np.arange(10.0)
    assert clip_to(x, x, 3, 5)[0].tolist() == [2, 3, 4, 5, 6]
    assert clip_to(x, x, 20, 30)[0].tolist() == []
