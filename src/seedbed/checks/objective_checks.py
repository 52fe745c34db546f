"""Checks L: the loss is a mean over targets, minimal for perfect predictions, respects masks, and minimises its terms."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from seedbed.checks.calls import only_called_by, places, recipe_calls
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.subject import CPU, ROWS, Recorder, Subject, num_rows, probe_of, repeat_rows, spread, take_rows
from seedbed.checks.watch_ops import Watch, caller
from seedbed.report.findings import Finding
from seedbed.train import capabilities
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, System, named_optimizers

# Relative difference of losses that should be equal. Measured: 1e-16, and 2e-7 where the loss is rounded to float32.
SAME = 1e-5
# For noisy losses without a probe: how much doubling a batch may change the mean over many draws. Measured: 0.14.
DOUBLED, NUM_DRAWS = 0.25, 48
# Share of the gradient below which a term does nothing. Presets: at least 0.17.
SHARE = 1e-4


@check("L0", "probe loss", "err", humbatova=(9,), needs=("objective", "predict"))
def probe_loss(subject: Subject) -> Finding:
    """The probe's objective equals the training loss."""
    probe, system = subject.declared, subject.perturbed()
    if not is_deterministic(subject, system):
        return skipped("the loss draws its own noise; see L1")
    with torch.no_grad():
        declared = float(probe.objective(probe.predict(probe.batch), probe.batch))
        real = float(subject.loss_of(system, subject.perturbed_batch()))
    off = abs(declared - real) / max(abs(real), 1e-12)
    if not off <= SAME:
        what = f"the training loss is {real:.6g}, the probe's objective {declared:.6g}"
        described = lambda: probe.objective(probe.predict(probe.batch), probe.batch)  # noqa: E731
        batch, variant = subject.perturbed_batch(), system.variant(0, subject.small.steps)
        trained = lambda: subject.loss_of(system, batch, variant=variant)  # noqa: E731
        where = places((subject.objective_line(), *only_called_by(subject, trained, described)[:1]))
        return failed(what, where=where, value=off, limit=SAME)
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
        return failed(what, where=subject.objective_line())
    mean = sum(w * p for w, p in zip(weights, parts, strict=True) if w) / max(sum(weights), 1e-12)
    for what, value in ((f"twice the batch gives {twice / whole:.4g} times the loss", twice),
                        (f"the loss is {whole:.6g}, the mean over its rows {mean:.6g}", mean)):  # fmt: skip
        off = abs(value - whole) / max(abs(whole), 1e-12)
        if not off <= SAME:
            severity = "" if math.isclose(twice, 2 * whole, rel_tol=1e-3) else subject.unsure
            return failed(what, where=subject.objective_line(), case="L1-reduction", value=off, limit=SAME, severity=severity)
    return passed("full, doubled and row by row", abs(mean - whole) / max(abs(whole), 1e-12), SAME)


def _noisy_split(subject: Subject, system: System) -> Finding:
    """A noisy loss cannot be split; its mean over many draws must not depend on the batch size."""
    batches = subject.perturbed_batch(), _twice(subject.perturbed_batch())
    draws = torch.tensor([[float(subject.loss_of(system, batch, seed)) for batch in batches] for seed in range(NUM_DRAWS)])
    one, two = draws.double().unbind(1)
    off = abs(float(two.mean() / one.mean()) - 1)
    error = 6 * float((one.std() / one.mean()).square() + (two.std() / two.mean()).square()) ** 0.5 / math.sqrt(NUM_DRAWS)
    if not off <= max(DOUBLED, error):
        what = f"twice the batch gives {float(two.mean() / one.mean()):.3g} times the loss, in the mean of {NUM_DRAWS} draws"
        return failed(what, where=subject.objective_line(), case="L1-reduction", value=off, limit=DOUBLED)
    return passed(f"doubled, in the mean of {NUM_DRAWS} draws", off, max(DOUBLED, error))


