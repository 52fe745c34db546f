"""L: the loss itself: a mean over targets, best for perfect answers, blind to what is masked, and what is really descended."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seedbed.checks.case import ROWS, Case, num_rows, spread, take_rows
from seedbed.checks.registry import Result, check, failed, passed, skipped
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, System

# Relative difference of losses that should be equal. Measured: 1e-16, and 2e-7 where the loss is rounded to float32.
SAME = 1e-5
# For noisy losses without a probe: how much doubling a batch may change the mean over many throws. Measured: 0.14.
DOUBLED, THROWS = 0.25, 48


@check("L0", "probe", "err", humbatova=(9,), needs=("objective", "predict"))
def agreement(case: Case) -> Result:
    """The loss that the probe describes is the loss that training descends."""
    probe, system = case.probe, case.shaken()
    assert probe is not None
    if not is_deterministic(case, system):
        return skipped("the loss draws its own noise; see L1")
    with torch.no_grad():
        told = float(probe.objective(probe.predict(probe.batch), probe.batch))
        real = float(case.loss_of(system, case.shaken_batch()))
    off = abs(told - real) / max(abs(real), 1e-12)
    if not off <= SAME:
        return failed(
            f"training descends {real:.6g}, prediction and objective of the probe give {told:.6g}",
            where=case.objective_place(),
            why="what the checks test is not what is trained, or the loss is not the objective of the prediction",
            fix="let loss() and probe() share the code from inputs to loss",
            value=off,
            limit=SAME,
        )
    return passed("trained and described loss agree", off, SAME)


@check("L1", "split", "err", humbatova=(9,))
def split(case: Case) -> Result:
    """The loss of a batch is the target-weighted mean of its rows' losses; a batch taken twice costs the same."""
    system, batch = case.shaken(), case.shaken_batch()
    with torch.no_grad():
        if not is_deterministic(case, system):
            return _noisy_split(case, system)
        whole, twice = (float(case.loss_of(system, b)) for b in (batch, _twice(batch)))
        weights = [float(system.num_targets(take_rows(batch, slice(i, i + 1)))) for i in range(ROWS)]
        parts = [float(case.loss_of(system, take_rows(batch, slice(i, i + 1)))) for i in range(ROWS)]
    if not all(map(math.isfinite, parts)):
        row = next(i for i, p in enumerate(parts) if not math.isfinite(p))
        what = f"a part of one row with {weights[row]:g} targets costs {parts[row]}"
        fix = "divide by max(1, number of targets), so that a part without targets costs nothing"
        why = "one such part of a step spoils every weight"
        return failed(what, where=case.objective_place(), why=why, fix=fix)
    mean = sum(w * p for w, p in zip(weights, parts, strict=True) if w) / max(sum(weights), 1e-12)
    for what, value in ((f"twice the batch gives {twice / whole:.4g} times the loss", twice),
                        (f"the loss is {whole:.6g}, the mean over its rows {mean:.6g}", mean)):  # fmt: skip
        off = abs(value - whole) / max(abs(whole), 1e-12)
        if not off <= SAME:
            return _wrong_reduction(case, what, off, SAME)
    return passed("whole, doubled and row by row", abs(mean - whole) / max(abs(whole), 1e-12), SAME)


def _noisy_split(case: Case, system: System) -> Result:
    """Noise of its own cannot be split; the mean over many throws must still not depend on the batch size."""
    batch = case.shaken_batch()
    many: dict[int, list[float]] = {1: [], 2: []}
    for dice in range(THROWS):
        many[1].append(float(case.loss_of(system, batch, dice)))
        many[2].append(float(case.loss_of(system, _twice(batch), dice)))
    one, two = (torch.tensor(v).double() for v in many.values())
    off = abs(float(two.mean() / one.mean()) - 1)
    error = 6 * float((one.std() / one.mean()).square() + (two.std() / two.mean()).square()) ** 0.5 / math.sqrt(THROWS)
    if not off <= max(DOUBLED, error):
        what = f"twice the batch gives {float(two.mean() / one.mean()):.3g} times the loss, in the mean of {THROWS} throws"
        return _wrong_reduction(case, what, off, DOUBLED)
    return passed(f"doubled, in the mean of {THROWS} throws", off, max(DOUBLED, error))


def _wrong_reduction(case: Case, what: str, off: float, limit: float) -> Result:
    return failed(
        what,
        where=case.objective_place(),
        why="the learning rate would depend on the batch size, and parts of a step would not add up to it",
        fix="take the mean over all targets of the batch, and let num_targets() count them",
        value=off,
        limit=limit,
    )


