"""Where to look next: past trials are told to a suggester, which names the settings of the next one.

Nothing but the trial files is kept: the suggester is built anew from them each time, so any number of workers may ask.
"""

import random
from collections.abc import Sequence
from typing import Any

from seedbed.errors import UserError
from seedbed.tune.sweep.folder import Standing, Sweep, Trial
from seedbed.tune.sweep.grid import Grid

SAMPLERS = ("optuna", "random")
_MAX_REPEATS = 50

Point = dict[str, Any]


def require(sampler: str) -> None:
    """Whether the suggester is installed, before anything is written."""
    if sampler == "optuna":
        try:
            import optuna  # noqa: F401
        except ImportError:
            raise UserError(
                "--sampler optuna needs a package: pip install 'seedbed[search]' (or choose --sampler random)"
            ) from None


def add(sweep: Sweep, num: int, count: int = 1) -> list[Trial]:
    """Write down up to `count` further points, `num` in all, each once per seed; none when there are enough or no new ones."""
    seeds = next((axis.values for axis in sweep.grid.axes if axis.key == "seed"), None)
    with sweep.editing():
        past = points(sweep.standings())
        added: list[Trial] = []
        for _ in range(min(count, num - len(past))):
            point = _new_point(sweep, past)
            if point is None:
                break
            past.append((point, None))
            added += [sweep.add({**point, "seed": seed}) for seed in seeds] if seeds else [sweep.add(point)]
    return added


def points(standings: Sequence[Standing]) -> list[tuple[Point, float | None]]:
    """Each point that was tried with its mean over the seeds; None while it is under way, infinity where a seed was spoiled."""
    found: dict[tuple[Any, ...], list[Standing]] = {}
    for standing in standings:
        point = {k: v for k, v in standing.trial.settings.items() if k != "seed"}
        found.setdefault(tuple(point.items()), []).append(standing)
    return [(dict(key), _value(seeds)) for key, seeds in found.items()]


def _value(seeds: Sequence[Standing]) -> float | None:
    if any(s.state in ("failed", "nan", "diverged") for s in seeds):
        return float("inf")
    values = [s.best for s in seeds if s.state in ("done", "stopped early") and s.best is not None]
    return sum(values) / len(values) if len(values) == len(seeds) else None


def _new_point(sweep: Sweep, past: Sequence[tuple[Point, float | None]]) -> Point | None:
    """A point that was not tried before; None when that many attempts give only old ones."""
    ask = {"optuna": _by_optuna, "random": _at_random}[sweep.facts["sampler"]]
    known = [point for point, _ in past]
    for attempt in range(_MAX_REPEATS):
        point = ask(sweep.grid, past, 1000 * len(past) + attempt)
        if point not in known:
            return point
    return None


def _at_random(grid: Grid, past: Sequence[tuple[Point, float | None]], seed: int) -> Point:
    dice = random.Random(seed)
    point: Point = {axis.key: dice.choice(axis.values) for axis in grid.axes if axis.key != "seed"}
    for span in grid.spans:
        if span.step:
            point[span.key] = dice.randrange(int(span.low), int(span.high) + 1, span.step)
        elif span.log:
            point[span.key] = span.value(span.low * (span.high / span.low) ** dice.random())
        else:
            point[span.key] = span.value(dice.uniform(span.low, span.high))
    return point


def _by_optuna(grid: Grid, past: Sequence[tuple[Point, float | None]], seed: int) -> Point:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # A choice is told by its place in the list: Optuna takes no tuples.
    choices = {axis.key: axis.values for axis in grid.axes if axis.key != "seed"}
    ranges: dict[str, BaseDistribution] = {key: CategoricalDistribution(range(len(v))) for key, v in choices.items()}
    for span in grid.spans:
        whole = span.step and IntDistribution(int(span.low), int(span.high), step=span.step)
        ranges[span.key] = whole or FloatDistribution(span.low, span.high, log=span.log)
    # Points under way count as bad ones, so that workers do not all look in the same place.
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    worst = max((v for _, v in past if v is not None and v < float("inf")), default=0.0)
    for point, value in past:
        params = {k: choices[k].index(v) if k in choices else v for k, v in point.items()}
        state = TrialState.RUNNING if value is None else TrialState.COMPLETE
        told = None if value is None else min(value, worst)
        study.add_trial(create_trial(state=state, params=params, distributions=ranges, value=told))
    asked = study.ask(ranges).params
    return {k: choices[k][v] if k in choices else _rounded(grid, k, v) for k, v in asked.items()}


def _rounded(grid: Grid, key: str, value: float) -> Any:
    (span,) = (span for span in grid.spans if span.key == key)
    return min(max(span.value(value), span.low), span.high) if not span.step else int(value)
