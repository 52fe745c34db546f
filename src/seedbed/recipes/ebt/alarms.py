"""Signs that a walk has come to nothing, or out of hand, read from the rows of a run."""

from __future__ import annotations

from typing import NamedTuple

from seedbed.train.watch import Alarm

# How far a step may move logits, how many walks may end higher than they began, how sure a candidate may be, and how far
# the step size may drift.
FARTHEST, SHORTEST, UPHILL, SUREST, DRIFT = 100.0, 0.01, 0.2, 0.01, 10.0


class Sign(NamedTuple):
    """A measurement, the range in which all is well, and what it means to leave it."""

    kind: str
    name: str
    low: float
    high: float
    what: str
    why: str
    fix: str


SIGNS = (
    Sign(
        *("walk_far", "move_rms", 0.0, FARTHEST),
        "a step moves logits by {value:.3g} (limit {limit:g})",
        "candidates jump past any minimum, and gradients through such steps explode",
        "lower model.walk.alpha or optim.lr, or use model.head_init=calibrated",
    ),
    Sign(
        *("walk_short", "move_rms", SHORTEST, float("inf")),
        "a step moves logits by {value:.3g} only (limit {limit:g})",
        "candidates stay where chance put them, and the loss cannot fall below that of a guess",
        "raise model.walk.alpha; with space=logit it must grow with the vocabulary",
    ),
    Sign(
        *("walk_uphill", "gap_negative", 0.0, UPHILL),
        "{value:.0%} of the walks end no lower than they began (limit {limit:.0%})",
        "the energy says nothing about how good a candidate is: more steps and more starts cannot help",
        "lower model.walk.alpha, or train longer before asking for more thought",
    ),
    Sign(
        *("walk_sure", "entropy", SUREST, float("inf")),
        "candidates have an entropy of {value:.3g} nats (limit {limit:g})",
        "all probability lies on single tokens, where the slope of a softmax is 0",
        "lower model.walk.alpha or optim.lr",
    ),
)


def walk_alarms(measured: dict[str, float], first_alpha: float) -> list[Alarm]:
    """What the measurements of a log point warn of."""
    drift = Sign(
        *("walk_alpha", "alpha", first_alpha / DRIFT, first_alpha * DRIFT),
        "alpha has come to {value:.3g} (limit {limit:.3g})",
        "the step size runs away from what the rest of the model was tuned for",
        "start nearer to it with model.walk.alpha, or fix it with model.walk.learn_alpha=false",
    )
    found = [_look(sign, measured[sign.name]) for sign in (*SIGNS, drift) if sign.name in measured]
    return [alarm for alarm in found if alarm]


def _look(sign: Sign, value: float) -> Alarm | None:
    limit = sign.high if value > sign.high else sign.low if value < sign.low else None
    if limit is None:
        return None
    what = sign.what.format(value=value, limit=limit)
    return Alarm(sign.kind, what, f"{sign.name} in the rows", sign.why, sign.fix, {sign.name: value})
