"""Checks L: the loss is a mean over targets, minimal for perfect predictions, and respects masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.subject import ROWS, Subject, num_rows, repeat_rows, spread, take_rows
from seedbed.report.findings import Finding
from seedbed.train import capabilities
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, System

# Relative difference of losses that should be equal. Measured: 1e-16, and 2e-7 where the loss is rounded to float32.
SAME = 1e-5
# For noisy losses without a probe: how much doubling a batch may change the mean over many draws. Measured: 0.14.
DOUBLED, NUM_DRAWS = 0.25, 48


@check("L0", "probe loss", "err", humbatova=(9,), needs=("objective", "predict"))
def probe_loss(subject: Subject) -> Finding:
    """The probe's objective equals the training loss."""
    probe, system = subject.probe, subject.perturbed()
    assert probe is not None
    if not is_deterministic(subject, system):
        return skipped("the loss draws its own noise; see L1")
    with torch.no_grad():
        declared = float(probe.objective(probe.predict(probe.batch), probe.batch))
        real = float(subject.loss_of(system, subject.perturbed_batch()))
    off = abs(declared - real) / max(abs(real), 1e-12)
    if not off <= SAME:
        what = f"the training loss is {real:.6g}, the probe's objective {declared:.6g}"
        why = "what the checks test is not what is trained, or the loss is not the objective of the prediction"
        fix = "let loss() and probe() share the code from inputs to loss"
        return failed(what, where=subject.objective_line(), why=why, fix=fix, value=off, limit=SAME)
    return passed("trained and described loss agree", off, SAME)


@check("L1", "loss reduction", "err", humbatova=(9,))
def loss_reduction(subject: Subject) -> Finding:
    """The loss of a batch is the target-weighted mean of its rows' losses; a duplicated batch has the same loss."""
    system, batch = subject.perturbed(), subject.perturbed_batch()
    with torch.no_grad():
        if not is_deterministic(subject, system):
            return _noisy_split(subject, system)
        # Where a term uses every n-th row only, each row occurs n times, so that every one is used.
        wide = repeat_rows(batch, capabilities.row_stride(system))
        whole, twice = (float(subject.loss_of(system, b)) for b in (wide, _twice(wide)))
        weights = [float(system.num_targets(take_rows(batch, slice(i, i + 1)))) for i in range(ROWS)]
        parts = [float(subject.loss_of(system, take_rows(batch, slice(i, i + 1)))) for i in range(ROWS)]
    if not all(map(math.isfinite, parts)):
        row = next(i for i, p in enumerate(parts) if not math.isfinite(p))
        what = f"a part of one row with {weights[row]:g} targets costs {parts[row]}"
        fix = "divide by max(1, number of targets), so that a part without targets costs nothing"
        why = "one such part of a step makes every weight NaN"
        return failed(what, where=subject.objective_line(), why=why, fix=fix)
    mean = sum(w * p for w, p in zip(weights, parts, strict=True) if w) / max(sum(weights), 1e-12)
    for what, value in ((f"twice the batch gives {twice / whole:.4g} times the loss", twice),
                        (f"the loss is {whole:.6g}, the mean over its rows {mean:.6g}", mean)):  # fmt: skip
        off = abs(value - whole) / max(abs(whole), 1e-12)
        if not off <= SAME:
            return _wrong_reduction(subject, what, off, SAME, is_sum=math.isclose(twice, 2 * whole, rel_tol=1e-3))
    return passed("full, doubled and row by row", abs(mean - whole) / max(abs(whole), 1e-12), SAME)


def _noisy_split(subject: Subject, system: System) -> Finding:
    """A noisy loss cannot be split; its mean over many draws must not depend on the batch size."""
    batch = subject.perturbed_batch()
    many: dict[int, list[float]] = {1: [], 2: []}
    for seed in range(NUM_DRAWS):
        many[1].append(float(subject.loss_of(system, batch, seed)))
        many[2].append(float(subject.loss_of(system, _twice(batch), seed)))
    one, two = (torch.tensor(v).double() for v in many.values())
    off = abs(float(two.mean() / one.mean()) - 1)
    error = 6 * float((one.std() / one.mean()).square() + (two.std() / two.mean()).square()) ** 0.5 / math.sqrt(NUM_DRAWS)
    if not off <= max(DOUBLED, error):
        what = f"twice the batch gives {float(two.mean() / one.mean()):.3g} times the loss, in the mean of {NUM_DRAWS} draws"
        return _wrong_reduction(subject, what, off, DOUBLED)
    return passed(f"doubled, in the mean of {NUM_DRAWS} draws", off, max(DOUBLED, error))


def _wrong_reduction(subject: Subject, what: str, off: float, limit: float, is_sum: bool = True) -> Finding:
    why = "the learning rate would depend on the batch size, and parts of a step would not add up to it"
    fix = "take the mean over all targets of the batch, and let num_targets() count them"
    severity = "" if is_sum else subject.unsure
    return failed(what, where=subject.objective_line(), why=why, fix=fix, value=off, limit=limit, severity=severity)


