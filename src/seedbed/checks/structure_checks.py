"""C: what a generative model may see and must see: not the future, not the answer, but every condition it is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seedbed.checks.case import Case, first_module_that_moves, limit_for, spread
from seedbed.checks.registry import Result, check, failed, passed
from seedbed.train.probe import Batch, Probe
from seedbed.train.system import System

# What must move, moves by this share of the mean output. Measured: 0.09 and more.
CONTROL = 1e-3
# Places at which targets are what the rule says. Measured: 1.000.
RULE = 0.99
# Loss at the worst value of a scalar condition against the median. Measured: 1.02.
PEAK = 1e4
# Numeric against automatic derivative, relative. Measured: 1e-9, and 4e-4 where it is rounded to float32.
GRADIENT = 1e-2


def altered(value: Tensor, index: tuple) -> Tensor:
    """A copy with other values at `index`: ids taken from elsewhere in the same tensor, numbers moved by their spread."""
    out = value.clone()
    if value.is_floating_point():
        out[index] = out[index] + value.std().clamp_min(0.1) * torch.randn_like(out[index])
        return out
    top = int(value.max()) + 1
    # Always another id, and always one that occurs.
    out[index] = (out[index] + 1 + torch.randint(0, max(top - 1, 1), out[index].shape)) % top
    return out


def _moved(probe: Probe, batch: Batch, base: Tensor) -> Tensor:
    """How far each position of the prediction moves, as a share of its mean size: (time)."""
    change = (probe.predict(batch) - base).abs().transpose(0, 1).flatten(1).amax(1)
    return change.double() / spread(base)


@check("C1", "order", "err", humbatova=(4,), needs=("predict", "order", "inputs"))
@torch.no_grad()
def order(case: Case) -> Result:
    """Causal: the future changes nothing before it, the past changes what follows. Full: the end reaches the beginning."""
    probe = case.probe
    assert probe is not None
    inputs, base = probe.batch[probe.inputs], probe.predict(probe.batch)
    length = inputs.shape[1]
    late = {**probe.batch, probe.inputs: altered(inputs, (slice(None), slice(length // 2, None)))}
    early = {**probe.batch, probe.inputs: altered(inputs, (slice(None), slice(0, length // 2)))}
    forward, backward = _moved(probe, early, base), _moved(probe, late, base)
    half, limit = length // 2, limit_for(base)
    leak, control = float(backward[:half].max()), float(forward[-1])
    seen = float(backward[half:].min())
    if probe.order == "causal" and leak > limit:
        return _leak(case, probe, late, half, leak, limit)
    if probe.order == "full" and float(backward[0]) < CONTROL:
        what = f"the first output moves by {float(backward[0]):.2g} when the last half of the input changes"
        why = "the model is declared to see both sides and sees one"
        fix = 'drop the causal mask, or declare order="causal"'
        return failed(what, where=case.objective_place(), why=why, fix=fix, value=float(backward[0]), limit=CONTROL)
    if min(control, seen) < CONTROL:
        what = f"the last output moves by {control:.2g} when the past changes, later ones by {seen:.2g} when their input does"
        why = "nothing leaks because nothing flows: the model ignores its context"
        fix = "check the mask, the residual path and that the inputs reach the blocks"
        return failed(what, where=case.objective_place(), why=why, fix=fix, value=min(control, seen), limit=CONTROL)
    return passed(f"leak from the future; the past moves the last output by {control:.2g}", leak, limit)


def _leak(case: Case, probe: Probe, late: Batch, half: int, leak: float, limit: float) -> Result:
    length = probe.batch[probe.inputs].shape[1]
    guilty = first_module_that_moves(
        case.shaken(),
        lambda: probe.predict(probe.batch),
        lambda: probe.predict(late),
        lambda x: x[:, :half] if x.ndim > 1 and x.shape[1] == length else None,
    )
    found = f"{case.module_place(case.shaken(), guilty[0])}; first module that moves: {guilty[0]}" if guilty else ""
    return failed(
        f"outputs at positions 0-{half - 1} move by {leak:.2g}x their mean when inputs {half}-{length - 1} change",
        where=found or case.objective_place(),
        why="the model can read its own answer: the loss will look excellent and samples will be noise",
        fix='make attention causal, or declare order="full" if it is meant to see both sides',
        value=leak,
        limit=limit,
    )


@check("C2", "target", "err", humbatova=(1, 9), needs=("predict", "objective", "targets", "inputs"))
@torch.no_grad()
def target(case: Case) -> Result:
    """Other targets change the loss and not the prediction, and targets are what the rule says."""
    probe = case.probe
    assert probe is not None
    where = case.objective_place()
    base = probe.predict(probe.batch)
    changed = {**probe.batch, probe.targets: altered(probe.batch[probe.targets], (slice(None),))}
    moved = float((probe.predict(changed) - base).abs().max()) / spread(base)
    if moved > limit_for(base):
        why = "the model copies the answer it is given: the loss falls to nothing and samples are noise"
        fix = "make the prediction from the inputs alone"
        runs = (lambda: probe.predict(probe.batch), lambda: probe.predict(changed))
        guilty = first_module_that_moves(case.shaken(), *runs, lambda x: x)
        where = case.module_place(case.shaken(), guilty[0]) if guilty else where
        what = f"predictions move by {moved:.2g} when only the targets change"
        return failed(what, where=where, why=why, fix=fix, value=moved, limit=limit_for(base))
    ignored = _ignored(probe, base)
    if ignored:
        why, fix = "nothing is learned from it", "let every target take part in the loss; padding needs an id of its own"
        return failed(f"the loss does not see {ignored}", where=where, why=why, fix=fix)
    return _follows_rule(case, probe)


def _ignored(probe: Probe, base: Tensor) -> str:
    """A target that can change without changing the loss, or an id that no target can have; empty when there is none."""
    target = probe.batch[probe.targets]
    loss = float(probe.objective(base, probe.batch))
    kept = probe.batch[probe.mask] != 0 if probe.mask else torch.ones(target.shape[: max(1, target.ndim)], dtype=torch.bool)
    places = kept.reshape(kept.shape[0], -1).nonzero().tolist()
    for row, column in [places[0], places[len(places) // 2], places[-1]]:
        flat = target.flatten(1) if target.ndim > 1 else target[:, None]
        moved = altered(flat, (slice(row, row + 1), slice(column, column + 1))).reshape(target.shape)
        if abs(float(probe.objective(base, {**probe.batch, probe.targets: moved})) - loss) < 1e-9 * abs(loss):
            return f"the target of row {row} at place {column}"
    if target.is_floating_point():
        return ""
    top = int((probe.ranges or {}).get(probe.targets, (0, int(target.max())))[1])
    for number in sorted({0, top, *range(0, top + 1, max(1, top // 128))}):
        value = float(probe.objective(base, {**probe.batch, probe.targets: torch.full_like(target, number)}))
        if not value > 0:
            return f"targets of id {number}: a batch of them costs {value:g}"
    return ""


def _follows_rule(case: Case, probe: Probe) -> Result:
    if probe.rule is None:
        return passed("predictions do not see the targets")
    expected, found = probe.rule(probe.batch).double(), probe.batch[probe.targets].double()
    if expected.shape != found.shape:
        share = 0.0
    else:
        known = ~expected.isnan() & (expected != -1)
        share = float(((expected - found).abs() < 1e-6)[known].double().mean())
    if share < RULE:
        return failed(
            f"{share:.1%} of the targets are what the rule says (shape {tuple(found.shape)}, rule {tuple(expected.shape)})",
            where=case.loss_place(),
            why="the model is trained to predict something else than the next item",
            fix="inputs are items 0..n-1, targets items 1..n: check both slices",
            value=share,
            limit=RULE,
        )
    return passed("targets that follow the rule", share, RULE)


@check("C3", "response", "err", humbatova=(4, 10), needs=("predict", "inputs"))
@torch.no_grad()
def response(case: Case) -> Result:
    """The main input and every declared condition, taken from another row, move the prediction."""
    probe = case.probe
    assert probe is not None
    base, effects = probe.predict(probe.batch), {}
    for name in (probe.inputs, *probe.uses):
        other = {**probe.batch, name: probe.batch[name].roll(1, 0)}
        effects[name] = float((probe.predict(other) - base).abs().max()) / spread(base)
    weakest = min(effects, key=lambda name: effects[name])
    value = effects[weakest]
    if value < CONTROL:
        return failed(
            f"`{weakest}` of another row moves the prediction by {value:.2g}",
            where=case.loss_place(),
            why="this input does not reach the output: the control will be dead",
            fix="connect it: follow it from the batch to the first layer that should use it",
            value=value,
            limit=CONTROL,
            severity="err" if value < 1e-9 else "warn",
        )
    return passed("smallest effect of " + ", ".join(effects), value, CONTROL)


@check("C4", "sweep", "err", humbatova=(10, 14), needs=("predict", "objective", "scalars"))
def sweep(case: Case) -> Result:
    """Prediction, loss and gradient stay finite over the whole range of every scalar condition, and the loss has no peak."""
    probe = case.probe
    assert probe is not None and probe.scalars is not None
    worst = 0.0
    for name, (low, high) in probe.scalars.items():
        span = high - low
        values = [*torch.linspace(low, high, 64).tolist(), low + 1e-6 * span, high - 1e-6 * span]
        losses = []
        for value in values:
            batch = {**probe.batch, name: torch.full_like(probe.batch[name], value)}
            loss = probe.objective(probe.predict(batch), batch)
            grads = torch.autograd.grad(loss, [p for p in case.shaken().parameters() if p.requires_grad], allow_unused=True)
            if not torch.isfinite(loss) or not all(torch.isfinite(g).all() for g in grads if g is not None):
                what = f"loss or gradient is not finite at {name} = {value:.7g}"
                why = "sooner or later training draws it, and one such row spoils every weight"
                fix = "keep divisors and roots away from zero, or narrow the range that is drawn"
                return failed(what, where=case.objective_place(), why=why, fix=fix)
            losses.append(float(loss.detach()))
        peak = max(losses) / max(float(torch.tensor(losses).median()), 1e-12)
        worst = max(worst, peak)
        if peak > PEAK:
            what = f"the loss at one {name} is {peak:.2g} times the median"
            why = "a few rows own the gradient"
            fix = "weight the loss by level"
            return failed(what, where=case.objective_place(), why=why, fix=fix, value=peak, limit=PEAK)
    return passed(f"finite over {', '.join(probe.scalars)}; largest loss against the median", worst, PEAK)


@check("C6", "gradient", "err", humbatova=(6, 9))
def gradient(case: Case) -> Result:
    """The slope of the loss along a random direction, measured, is what the backward pass says."""
    system, batch = case.shaken(), case.shaken_batch()
    params = [p for p in system.parameters() if p.requires_grad]
    frozen = sum(not p.requires_grad for p in system.parameters())
    dice = torch.Generator().manual_seed(11)
    ways = [torch.randn(p.shape, generator=dice).to(p.dtype) * spread(p) for p in params]
    probe = system.probe(batch)
    loss = probe.held() if probe is not None and probe.held is not None else lambda: case.loss_of(system, batch)
    grads = torch.autograd.grad(case.loss_of(system, batch), params, allow_unused=True)
    told = sum(float((g * w).sum()) for g, w in zip(grads, ways, strict=True) if g is not None)
    seen, doubt = _slope(loss, params, ways)
    off = abs(told - seen) / max(abs(seen), abs(told), 1e-12)
    limit = max(GRADIENT, 10 * doubt)
    if off > limit:
        names = _cut_off(case, system, batch, loss)
        guilty = f"; the gradients of {len(names)} tensors are wrong, {', '.join(names[:2])} among them" if names else ""
        return failed(
            f"the loss falls by {seen:.4g} where the backward pass says {told:.4g}{guilty}",
            where=case.maker(system, names[0]) if names else case.objective_place(),
            why="part of the model is cut off from the gradient and will not learn",
            fix="look for detach(), no_grad, .data, in-place writes or a custom backward on the way",
            value=off,
            limit=limit,
        )
    return passed("measured against computed slope" + (f"; {frozen} frozen" if frozen else ""), off, limit)


@torch.no_grad()
def _slope(loss: Callable[[], Tensor], params: list, ways: list) -> tuple[float, float]:
    """The central difference along `ways`, and how far it changes when the step is doubled."""
    wide = loss().dtype == torch.float64
    found = []
    for size in (1e-4, 2e-4) if wide else (1e-2, 2e-2):
        ends = []
        for sign in (1, -1):
            for alpha in (sign * size, -sign * size):
                for param, way in zip(params, ways, strict=True):
                    param.add_(way, alpha=alpha)
                if alpha == sign * size:
                    ends.append(float(loss()))
        found.append((ends[0] - ends[1]) / (2 * size))
    return found[0], abs(found[0] - found[1]) / max(abs(found[0]), 1e-12)


def _cut_off(case: Case, system: System, batch: Batch, loss: Callable[[], Tensor]) -> list[str]:
    """Parameters whose gradient is not the slope of the loss along it, those nearest to the loss first."""
    named = {n: p for n, p in system.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(case.loss_of(system, batch), list(named.values()), allow_unused=True)
    wrong = []
    for (name, param), grad in zip(named.items(), grads, strict=True):
        way = torch.randn(param.shape, generator=torch.Generator().manual_seed(5)).to(param.dtype) * spread(param)
        told = 0.0 if grad is None else float((grad * way).sum())
        seen, doubt = _slope(loss, [param], [way])
        if abs(told - seen) > max(GRADIENT, 10 * doubt) * max(abs(seen), abs(told), 1e-12):
            wrong.append(name)
    return wrong[::-1]