@check("L2", "oracle", "err", humbatova=(9, 14), needs=("oracle", "objective"))
def oracle(case: Case) -> Result:
    """A perfect prediction reaches the bound, and noise on it costs."""
    probe = case.probe
    assert probe is not None and probe.oracle is not None
    with torch.no_grad():
        perfect = probe.oracle(probe.batch)
        best = float(probe.objective(perfect, probe.batch))
        reach = float(perfect.max() - perfect.min())
        worse = [float(probe.objective(perfect + reach * torch.randn_like(perfect), probe.batch)) for _ in range(5)]
    where = case.objective_place()
    if not all(w > best for w in worse):
        return failed(
            f"a perfect answer costs {best:.4g}, with noise on it only {min(worse):.4g}",
            where=where,
            why="descending this loss leads away from the answer",
            fix="remove the minus, or check which of prediction and target comes first",
        )
    bound = probe.lower_bound
    slack = 1e-3 * max(abs(sum(worse) / 5), 1e-3)
    if bound is not None and abs(best - bound) > slack:
        return failed(
            f"a perfect answer costs {best:.4g}, the smallest loss there can be is {bound:.4g}",
            where=where,
            why="the loss is not that of its prediction: probabilities taken for logits, a wrong axis or a wrong target",
            fix="hand raw logits to cross-entropy, and compare along the axis of classes",
            value=abs(best - bound),
            limit=slack,
        )
    return passed(f"a perfect answer costs {best:.3g}, noise on it {min(worse):.3g} and more")


@check("L3", "mask", "err", humbatova=(9,), needs=("mask", "targets", "objective", "predict"))
def mask(case: Case) -> Result:
    """Masked targets do not count, kept ones do, and a batch without any target costs nothing and stays finite."""
    probe, system = case.probe, case.shaken()
    assert probe is not None
    where = case.objective_place()
    kept = probe.batch[probe.mask] != 0
    with torch.no_grad():
        masked, counted = _move_targets(probe, ~kept), _move_targets(probe, kept)
        nothing = take_rows(case.shaken_batch(), slice(None))
        nothing[probe.mask] = torch.zeros_like(nothing[probe.mask])
        empty = float(case.loss_of(system, nothing))
        count = float(system.num_targets(case.shaken_batch()))
    if masked > SAME:
        why = "the model is trained on padding"
        return failed(
            "masked targets change the loss", where=where, why=why, fix="multiply by the mask before the sum", value=masked
        )
    if kept.any() and counted < SAME:
        why = "the model is not trained on them"
        return failed("targets that count do not change the loss", where=where, why=why, fix="check the mask's sign and shape")
    if not math.isfinite(empty) or empty != 0.0:
        what = f"a batch of masked targets only costs {empty:.4g}"
        return failed(what, where=where, why="one such part spoils a whole step", fix="divide by max(1, number of targets)")
    if count != float(kept.sum()):
        what = f"num_targets says {count:g}, the mask keeps {int(kept.sum())}"
        return failed(what, where=where, why="parts of a step are weighted wrongly", fix="count the mask in num_targets()")
    return passed(f"{int(kept.sum())} of {kept.numel()} targets count, and only they")


def _move_targets(probe: Probe, which: Tensor) -> float:
    """How much the loss moves when some targets do."""
    base = probe.objective(probe.predict(probe.batch), probe.batch)
    target = probe.batch[probe.targets]
    moved = torch.where(which.reshape(which.shape + (1,) * (target.ndim - which.ndim)), target + 1, target)
    changed = {**probe.batch, probe.targets: moved}
    return abs(float(probe.objective(probe.predict(probe.batch), changed) - base)) / max(abs(float(base)), 1e-12)


@check("L5", "floors", "note", humbatova=(9,), needs=("baselines", "at_init"))
def floors(case: Case) -> Result:
    """What trivial predictors reach: the numbers to beat."""
    probe = case.birth_probe(size=64)
    assert probe is not None and probe.baselines is not None and probe.at_init is not None
    found = probe.baselines(probe.batch)
    guess = probe.at_init(probe.batch)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    useless = [name for name, value in found.items() if value >= guess * (1 + SAME)]
    if useless:
        what = f"{useless[0]} costs {found[useless[0]]:.3f}, a blind guess {guess:.3f}"
        why = "a baseline worse than guessing says that targets are noise or counted wrongly"
        return failed(what, where=case.objective_place(), why=why, fix="look at the targets: seedbed check --only D4")
    return passed(f"to beat: {shown}; a blind guess costs {guess:.3f}")


@check("L6", "label", "err", humbatova=(9, 10), needs=("corrupt",))
def label(case: Case) -> Result:
    """The level that the network is told is the level of the mixture that it sees."""
    probe = case.probe
    assert probe is not None and probe.corrupt is not None
    clean, noise, level, mixture = probe.corrupt(probe.batch)
    way = (clean - noise).flatten(1)
    real = ((mixture - noise).flatten(1) * way).sum(1) / way.square().sum(1)
    rest = (mixture - noise).flatten(1) - real[:, None] * way
    off = max(float((real - level.flatten()).abs().max()), float(rest.abs().max()) / spread(mixture))
    limit = 1e-6
    if off > limit:
        return failed(
            f"the network is told {float(level.flatten()[0]):.4f} where the mixture has {float(real[0]):.4f}",
            where=case.objective_place(),
            why="the network learns to undo another corruption than the one it meets when sampling",
            fix="use one and the same level for the mixture and the condition, drawn in float32",
            value=off,
            limit=limit,
        )
    return passed("told and real level", off, limit)


def is_deterministic(case: Case, system: System) -> bool:
    """Whether the loss is the same whatever the dice, in evaluation mode."""
    with torch.no_grad():
        return torch.equal(case.loss_of(system, case.shaken_batch(), 0), case.loss_of(system, case.shaken_batch(), 1))


def _twice(batch: Batch) -> Batch:
    count = num_rows(batch)
    return {k: torch.cat([v, v]) if v.ndim and len(v) == count else v for k, v in batch.items()}