@check("L2", "oracle loss", "err", humbatova=(9, 14), needs=("oracle", "objective"))
def oracle_loss(subject: Subject) -> Finding:
    """A perfect prediction reaches the lower bound, and noise raises the loss."""
    probe = subject.declared
    with torch.no_grad():
        perfect = probe.oracle(probe.batch)
        best = float(probe.objective(perfect, probe.batch))
        reach = float(perfect.max() - perfect.min())
        worse = [float(probe.objective(perfect + reach * torch.randn_like(perfect), probe.batch)) for _ in range(5)]

    def where() -> str:
        parts = recipe_calls(subject, lambda: probe.objective(perfect, probe.batch))
        return places((subject.objective_line(), *reversed(parts)))

    if min(worse) < best - 1e-9 or max(worse) == best:
        return failed(f"a perfect answer costs {best:.4g}, with noise on it only {min(worse):.4g}", where=where())
    bound = probe.lower_bound
    slack = 1e-3 * max(abs(sum(worse) / 5), 1e-3)
    if bound is not None and abs(best - bound) > slack:
        what = f"a perfect answer costs {best:.4g}, the smallest loss there can be is {bound:.4g}"
        return failed(what, where=where(), case="L2-bound", value=abs(best - bound), limit=slack)
    return passed(f"a perfect answer costs {best:.3g}, noise on it {min(worse):.3g} and more")


@check("L3", "loss mask", "err", humbatova=(9,), needs=("mask", "targets", "objective", "predict"))
def loss_mask(subject: Subject) -> Finding:
    """Masked targets do not count, others do, and a batch without targets has a finite loss of zero."""
    probe, system = subject.declared, subject.perturbed()
    where = subject.objective_line()
    kept = probe.batch[probe.mask] != 0
    with torch.no_grad():
        masked, counted = _move_targets(probe, ~kept), _move_targets(probe, kept)
        nothing = take_rows(subject.perturbed_batch(), slice(None))
        nothing[probe.mask] = torch.zeros_like(nothing[probe.mask])
        empty = float(subject.loss_of(system, nothing))
        count = float(system.num_targets(subject.perturbed_batch()))
    if masked > SAME:
        return failed("masked targets change the loss", where=where, value=masked)
    if kept.any() and counted < SAME:
        return failed("targets that count do not change the loss", where=where, case="L3-counted")
    if not math.isfinite(empty) or empty != 0.0:
        return failed(f"a batch of masked targets only costs {empty:.4g}", where=where, case="L3-empty")
    if count != float(kept.sum()):
        what = f"num_targets says {count:g}, the mask keeps {int(kept.sum())}"
        return failed(what, where=where, case="L3-number")
    return passed(f"{int(kept.sum())} of {kept.numel()} targets count, and no others")


def _move_targets(probe: Probe, which: Tensor) -> float:
    """Change of the loss when some targets change."""
    base = probe.objective(probe.predict(probe.batch), probe.batch)
    target = probe.batch[probe.targets]
    moved = torch.where(which.reshape(which.shape + (1,) * (target.ndim - which.ndim)), target + 1, target)
    changed = {**probe.batch, probe.targets: moved}
    return abs(float(probe.objective(probe.predict(probe.batch), changed) - base)) / max(abs(float(base)), 1e-12)


class _Detached(Watch):
    """Results of detach() with what they come from, and the line that called it."""

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func is Tensor.detach and args[0].requires_grad:
            self.found.append((out, args[0], caller()))


