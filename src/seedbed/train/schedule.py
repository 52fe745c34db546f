"""Schedules: pure functions from progress (0 to 1 of the run's items) to a multiplier of the base learning rate."""

import math

from seedbed.config import Schedule


def multiplier(schedule: Schedule, progress: float) -> float:
    """The factor on every group's base rate. `progress` counts the step about to be taken, so the last step sees 1."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < schedule.warmup:
        return progress / schedule.warmup
    after = (progress - schedule.warmup) / max(1.0 - schedule.warmup, 1e-12)
    return schedule.floor + (1.0 - schedule.floor) * _SHAPES[schedule.kind](after, progress, schedule)


def _constant(after: float, progress: float, schedule: Schedule) -> float:
    return 1.0


def _cosine(after: float, progress: float, schedule: Schedule) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * after))


def _cooldown(progress: float, schedule: Schedule) -> float:
    """How far into the last `decay` of the run we are, 0 to 1."""
    return max(0.0, progress - (1.0 - schedule.decay)) / schedule.decay if schedule.decay else 0.0


def _linear(after: float, progress: float, schedule: Schedule) -> float:
    return 1.0 - _cooldown(progress, schedule)


def _wsd(after: float, progress: float, schedule: Schedule) -> float:
    return 1.0 - math.sqrt(_cooldown(progress, schedule))


# `gpt3` and `one_cycle` share the cosine; they differ in their defaults for warm-up and floor, which presets state.
_SHAPES = {"constant": _constant, "gpt3": _cosine, "one_cycle": _cosine, "wsd": _wsd, "linear": _linear}
