"""Images into a store of bytes: decoded once at one size, cached by content, and continued where it was interrupted."""

import math

import numpy as np

from seedbed.data.order import draw


def partition(classes_N: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and for validation, each in ascending order: `share` of every class held out, the same ones always.

    At least one image of a class is held out and one kept; a class with a single image keeps it for training.
    """
    held = np.zeros(len(classes_N), bool)
    words_N = draw(0, np.arange(len(classes_N)))
    order_N = np.lexsort((words_N, classes_N))
    starts = np.flatnonzero(np.diff(classes_N[order_N], prepend=-1))
    for rows in np.split(order_N, starts[1:]):
        num = min(max(1, math.floor(len(rows) * share)), len(rows) - 1)
        held[rows[:num]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)