class _Scores:
    """Calls of a critic during a step: what was scored, the scores, their slopes where the step itself takes them, and the line
    of those that are not for its own loss, which comes first."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder, self.calls = name, recorder, list[tuple[Any, Tensor, list[Tensor], str]]()

    def look(self, module: Any, given: Any, out: Any) -> None:
        score, slopes = out[0] if isinstance(out, tuple) else out, []
        score.register_hook(slopes.append)
        self.calls.append((given[0].detach().numpy(), score, slopes, caller() if self.name in self.recorder.norms else ""))

    def same_side(self) -> str:
        """The line of the other network's loss that pulls scores as the critic's own loss does; empty when none does."""
        own: dict[bytes, float] = {}
        for rows, score, slopes, line in self.calls:
            loss = self.recorder.norms["main" if line else self.name]
            slope = torch.autograd.grad(loss, score, retain_graph=True, allow_unused=True)[0]
            slope = slopes[0] if slope is None and line and slopes else slope
            sums = {} if slope is None else {row.tobytes(): float(x.sum()) for row, x in zip(rows, slope, strict=True)}
            if line and sum(value * own.get(row, 0.0) for row, value in sums.items()) > 0:
                return line
            own |= {} if line else sums
        return ""


@check("L4", "loss terms", "err", humbatova=(9,), needs=("terms",))
def loss_terms(subject: Subject) -> Finding:
    """Every reported term is part of what is minimised, in every stage, and has a gradient that counts; a critic and the network
    that it scores pull its scores in opposite ways."""
    system, critic_name, smallest = subject.perturbed(), subject.declared.critic, dict[str, float]()
    params = [p for p in system.parameters() if p.requires_grad]
    for variant in capabilities.variants(system, subject.small.steps):
        recorder, kept, norms = Recorder(system, subject.small, CPU), [(b, b.clone()) for b in system.buffers()], {}
        recorder.variant = variant
        scores, critic = _Scores(critic_name, recorder), named_optimizers(system).get(critic_name)
        with _Detached() as detached, critic.register_forward_hook(scores.look) if critic else nullcontext():
            measured = system.update(subject.perturbed_batch(), recorder)
        if line := scores.same_side():
            return failed(f"this loss pulls the scores of `{critic_name}` as its own loss does", where=line)
        total = torch.stack([loss for loss in recorder.norms.values() if loss.requires_grad]).sum()
        sources = [(n, t, line) for n in subject.declared.terms for out, t, line in detached.found if measured.get(n) is out]
        for name, term, line in sources:
            (weight,) = torch.autograd.grad(total, term, retain_graph=True, allow_unused=True)
            if weight is None or not float(weight.abs()):
                what = f"`{name}` is reported and is no part of what is minimised (stage {getattr(variant, 'name', variant)})"
                return failed(what, where=line or subject.loss_line(), case="L4-reported")
            grads = torch.autograd.grad(weight * term, params, retain_graph=True, allow_unused=True)
            norms[name] = float(torch.stack([g.norm() for g in grads if g is not None] or [torch.zeros(())]).norm())
        for buffer, value in kept:
            buffer.copy_(value)
        smallest |= {n: min(smallest.get(n, 1.0), norm / max(*norms.values(), 1e-30)) for n, norm in norms.items()}
    if not smallest:
        return skipped("no declared term is reported from a value with a gradient")
    name = min(smallest, key=lambda n: smallest[n])
    if smallest[name] < SHARE:
        what = f"the gradient of `{name}` is {smallest[name]:.1e} of the largest term's"
        return failed(what, where=subject.loss_line(), case="L4-small", value=smallest[name], limit=SHARE, severity="warn")
    return passed(f"{', '.join(smallest)} are minimised; smallest share of the gradient", smallest[name], SHARE)


@check("L5", "baselines", "note", humbatova=(9,), needs=("baselines", "at_init"))
def baselines(subject: Subject) -> Finding:
    """The scores of trivial predictors."""
    probe = probe_of(subject.fresh_system().eval(), subject.batch(size=64))
    found = probe.baselines(probe.batch)
    guess = probe.at_init(probe.batch)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    if useless := [name for name, value in found.items() if value >= guess * (1 + SAME)]:
        what = f"{useless[0]} costs {found[useless[0]]:.3f}, a guess {guess:.3f}"
        return failed(what, where=subject.objective_line())
    return passed(f"to beat: {shown}; a guess costs {guess:.3f}")


@check("L6", "noise level", "err", humbatova=(9, 10), needs=("corrupt",))
def noise_level(subject: Subject) -> Finding:
    """The noise level given to the network is that of its input."""
    clean, noise, level, mixture = subject.declared.corrupt(subject.declared.batch)
    way = (clean - noise).flatten(1)
    real = ((mixture - noise).flatten(1) * way).sum(1) / way.square().sum(1)
    rest = (mixture - noise).flatten(1) - real[:, None] * way
    off, limit = max(float((real - level.flatten()).abs().max()), float(rest.abs().max()) / spread(mixture)), 1e-6
    if off > limit:
        what = f"the network is given level {float(level.flatten()[0]):.4f} where the input has {float(real[0]):.4f}"
        return failed(what, where=subject.objective_line(), value=off, limit=limit)
    return passed("declared and real level", off, limit)


def is_deterministic(subject: Subject, system: System) -> bool:
    """Whether the loss in evaluation mode is independent of the seed."""
    batch = subject.perturbed_batch()
    with torch.enable_grad():  # a loss may take gradients itself
        return torch.equal(*(subject.loss_of(system, batch, seed).detach() for seed in (0, 1)))


def _twice(batch: Batch) -> Batch:
    return take_rows(batch, torch.arange(num_rows(batch)).repeat(2))
