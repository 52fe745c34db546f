"""Alarms of optimisation steps that have no effect or diverge, from the measurements of a run."""

from typing import NamedTuple

from seedbed.track import events
from seedbed.train.watch import Alarm

# Limits of how far a step changes logits, of the share of predictions whose energy rises, of the entropy of predictions, and of
# the factor by which the step size may drift.
MAX_MOVE, MIN_MOVE, MAX_RISING, MIN_ENTROPY, MAX_DRIFT = 100.0, 0.01, 0.2, 0.01, 10.0

events.register(
    "warning",
    mcmc_large_step="a step changes predictions too much",
    mcmc_small_step="a step hardly changes predictions",
    mcmc_energy_rises="the energy of predictions rises",
    mcmc_low_entropy="predictions have almost no entropy",
    mcmc_alpha_drift="the step size has drifted",
)


class Limits(NamedTuple):
    """A measurement, its normal range, and the message when it leaves that range."""

    kind: str
    name: str
    low: float
    high: float
    what: str
    why: str
    fix: str


LIMITS = (
    Limits(
        *("mcmc_large_step", "move_rms", 0.0, MAX_MOVE),
        "a step changes logits by {value:.3g} (limit {limit:g})",
        "predictions overshoot any minimum, and gradients through such steps explode",
        "lower model.mcmc.alpha or optim.lr, or use model.head_init=calibrated",
    ),
    Limits(
        *("mcmc_small_step", "move_rms", MIN_MOVE, float("inf")),
        "a step changes logits by {value:.3g} only (limit {limit:g})",
        "predictions stay at their random initial values, and the loss cannot fall below that of a guess",
        "raise model.mcmc.alpha; with space=logit it must grow with the vocabulary",
    ),
    Limits(
        *("mcmc_energy_rises", "gap_negative", 0.0, MAX_RISING),
        "{value:.0%} of the predictions end at no lower energy than they began (limit {limit:.0%})",
        "the energy does not rank predictions: more steps and more samples cannot help",
        "lower model.mcmc.alpha, or train longer before using more steps",
    ),
    Limits(
        *("mcmc_low_entropy", "entropy", MIN_ENTROPY, float("inf")),
        "predictions have an entropy of {value:.3g} nats (limit {limit:g})",
        "all probability is on single tokens, where the gradient of a softmax is 0",
        "lower model.mcmc.alpha or optim.lr",
    ),
)


def optimization_alarms(measured: dict[str, float], first_alpha: float) -> list[Alarm]:
    """The alarms of the measurements of one logged step."""
    drift = Limits(
        *("mcmc_alpha_drift", "alpha", first_alpha / MAX_DRIFT, first_alpha * MAX_DRIFT),
        "alpha has reached {value:.3g} (limit {limit:.3g})",
        "the step size drifts away from the one that the rest of the model was tuned for",
        "set model.mcmc.alpha nearer to it, or fix it with model.mcmc.learn_alpha=false",
    )
    found = []
    for one in (*LIMITS, drift):
        value = measured.get(one.name, one.low)
        if not value < one.low and not value > one.high:  # nan raises no alarm
            continue
        what = one.what.format(value=value, limit=one.high if value > one.high else one.low)
        found.append(Alarm(one.kind, what, f"{one.name} in the rows", one.why, one.fix, {one.name: value}))
    return found
