"""Checks C: what the model may and must depend on: not the future, not the target, but every condition; and its patches."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from seedbed.checks.calls import made_by
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.subject import Subject, limit_for, source_line, spread, take_rows
from seedbed.checks.watch_ops import Lookups
from seedbed.report.findings import Finding
from seedbed.train import capabilities
from seedbed.train.probe import Batch, Probe
from seedbed.train.system import System

# What must change, changes by this share of the mean output. Measured: 0.09 and more.
CONTROL = 1e-3
# Positions at which targets follow the rule. Measured: 1.000.
RULE = 0.99
# Loss at the worst value of a scalar condition against the median. Measured: 1.02.
PEAK = 1e4
# Numeric against automatic derivative, relative. Measured: 1e-9, and 4e-4 where it is rounded to float32.
GRADIENT = 1e-2


@check("C1", "causality", "err", humbatova=(4,), needs=("predict", "order", "inputs"))
@torch.no_grad()
def causality(subject: Subject) -> Finding:
    """Causal: the future does not affect the past. Full: the end affects the beginning."""
    probe = subject.declared
    inputs, base = probe.batch[probe.inputs], probe.predict(probe.batch)
    length, limit = inputs.shape[1], limit_for(base)
    half = length // 2
    late = {**probe.batch, probe.inputs: altered(inputs, (slice(None), slice(half, None)))}
    early = {**probe.batch, probe.inputs: altered(inputs, (slice(None), slice(0, half)))}
    forward, backward = _moved(probe, early, base), _moved(probe, late, base)
    seen = half + (probe.order == "strict")  # the first output that may change
    leak, control = float(backward[:seen].max()), float(forward[-1])
    measured = float(backward[seen:].min())
    if probe.order != "full" and leak > limit:
        runs = (lambda: probe.predict(probe.batch), lambda: probe.predict(late))
        select = lambda x: x[:, :seen] if x.ndim > 1 and x.shape[1] == length else None  # noqa: E731
        where = subject.first_moved(*runs, select=select) or subject.objective_line()
        what = f"outputs at positions 0-{seen - 1} move by {leak:.2g}x their mean when inputs {half}-{length - 1} change"
        return failed(what, where=where, value=leak, limit=limit)
    if probe.order == "full" and float(backward[0]) < CONTROL:
        what = f"the first output moves by {float(backward[0]):.2g} when the last half of the input changes"
        return failed(what, where=subject.objective_line(), case="C1-one-sided", value=float(backward[0]), limit=CONTROL)
    if min(control, measured) < CONTROL:
        what = f"the last output moves by {control:.2g} when the past changes, later ones by {measured:.2g} when their input does"
        return failed(what, where=subject.objective_line(), case="C1-nothing", value=min(control, measured), limit=CONTROL)
    return passed(f"leak from the future; the past moves the last output by {control:.2g}", leak, limit)


def altered(value: Tensor, index: tuple) -> Tensor:
    """A copy with other values at `index`: ids from elsewhere in the tensor, numbers shifted by their spread."""
    out = value.clone()
    if value.is_floating_point() and bool(((value == 0) | (value == 1)).all()):
        out[index] = 1 - out[index]
    elif value.is_floating_point():
        out[index] = out[index] + value.std().clamp_min(0.1) * torch.randn_like(out[index])
    else:
        top = int(value.max()) + 1
        # Always another id, and always one that occurs.
        out[index] = (out[index] + 1 + torch.randint(0, max(top - 1, 1), out[index].shape)) % top
    return out


def _moved(probe: Probe, batch: Batch, base: Tensor) -> Tensor:
    """Relative change of the prediction at each position: (time)."""
    change = (probe.predict(batch) - base).abs().transpose(0, 1).flatten(1).amax(1)
    return change.double() / spread(base)


@check("C2", "target leak", "err", humbatova=(1, 9), needs=("predict", "objective", "targets", "inputs"))
@torch.no_grad()
def target_leak(subject: Subject) -> Finding:
    """Other targets change the loss and not the prediction, and targets follow the declared rule."""
    probe = subject.declared
    where = subject.objective_line()
    base = probe.predict(probe.batch)
    changed = {**probe.batch, probe.targets: altered(probe.batch[probe.targets], (slice(None),))}
    moved = float((probe.predict(changed) - base).abs().max()) / spread(base)
    if moved > limit_for(base):
        runs = (lambda: probe.predict(probe.batch), lambda: probe.predict(changed))
        what = f"predictions move by {moved:.2g} when only the targets change"
        return failed(what, where=subject.first_moved(*runs) or where, value=moved, limit=limit_for(base))
    if ignored := _ignored(probe, base):
        return failed(f"the loss does not see {ignored}", where=where, case="C2-ignored", severity=subject.unsure)
    if probe.rule is None:
        return passed("predictions do not see the targets")
    expected, found = probe.rule(probe.batch).double(), probe.batch[probe.targets].double()
    if expected.shape != found.shape:
        share = 0.0
    else:
        known = ~expected.isnan() & (expected != -1)
        share = float(((expected - found).abs() < 1e-6)[known].double().mean())
    if share < RULE:
        anew = lambda: capabilities.probe(subject.perturbed(), subject.perturbed_batch())  # noqa: E731
        what = f"{share:.1%} of the targets follow the rule (shape {tuple(found.shape)}, rule {tuple(expected.shape)})"
        where = made_by(subject, anew, lambda: probe.batch[probe.targets]) or subject.loss_line()
        return failed(what, where=where, case="C2-rule", value=share, limit=RULE)
    return passed("targets that follow the rule", share, RULE)


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
    # One row with a target that counts is enough: with all, a vocabulary of 50,000 ids takes seconds.
    one = take_rows({**probe.batch, "predicted": base}, slice(places[0][0], places[0][0] + 1))
    base, target = one.pop("predicted"), one[probe.targets]
    for number in sorted({0, top, *range(0, top + 1, max(1, top // 128))}):
        value = float(probe.objective(base, {**one, probe.targets: torch.full_like(target, number)}))
        if not value > 0:
            return f"targets of id {number}: a batch of them costs {value:g}"
    return ""


@check("C3", "conditioning", "err", humbatova=(4, 10), needs=("predict", "inputs"))
@torch.no_grad()
def conditioning(subject: Subject) -> Finding:
    """The main input and every declared condition affect the prediction."""
    probe = subject.declared
    base, effects, constant = probe.predict(probe.batch), {}, []
    for name in (probe.inputs, *probe.uses):
        rolled = probe.batch[name].roll(1, 0)
        if torch.equal(rolled, probe.batch[name]):  # data with a single class: another row tells nothing
            constant.append(name)
            continue
        effects[name] = float((probe.predict({**probe.batch, name: rolled}) - base).abs().max()) / spread(base)
    if not effects:
        return skipped(f"{', '.join(constant)}: the same in every row")
    effect, weakest = min((effect, name) for name, effect in effects.items())
    if effect < CONTROL:
        what = f"`{weakest}` of another row moves the prediction by {effect:.2g}"
        return failed(what, where=subject.loss_line(), value=effect, limit=CONTROL, severity="err" if effect < 1e-9 else "warn")
    for name in probe.uses:
        value, (low, high) = probe.batch[name], (probe.ranges or {}).get(name, (0, 0))
        if value.is_floating_point() or high - low < 3:
            continue
        rows = []
        for number in range(int(low), int(low) + 4):
            with Lookups() as seen:
                probe.predict({**probe.batch, name: torch.full_like(value, number)})
            rows.append(Counter(row for lookup in seen.found for row in lookup))
        shared = {(a, b): sum((rows[a] & rows[b]).values()) for a in range(4) for b in range(a)}
        most, least = max(shared, key=shared.__getitem__), min(shared.values())
        if shared[most] > least:
            what = f"values {most[1]} and {most[0]} of `{name}` share {shared[most]} rows of a table, others {least}"
            return failed(what, where=seen.line, case="C3-rows")
    untested = f"; the same in every row: {', '.join(constant)}" if constant else ""
    return passed("smallest effect of " + ", ".join(effects) + untested, effect, CONTROL)


@check("C4", "condition range", "err", humbatova=(10, 14), needs=("predict", "objective", "scalars"))
def condition_range(subject: Subject) -> Finding:
    """Prediction, loss and gradient stay finite over the range of every scalar condition, and the loss has no peak."""
    probe = subject.declared
    worst = 0.0
    for name, (low, high) in probe.scalars.items():
        span = high - low
        values = [*torch.linspace(low, high, 64).tolist(), low + 1e-6 * span, high - 1e-6 * span]
        losses = []
        for value in values:
            batch = {**probe.batch, name: torch.full_like(probe.batch[name], value)}
            loss = probe.objective(probe.predict(batch), batch)
            grads = torch.autograd.grad(loss, [p for p in subject.perturbed().parameters() if p.requires_grad], allow_unused=True)
            if not torch.isfinite(loss) or not all(torch.isfinite(g).all() for g in grads if g is not None):
                what = f"loss or gradient is not finite at {name} = {value:.7g}"
                return failed(what, where=subject.objective_line())
            losses.append(float(loss.detach()))
        peak = max(losses) / max(float(torch.tensor(losses).median()), 1e-12)
        worst = max(worst, peak)
        if peak > PEAK:
            what = f"the loss at one {name} is {peak:.2g} times the median"
            return failed(what, where=subject.objective_line(), case="C4-peak", value=peak, limit=PEAK)
    return passed(f"finite over {', '.join(probe.scalars)}; largest loss against the median", worst, PEAK)


@check("C5", "patches", "err", humbatova=(5, 7), needs=("patches",))
def patches(subject: Subject) -> Finding:
    """Images come back from their tokens, of any height and width; one pixel is in one token, in raster order."""
    patchify, back, patch = subject.declared.patches
    height, width = 3 * patch, 5 * patch
    x = torch.arange(2.0 * 3 * height * width, dtype=torch.float64).view(2, 3, height, width)
    tokens, other = patchify(x, patch), x.clone()
    other[:, :, 2 * patch, 3 * patch] += 1.0  # patch 13 in raster order
    moved = (patchify(other, patch) != tokens).any(-1).any(0).nonzero().flatten().tolist()
    if not torch.equal(back(tokens, patch, height, width), x):
        what = f"an image of {height}x{width} does not come back from its {tokens.shape[1]} tokens"
        return failed(what, where=source_line(back))
    if moved != [13]:
        return failed(f"a pixel of patch 13 in raster order is in tokens {moved}", where=source_line(patchify))
    return passed(f"images of {height}x{width} come back; one pixel is in one token")


@check("C6", "gradient check", "err", humbatova=(6, 9))
def gradient_check(subject: Subject) -> Finding:
    """The numerical slope of the loss along a random direction equals the gradient."""
    system, batch = subject.perturbed(), subject.perturbed_batch()
    params = [p for p in system.parameters() if p.requires_grad]
    frozen = sum(not p.requires_grad for p in system.parameters())
    rng = torch.Generator().manual_seed(11)
    ways = [torch.randn(p.shape, generator=rng).to(p.dtype) * spread(p) for p in params]
    probe = capabilities.probe(system, batch)
    loss = probe.held() if probe is not None and probe.held is not None else lambda: subject.loss_of(system, batch)
    grads = torch.autograd.grad(subject.loss_of(system, batch), params, allow_unused=True)
    computed = sum(float((g * w).sum()) for g, w in zip(grads, ways, strict=True) if g is not None)
    measured, spread_of_slope = _slope(loss, params, ways)
    off = abs(computed - measured) / max(abs(measured), abs(computed), 1e-12)
    limit = max(GRADIENT, 10 * spread_of_slope)
    if off <= limit >= 1.0:  # a gradient of zero would pass
        return skipped(f"the loss has kinks near these weights: its slope varies by {spread_of_slope:.0%} with the step")
    if off > limit:
        names = _cut_off(subject, system, batch, loss)
        guilty = f"; the gradients of {len(names)} tensors are wrong, {', '.join(names[:2])} among them" if names else ""
        what = f"the loss changes by {measured:.4g} where the gradient gives {computed:.4g}{guilty}"
        # Where most of them are wrong, it is the loss that loses gradients.
        where = subject.module_init_line(system, names[0]) if 0 < len(names) <= len(params) / 2 else subject.objective_line()
        # A note on a model of others: it may be meant, and O2 names what gets no gradient at all.
        return failed(what, where=where, value=off, limit=limit, severity=subject.unsure)
    return passed("measured against computed slope" + (f"; {frozen} frozen" if frozen else ""), off, limit)


@torch.no_grad()
def _slope(loss: Callable[[], Tensor], params: list, ways: list) -> tuple[float, float]:
    """The central difference along `ways`, and its variation over four step sizes: two may agree by chance."""
    wide = loss().dtype == torch.float64
    found = []
    for size in (1e-4, 5e-5, 2e-4, 4e-4) if wide else (1e-2, 5e-3, 2e-2, 4e-2):
        ends = []
        for sign in (1, -1):
            for alpha in (sign * size, -sign * size):
                for param, way in zip(params, ways, strict=True):
                    param.add_(way, alpha=alpha)
                if alpha == sign * size:
                    ends.append(float(loss()))
        found.append((ends[0] - ends[1]) / (2 * size))
    return found[0], (max(found) - min(found)) / max(abs(found[0]), 1e-12)


def _cut_off(subject: Subject, system: System, batch: Batch, loss: Callable[[], Tensor]) -> list[str]:
    """Parameters whose gradient is not the slope of the loss, nearest to the loss first."""
    named = {n: p for n, p in system.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(subject.loss_of(system, batch), list(named.values()), allow_unused=True)
    wrong = []
    for (name, param), grad in zip(named.items(), grads, strict=True):
        way = torch.randn(param.shape, generator=torch.Generator().manual_seed(5)).to(param.dtype) * spread(param)
        computed = 0.0 if grad is None else float((grad * way).sum())
        measured, spread_of_slope = _slope(loss, [param], [way])
        if abs(computed - measured) > max(GRADIENT, 10 * spread_of_slope) * max(abs(measured), abs(computed), 1e-12):
            wrong.append(name)
    return wrong[::-1]
