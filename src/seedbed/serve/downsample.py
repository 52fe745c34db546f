"""Min-max downsampling and smoothing of curves for the browser; no spike is lost."""

import math

import numpy as np


def downsample(x: np.ndarray, y: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """At most about `num` points: both ends, and minimum and maximum of equal buckets."""
    known = ~np.isnan(y) & ~np.isnan(x)
    x, y = x[known], y[known]
    if len(y) <= num:
        return x, y
    width = -(-len(y) // max((num - 2) // 2, 1))
    rows = -(-len(y) // width)
    # The last bucket is padded with its last point, which changes neither extreme.
    grid = np.append(y, np.full(rows * width - len(y), y[-1])).reshape(rows, width)
    first = np.arange(rows) * width
    kept = np.concatenate([first + grid.argmin(1), first + grid.argmax(1), [0, len(y) - 1]])
    kept = np.unique(np.minimum(kept, len(y) - 1))
    return x[kept], y[kept]


def smooth(y: np.ndarray, weight: float) -> np.ndarray:
    """Bias-corrected exponential moving average; non-finite values are skipped."""
    out, level, total = np.empty_like(y), 0.0, 0.0
    for index, value in enumerate(y.tolist()):
        if math.isfinite(value):
            level, total = weight * level + (1 - weight) * value, weight * total + (1 - weight)
        out[index] = level / total if total else np.nan
    return out


def clip_to(x: np.ndarray, y: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """The points between `low` and `high` and one more on each side, so that lines reach the edge of the chart."""
    inside = np.flatnonzero((x >= low) & (x <= high))
    if not len(inside):
        return x[:0], y[:0]
    part = slice(max(inside[0] - 1, 0), inside[-1] + 2)
    return x[part], y[part]
