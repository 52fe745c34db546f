"""How much each setting of a sweep matters: the share of the variance of the results that it explains alone, with an error."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from seedbed.track.text import format_value
from seedbed.tune.sweep.folder import TrialStatus

_NUM_GROUPS = 20  # that the jackknife leaves out in turn


def of_axes(statuses: Sequence[TrialStatus]) -> list[dict[str, Any]]:
    """Key, share and standard error of every setting that varies, largest first; empty with too few results."""
    ended = [s for s in statuses if s.state in ("done", "stopped early") and s.best is not None and math.isfinite(s.best)]
    keys = dict.fromkeys(key for s in ended for key in s.trial.settings if key != "seed")
    levels = {key: _levels([s.trial.settings.get(key) for s in ended]) for key in keys}
    levels = {key: found for key, found in levels.items() if found.any()}
    values = np.array([s.best for s in ended])
    if not levels or len(ended) <= 1 + sum(int(found.max()) for found in levels.values()):
        return []
    numbers = explained(values, list(levels.values())), jackknife(values, list(levels.values()))
    found = [
        {"key": key, "share": float(share), "error": float(error)} for key, share, error in zip(levels, *numbers, strict=True)
    ]
    return sorted(found, key=lambda one: -one["share"])


def explained(values: np.ndarray, levels: Sequence[np.ndarray]) -> np.ndarray:
    """Each factor's share of the variance (epsilon squared, sums of squares of type III: what the fit loses without it)."""
    columns = [np.eye(found.max() + 1)[found][:, 1:] for found in levels]
    full, rank = _residual(values, columns)
    noise = full / max(len(values) - rank, 1)
    # Equal values differ by rounding only, which nothing explains.
    total, out = _residual(values, [])[0] + len(values) * (1e-12 * np.abs(values).max()) ** 2 or 1.0, []
    for left_out in range(len(columns)):
        rest, smaller = _residual(values, columns[:left_out] + columns[left_out + 1 :])
        out.append((rest - full - (rank - smaller) * noise) / total)
    return np.clip(out, 0.0, 1.0)


def jackknife(values: np.ndarray, levels: Sequence[np.ndarray]) -> np.ndarray:
    """The standard error of each share, by leaving out groups of trials."""
    num = min(_NUM_GROUPS, len(values))
    group = np.random.default_rng(0).permutation(len(values)) % num
    found = np.array([explained(values[group != g], [one[group != g] for one in levels]) for g in range(num)])
    return np.sqrt((num - 1) / num * ((found - found.mean(0)) ** 2).sum(0))


def _residual(values: np.ndarray, columns: Sequence[np.ndarray]) -> tuple[float, int]:
    """The squared error of the best fit by these columns and a constant, and how many of them count."""
    design = np.column_stack([np.ones(len(values)), *columns])
    fit, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    return float(((values - design @ fit) ** 2).sum()), int(rank)


def _levels(values: Sequence[Any]) -> np.ndarray:
    """The values as whole numbers from 0; numbers that hardly repeat, as suggested ones, by their quartile."""
    names = [format_value(value) for value in values]
    if len(set(names)) > max(8, len(names) // 2) and all(isinstance(value, int | float) for value in values):
        numbers = np.array(values, float)
        return np.searchsorted(np.quantile(numbers, (0.25, 0.5, 0.75)), numbers, side="right")
    return np.unique(names, return_inverse=True)[1]
