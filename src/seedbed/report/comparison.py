"""A run against its parent: the difference of their best evaluations or last losses, and whether it exceeds the noise."""

import math
from collections.abc import Iterable
from typing import Any

from seedbed.report import facts
from seedbed.track.run import Run
from seedbed.track.text import number


def compare(mine: tuple[list[Any], list[Any]], parent: Run) -> tuple[str, str]:
    """A title in a few words, and the numbers behind it; `mine` are rows and events. Lower is better."""
    theirs = parent.rows(), parent.events()
    (metric, points), (parent_metric, parent_points) = facts.evaluations(mine[1]), facts.evaluations(theirs[1])
    last, parent_last = facts.last_losses(mine[0]), facts.last_losses(theirs[0])
    (mean, sd), (parent_mean, parent_sd) = facts.mean_and_sd(last), facts.mean_and_sd(parent_last)
    if points and parent_points and metric == parent_metric:
        what = f"evaluation {metric}"
        change = min(v for _, v in points) - min(v for _, v in parent_points)
    else:
        what, change = "loss", mean - parent_mean
    if not math.isfinite(change):
        return "done", f"{parent.name} left no numbers to compare with"
    band = noise_band((sd, parent_sd))
    size = f"{what} {number(abs(change))} {'lower' if change < 0 else 'higher'} than {parent.name}"
    if not math.isfinite(band):
        return f"done, {'below' if change < 0 else 'above'} {parent.name}", f"{size}; too few rows for a noise band"
    if abs(change) <= band:
        return f"no clear difference from {parent.name}", f"{size}: within the noise band of ±{number(band)}"
    title = f"better than {parent.name}" if change < 0 else f"negative result: worse than {parent.name}"
    return title, f"{size}: outside the noise band of ±{number(band)}"


def noise_band(deviations: Iterable[float]) -> float:
    """The larger standard deviation: smaller differences are noise; NaN when none is known."""
    return max((sd for sd in deviations if math.isfinite(sd)), default=math.nan)
