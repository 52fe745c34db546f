"""A source for benchmarks and tests of the feed: all windows of consecutive rows."""

from collections.abc import Mapping

import numpy as np

from seedbed.data.feed import Source
from seedbed.errors import UserError


class WindowSource(Source):
    """Every window of consecutive rows within one episode. `episodes` holds the first row of each, ascending."""

    def __init__(self, arrays: Mapping[str, np.ndarray], spans: Mapping[str, int], episodes: np.ndarray | None = None):
        self.arrays, self.spans = arrays, spans
        (num_rows,) = {len(a) for a in arrays.values()}
        first_E = np.array([0]) if episodes is None else np.asarray(episodes, dtype=np.int64)
        window = max(1, *spans.values())
        lengths_E = np.diff(np.append(first_E, num_rows))
        assert first_E[0] == 0 and (lengths_E > 0).all(), "episodes start at row 0 and are not empty"
        counts_E = np.maximum(lengths_E - window + 1, 0)
        self.num_items = int(counts_E.sum())
        if not self.num_items:
            raise UserError(f"no episode holds {window} rows in a row; the longest has {int(lengths_E.max())}")
        self._ends_E = np.cumsum(counts_E)
        # Row minus item number is constant within an episode.
        self._shift_E = first_E - (self._ends_E - counts_E)

    def locate(self, epoch_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        return index_B + self._shift_E[np.searchsorted(self._ends_E, index_B, side="right")]
