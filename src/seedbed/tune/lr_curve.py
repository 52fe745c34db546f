"""Scores over learning rates: the minimum, and the range of rates whose scores differ from it only by noise."""

import math
import statistics
from dataclasses import dataclass

GRID = 1  # the distance between rates, in powers of two
T_95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78)  # Student's, one-sided, by degrees of freedom


@dataclass(frozen=True)
class LrCurve:
    """Scores by power of two of the configured rate, one per repeat."""

    scores: dict[int, list[float]]
    bracketed: bool  # False when the lowest is at the edge of what may be tried
    limits: tuple[int, int] = (-6, 6)  # the powers that may be tried

    @property
    def mean(self) -> dict[int, float]:
        return {k: statistics.fmean(losses) for k, losses in self.scores.items()}

    @property
    def best(self) -> int:
        return min(self.mean, key=lambda k: self.mean[k])

    def deviation(self) -> tuple[float, int]:
        """The standard deviation of one trial, and its degrees of freedom; 0 with one repeat.

        The mean of each repeat is subtracted, and the residuals are pooled over the rates.
        """
        rows = [losses for losses in self.scores.values() if all(map(math.isfinite, losses))]
        num = len(next(iter(self.scores.values())))
        if num < 2 or not rows:
            return 0.0, 0
        shared = [statistics.fmean(row[r] for row in rows) if len(rows) > 1 else 0.0 for r in range(num)]
        left = [[x - s for x, s in zip(row, shared, strict=True)] for row in rows]
        degrees = max(len(rows) - 1, 1) * (num - 1)
        variance = sum((x - statistics.fmean(row)) ** 2 for row in left for x in row) / degrees
        return math.sqrt(variance), degrees

    def noise(self) -> float:
        """How far apart the means of two rates can be by chance, one time in twenty."""
        deviation, degrees = self.deviation()
        num = len(next(iter(self.scores.values())))
        return T_95[min(degrees, len(T_95)) - 1] * deviation * math.sqrt(2.0 / num) if degrees else 0.0

    def flat_range(self) -> tuple[float, float]:
        """The powers between which scores equal the minimum within noise; infinite where no end was seen."""
        bottom, noise = vertex(self.mean, self.best), self.noise()
        return (self._edge(bottom, noise, -1), self._edge(bottom, noise, 1))

    def open_ends(self) -> list[int]:
        """The next powers to try: where the flat range reaches the last one tried."""
        ends = zip(self.flat_range(), (min(self.scores) - GRID, max(self.scores) + GRID), strict=True)
        return [k for end, k in ends if math.isinf(end) and self.limits[0] <= k <= self.limits[1]]

    def _edge(self, bottom: float, noise: float, side: int) -> float:
        """Where the curve leaves the flat range on one side; the best rate always lies inside.

        Near the best it is a parabola, or a line where that is wider: next to a diverging rate a parabola is too steep.
        """
        mean, best = self.mean, self.best
        top, near = mean[best] + noise, best + side * GRID
        if mean.get(near, -math.inf) > top:
            if not noise:
                return bottom
            straight = side * (best - bottom) + noise / (mean[near] - mean[best])
            low, middle, high = _neighbours(mean, best)
            curvature = (low - 2.0 * middle + high) / 2.0 if {best - GRID, best + GRID} <= mean.keys() else 0.0
            curved = math.sqrt(noise / curvature) if 0 < curvature < math.inf else math.inf
            return bottom + side * min(max(straight, curved), abs(near - bottom))
        while near in mean:
            further = near + side * GRID
            if mean.get(further, -math.inf) > top:
                share = (top - mean[near]) / (mean[further] - mean[near]) if math.isfinite(mean[further]) else 1.0
                return near + side * GRID * share
            near = further
        return side * math.inf


def _neighbours(losses: dict[int, float], best: int) -> tuple[float, float, float]:
    """The best score and its neighbours; a diverged one is replaced by a finite bound."""
    low, middle, high = losses.get(best - GRID, math.inf), losses[best], losses.get(best + GRID, math.inf)
    known = [x for x in (low, high) if math.isfinite(x)]
    if not math.isfinite(middle) or not known:
        return low, middle, high
    limit = middle + 4.0 * max(max(known) - middle, abs(middle) * 1e-9)
    return min(low, limit), middle, min(high, limit)


def vertex(losses: dict[int, float], best: int) -> float:
    """The minimum of that parabola, as a power of two; at most half-way to either neighbour."""
    low, middle, high = _neighbours(losses, best)
    curvature = low - 2.0 * middle + high
    if not math.isfinite(curvature):
        return float(best)
    if curvature <= 0:
        return best + 0.5 * GRID * ((low > high) - (low < high))
    return best + GRID * min(max(0.5 * (low - high) / curvature, -0.5), 0.5)
