"""Schedules: pure functions from progress (0 to 1 of the run's items) to a multiplier of the base learning rate.

A new one is a function under `@shape` or `@curve`, here or in a file of your own; its name is a value of `schedule.kind`.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

from seedbed.config import Schedule

Curve = Callable[[float, float, Schedule], float]
F = TypeVar("F", bound=Curve)
# Name to the multiplier: a function of progress, the share of one step and schedule.
SCHEDULES: dict[str, Curve] = {}


def multiplier(schedule: Schedule, progress: float, step: int = 0) -> float:
    """The factor on every group's base learning rate. `progress` counts the step about to be taken, so the last step sees 1.

    `step` is its number, counted from 1; progress and number give the length of the run.
    """
    progress = min(max(progress, 0.0), 1.0)
    return SCHEDULES[schedule.kind](progress, progress / step if step else 0.0, schedule)


def curve(name: str) -> Callable[[F], F]:
    """Registers a schedule with a warm-up and an end of its own."""

    def register(function: F) -> F:
        SCHEDULES[name] = function
        return function

    return register


def shape(name: str) -> Callable[[F], F]:
    """Registers what follows a linear warm-up and ends at the floor: from 1 to 0 by the share done after the warm-up."""

    def register(function: F) -> F:
        SCHEDULES[name] = functools.partial(_after_warmup, function)
        return function

    return register


def _after_warmup(function: Curve, progress: float, share: float, schedule: Schedule) -> float:
    if progress < schedule.warmup:
        return progress / schedule.warmup
    after = (progress - schedule.warmup) / max(1.0 - schedule.warmup, 1e-12)
    return schedule.floor + (1.0 - schedule.floor) * function(after, progress, schedule)


@shape("constant")
def _constant(after: float, progress: float, schedule: Schedule) -> float:
    return 1.0


@shape("gpt3")
def _cosine(after: float, progress: float, schedule: Schedule) -> float:
    return _cosine_between(1.0, 0.0, after)


@shape("linear")
def _linear(after: float, progress: float, schedule: Schedule) -> float:
    return 1.0 - _cooldown(progress, schedule)


@shape("wsd")
def _wsd(after: float, progress: float, schedule: Schedule) -> float:
    return 1.0 - math.sqrt(_cooldown(progress, schedule))


@curve("one_cycle")
def _one_cycle(progress: float, share: float, schedule: Schedule) -> float:
    """torch's OneCycleLR: a cosine up from 1 / div for the share `warmup` of the run, then one down to 1 / (div x final_div)."""
    here, peak, last = progress - share, schedule.warmup - share, 1.0 - share
    first, end = 1.0 / schedule.div, 1.0 / (schedule.div * schedule.final_div)
    if here <= peak and peak > 0.0:
        return _cosine_between(first, 1.0, here / peak)
    return _cosine_between(1.0, end, (here - peak) / max(last - peak, 1e-12))


def _cosine_between(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))


def _cooldown(progress: float, schedule: Schedule) -> float:
    """Progress through the last `decay` of the run, 0 to 1."""
    return max(0.0, progress - (1.0 - schedule.decay)) / schedule.decay if schedule.decay else 0.0
