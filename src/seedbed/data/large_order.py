"""Permutations of more items than a table should hold, computed position by position."""

import numpy as np

from seedbed.data.order import key_of, mix

NUM_ROUNDS = 6


def feistel(position_N: np.ndarray, num_items: int, key: int) -> np.ndarray:
    """The images of these positions under a permutation of range(num_items), without a table."""
    bits = max(2, (num_items - 1).bit_length())
    right_bits = np.uint64(bits // 2)
    left_mask, right_mask = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1)
    keys = [np.uint64(key_of(key, r)) for r in range(NUM_ROUNDS)]
    result_N = position_N.astype(np.uint64)
    outside = np.arange(len(result_N))
    # The network permutes the next power of two; values beyond the end are permuted again until they are inside.
    while len(outside):
        walk_N = result_N[outside]
        left_N, right_N = walk_N >> right_bits, walk_N & right_mask
        for r in range(0, NUM_ROUNDS, 2):
            left_N ^= mix(right_N + keys[r]) & left_mask
            right_N ^= mix(left_N + keys[r + 1]) & right_mask
        result_N[outside] = (left_N << right_bits) | right_N
        outside = outside[result_N[outside] >= np.uint64(num_items)]
    return result_N.astype(np.int64)
