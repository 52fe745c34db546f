"""Suggests the settings of the next trial from past ones, at random or by optuna.

Only the trial files are stored: the suggester is rebuilt from them each time, so any number of workers may use it.
"""

import importlib.util
import random
from collections.abc import Sequence
from typing import Any

from seedbed.errors import UserError
from seedbed.tune.sweep.folder import DIVERGED, Sweep, Trial, TrialStatus
from seedbed.tune.sweep.grid import Grid
from seedbed.tune.sweep.report import cells_of

SAMPLERS = ("optuna", "random")
_MAX_REPEATS = 50

Point = dict[str, Any]


def require(sampler: str) -> None:
    """Fails early when the suggester is not installed."""
    if sampler == "optuna" and importlib.util.find_spec("optuna") is None:
        raise UserError("--sampler optuna needs a package: pip install 'seedbed[search]' (or choose --sampler random)")


def add(sweep: Sweep, num: int, count: int = 1) -> list[Trial]:
    """Adds up to `count` further points, `num` in all, each once per seed; none when there are enough or no new ones."""
    seeds = next((axis.values for axis in sweep.grid.axes if axis.key == "seed"), None)
    with sweep.locked():
        past = points(sweep.statuses())
        added: list[Trial] = []
        for _ in range(min(count, num - len(past))):
            point = _new_point(sweep, past)
            if point is None:
                break
            past.append((point, None))
            added += [sweep.add({**point, "seed": seed}) for seed in seeds] if seeds else [sweep.add(point)]
    return added


def points(statuses: Sequence[TrialStatus]) -> list[tuple[Point, float | None]]:
    """Each point with its mean over the seeds, less is better; None while it is running, infinity where a seed diverged."""
    found: list[tuple[Point, float | None]] = []
    for cell in cells_of(statuses):
        failed = any(s.state in ("failed", *DIVERGED) for s in cell.seeds)
        mean = cell.seeds[0].sign * cell.mean if cell.mean is not None and len(cell.values) == len(cell.seeds) else None
        found.append((cell.settings, float("inf") if failed else mean))
    return found


def _new_point(sweep: Sweep, past: Sequence[tuple[Point, float | None]]) -> Point | None:
    """A point that was not tried before; None when many attempts give none."""
    sampler = {"optuna": _by_optuna, "random": _at_random}[sweep.facts["sampler"]]
    known = [point for point, _ in past]
    for attempt in range(_MAX_REPEATS):
        point = sampler(sweep.grid, past, 1000 * len(past) + attempt)
        if point not in known:
            return point
    return None


def _at_random(grid: Grid, past: Sequence[tuple[Point, float | None]], seed: int) -> Point:
    rng = random.Random(seed)
    point: Point = {axis.key: rng.choice(axis.values) for axis in grid.axes if axis.key != "seed"}
    for span in grid.spans:
        if span.step:
            point[span.key] = rng.randrange(int(span.low), int(span.high) + 1, span.step)
        elif span.log:
            point[span.key] = span.value(span.low * (span.high / span.low) ** rng.random())
        else:
            point[span.key] = span.value(rng.uniform(span.low, span.high))
    return point


def _by_optuna(grid: Grid, past: Sequence[tuple[Point, float | None]], seed: int) -> Point:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # A choice is passed as its index: Optuna takes no tuples.
    choices = {axis.key: axis.values for axis in grid.axes if axis.key != "seed"}
    ranges: dict[str, BaseDistribution] = {key: CategoricalDistribution(range(len(v))) for key, v in choices.items()}
    for span in grid.spans:
        whole = span.step and IntDistribution(int(span.low), int(span.high), step=span.step)
        ranges[span.key] = whole or FloatDistribution(span.low, span.high, log=span.log)
    # Running points count as bad, so that workers do not all suggest the same region.
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True))
    worst = max((v for _, v in past if v is not None and v < float("inf")), default=0.0)
    for point, value in past:
        params = {k: choices[k].index(v) if k in choices else v for k, v in point.items()}
        state = TrialState.RUNNING if value is None else TrialState.COMPLETE
        score = None if value is None else min(value, worst)
        study.add_trial(create_trial(state=state, params=params, distributions=ranges, value=score))
    point = study.ask(ranges).params
    point |= {key: values[point[key]] for key, values in choices.items()}
    rounded = {span.key: (span, span.value(point[span.key])) for span in grid.spans}
    return point | {key: value if span.step else min(max(value, span.low), span.high) for key, (span, value) in rounded.items()}