@check("L2", "oracle loss", "err", humbatova=(9, 14), needs=("oracle", "objective"))
def oracle_loss(subject: Subject) -> Finding:
    """A perfect prediction reaches the lower bound, and noise raises the loss."""
    probe = subject.probe
    assert probe is not None and probe.oracle is not None
    with torch.no_grad():
        perfect = probe.oracle(probe.batch)
        best = float(probe.objective(perfect, probe.batch))
        reach = float(perfect.max() - perfect.min())
        worse = [float(probe.objective(perfect + reach * torch.randn_like(perfect), probe.batch)) for _ in range(5)]
    where = subject.objective_line()
    if min(worse) < best - 1e-9 or max(worse) == best:
        what = f"a perfect answer costs {best:.4g}, with noise on it only {min(worse):.4g}"
        why = "minimising this loss leads away from the answer"
        fix = "remove the minus, or check which of prediction and target comes first"
        return failed(what, where=where, why=why, fix=fix)
    bound = probe.lower_bound
    slack = 1e-3 * max(abs(sum(worse) / 5), 1e-3)
    if bound is not None and abs(best - bound) > slack:
        what = f"a perfect answer costs {best:.4g}, the smallest loss there can be is {bound:.4g}"
        why = "the loss is not that of its prediction: probabilities taken for logits, a wrong axis or a wrong target"
        fix = "hand raw logits to cross-entropy, and compare along the axis of classes"
        return failed(what, where=where, why=why, fix=fix, value=abs(best - bound), limit=slack)
    return passed(f"a perfect answer costs {best:.3g}, noise on it {min(worse):.3g} and more")


@check("L3", "loss mask", "err", humbatova=(9,), needs=("mask", "targets", "objective", "predict"))
def loss_mask(subject: Subject) -> Finding:
    """Masked targets do not count, others do, and a batch without targets has a finite loss of zero."""
    probe, system = subject.probe, subject.perturbed()
    assert probe is not None
    where = subject.objective_line()
    kept = probe.batch[probe.mask] != 0
    with torch.no_grad():
        masked, counted = _move_targets(probe, ~kept), _move_targets(probe, kept)
        nothing = take_rows(subject.perturbed_batch(), slice(None))
        nothing[probe.mask] = torch.zeros_like(nothing[probe.mask])
        empty = float(subject.loss_of(system, nothing))
        count = float(system.num_targets(subject.perturbed_batch()))
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
        return failed(what, where=where, why="one such part makes the whole step NaN", fix="divide by max(1, number of targets)")
    if count != float(kept.sum()):
        what = f"num_targets says {count:g}, the mask keeps {int(kept.sum())}"
        return failed(what, where=where, why="parts of a step are weighted wrongly", fix="count the mask in num_targets()")
    return passed(f"{int(kept.sum())} of {kept.numel()} targets count, and no others")


def _move_targets(probe: Probe, which: Tensor) -> float:
    """Change of the loss when some targets change."""
    base = probe.objective(probe.predict(probe.batch), probe.batch)
    target = probe.batch[probe.targets]
    moved = torch.where(which.reshape(which.shape + (1,) * (target.ndim - which.ndim)), target + 1, target)
    changed = {**probe.batch, probe.targets: moved}
    return abs(float(probe.objective(probe.predict(probe.batch), changed) - base)) / max(abs(float(base)), 1e-12)


@check("L5", "baselines", "note", humbatova=(9,), needs=("baselines", "at_init"))
def baselines(subject: Subject) -> Finding:
    """The scores of trivial predictors."""
    probe = subject.initial_probe(size=64)
    assert probe is not None and probe.baselines is not None and probe.at_init is not None
    found = probe.baselines(probe.batch)
    guess = probe.at_init(probe.batch)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    useless = [name for name, value in found.items() if value >= guess * (1 + SAME)]
    if useless:
        what = f"{useless[0]} costs {found[useless[0]]:.3f}, a guess {guess:.3f}"
        why = "a baseline worse than guessing means that targets are noise or counted wrongly"
        return failed(what, where=subject.objective_line(), why=why, fix="look at the targets: seedbed check --only D4")
    return passed(f"to beat: {shown}; a guess costs {guess:.3f}")


@check("L6", "noise level", "err", humbatova=(9, 10), needs=("corrupt",))
def noise_level(subject: Subject) -> Finding:
    """The noise level given to the network is that of its input."""
    probe = subject.probe
    assert probe is not None and probe.corrupt is not None
    clean, noise, level, mixture = probe.corrupt(probe.batch)
    way = (clean - noise).flatten(1)
    real = ((mixture - noise).flatten(1) * way).sum(1) / way.square().sum(1)
    rest = (mixture - noise).flatten(1) - real[:, None] * way
    off = max(float((real - level.flatten()).abs().max()), float(rest.abs().max()) / spread(mixture))
    limit = 1e-6
    if off > limit:
        what = f"the network is given level {float(level.flatten()[0]):.4f} where the input has {float(real[0]):.4f}"
        why = "the network learns to undo another corruption than the one in sampling"
        fix = "use one and the same level for the mixture and the condition, drawn in float32"
        return failed(what, where=subject.objective_line(), why=why, fix=fix, value=off, limit=limit)
    return passed("declared and real level", off, limit)


def is_deterministic(subject: Subject, system: System) -> bool:
    """Whether the loss in evaluation mode is independent of the seed."""
    batch = subject.perturbed_batch()
    with torch.no_grad():
        return torch.equal(*(subject.loss_of(system, batch, seed) for seed in (0, 1)))


def _twice(batch: Batch) -> Batch:
    count = num_rows(batch)
    return {k: torch.cat([v, v]) if v.ndim and len(v) == count else v for k, v in batch.items()}
