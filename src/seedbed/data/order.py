"""The order of items as a pure function of (seed, counter), for any batch size and any starting point.

It depends on no library's random generator, so it does not change with versions.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

# Up to this length a permutation is kept as a table (about a second and 80 MB); a longer one is computed in blocks.
TABLE_LIMIT = 10_000_000
BLOCK = 1 << 16

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def mix(value: Any) -> Any:
    """The finaliser of splitmix64, on an int or an array of uint64: a bijection in which every bit affects all others."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key_of(*words: int) -> int:
    """One 64-bit key from a few integers; their order matters."""
    key = 0
    for word in words:
        key = mix((key * 3 + word + _GOLDEN) & _MASK)
    return key


def draw(key: int, index_N: np.ndarray) -> np.ndarray:
    """A random 64-bit word for each index, independent of what else is drawn."""
    return mix(index_N.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))


def table(num_items: int, key: int) -> np.ndarray:
    """A random permutation of range(num_items): the order of random words, each with its index in the low bits."""
    index_N = np.arange(num_items, dtype=np.uint64)
    low = np.uint64((1 << max(1, (num_items - 1).bit_length())) - 1)
    # All words differ, so the result does not depend on the sorting algorithm.
    return (np.sort((draw(key, index_N) & ~low) | index_N) & low).astype(np.int64)


class Order:
    """Every epoch visits each of `num_items` once; epochs follow each other without a gap, and no state is kept."""

    def __init__(self, num_items: int, seed: int, shuffle: bool = True):
        assert num_items > 0, "an order needs items"
        self.num_items, self.seed, self.shuffle = num_items, seed, shuffle
        self._block, self._num_cached = (num_items, 2) if num_items <= TABLE_LIMIT else (BLOCK, 16)
        self._cache: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._images: Callable[[np.ndarray, int, int], np.ndarray] | None = None
        if num_items > TABLE_LIMIT:
            from seedbed.data.large_order import feistel

            self._images = feistel

    def at(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch and the item of the global samples start .. start + count - 1; read-only int64 arrays."""
        epoch, position = divmod(start, self.num_items)
        number, offset = divmod(position, self._block)
        epochs, items = self._cache.get((epoch, number)) or self._fill(epoch, number)
        if offset + count <= len(items):
            return epochs[offset : offset + count], items[offset : offset + count]
        return self._collect(start, count)

    def _collect(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """A batch that crosses blocks or epochs."""
        parts = []
        while count:
            position = start % self.num_items
            room = min(self._block - position % self._block, self.num_items - position, count)
            parts.append(self.at(start, room))
            start, count = start + room, count - room
        return np.concatenate([e for e, _ in parts]), np.concatenate([i for _, i in parts])

    def _fill(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        first = number * self._block
        size = min(self._block, self.num_items - first)
        if not self.shuffle:
            items = np.arange(first, first + size)
        elif self._images is None:
            items = table(self.num_items, key_of(self.seed, epoch))
        else:
            items = self._images(np.arange(first, first + size), self.num_items, key_of(self.seed, epoch))
        # One value with stride 0 stands for the whole epoch column.
        epochs = np.broadcast_to(np.int64(epoch), size)
        items.flags.writeable = False
        self._cache[epoch, number] = epochs, items
        while len(self._cache) > self._num_cached:
            self._cache.popitem(last=False)
        return epochs, items
