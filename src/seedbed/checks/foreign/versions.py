"""Checks that ask something else of a user's model than of a recipe, since less is declared; ids are the same."""

import contextlib
import math
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.checks.foreign import ForeignSubject, base_lr
from seedbed.checks.foreign.case import IGNORED, collect
from seedbed.checks.registry import Check, failed, passed, skipped
from seedbed.checks.small_jobs import advance_global_rng
from seedbed.checks.structure_checks import altered
from seedbed.checks.subject import limit_for, source_line, spread, to_dtype
from seedbed.checks.watch_ops import ActiveDropout
from seedbed.report.findings import Finding
from seedbed.train.probe import Batch, Probe

# Rows that were there before: above this a loader repeats itself, or two loaders are one.
MAX_REPEATED = 0.5
# Evaluations of the same weights, relative: sums in another order differ by 1e-6.
SAME = 1e-5
# The steps of a schedule that are looked at, and its highest rate against the one that the optimizer was given.
NUM_RATES, PEAK = 5000, (0.02, 200.0)

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def _failed(fault: str, what: str, where: str, **more: Any) -> Finding:
    """A failure with the reason and the fix of versions.toml."""
    return failed(what, where=where, **TEXTS[fault], **more)


def data_split(subject: ForeignSubject, check: Check) -> Finding:
    """Rows are distinct, and those of a validation loader are others."""
    case, where = subject.case, subject.batch_line()
    rows = _row_bytes(case.rows)
    repeated = 1.0 - len({*rows}) / len(rows)
    if repeated > MAX_REPEATED:
        severity = "warn" if len({*rows[: len({*rows})]}) == len({*rows}) else "note"  # the first ones again and again
        return _failed("D2 repeated rows", f"{len({*rows})} distinct rows in {case.taken}", where, severity=severity)
    held = _row_bytes(collect(case.parts.valid)[0]) if case.parts.valid is not None else []
    known = sum(row in {*rows} for row in held) / max(len(held), 1)
    if known > MAX_REPEATED:
        return _failed("D2 shared rows", f"{known:.0%} of the validation rows are training rows", where)
    return passed(f"{case.taken}; share of repeated ones", repeated, MAX_REPEATED)


def _row_bytes(rows: Batch) -> list[bytes]:
    return [b"".join(value[i].numpy().tobytes() for value in rows.values()) for i in range(len(next(iter(rows.values()))))]


def coverage(subject: ForeignSubject, check: Check) -> Finding:
    """No id makes up most of the tokens, no class nearly all of the labels, and no column is constant."""
    rows, roles = subject.case.rows, subject.case.roles
    for name in filter(None, (roles.inputs, roles.targets)):
        value, what = rows[name], ""
        if value.is_floating_point():
            still = (value == value[:1]).all(0).nonzero().flatten().tolist() if value.ndim == 2 and len(value) > 8 else []
            what = f"columns {still[:6]} of `{name}` are the same in every row" if still else ""
        elif (kept := value[value != IGNORED]).numel():
            values, counts = kept.unique(return_counts=True)
            share, limit = float(counts.max() / counts.sum()), 0.5 if value.ndim > 1 and len(values) > 2 else 0.95
            what = f"{share:.0%} of `{name}` is {int(values[counts.argmax()])}" if share > limit else ""
        if what:
            return _failed("D3 one value", what, subject.batch_line(), severity="note")
    return passed("no value makes up most of them")


def registration(subject: ForeignSubject, check: Check) -> Finding:
    """Every module and parameter is registered, and tied weights are one tensor."""
    model = subject.case.parts.model
    known = {id(thing) for thing in (*model.modules(), *model.parameters())}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            lost = [inner for inner in _trainable(value) if id(inner) not in known] if not key.startswith("_") else []
            if lost:
                what = f"{name + '.' if name else ''}{key} holds a {type(lost[0]).__name__} that is not registered"
                return _failed("M9 not registered", what, source_line(type(module).__init__))
    tables = [(n, m.weight) for n, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight.any()]
    heads = [(n, m.weight) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    copies = [(a, b) for a, x in tables for b, y in heads if x is not y and x.shape == y.shape and torch.equal(x, y)]
    if copies:
        what = f"{copies[0][0]}.weight and {copies[0][1]}.weight hold the same numbers in two tensors"
        return _failed("M9 not tied", what, source_line(type(model).__init__))
    return passed("all modules and parameters are registered")


def _trainable(value: Any) -> Iterator[Any]:
    """Modules and tensors with gradients in an attribute, or in containers in it."""
    if isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad and value.is_leaf):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _trainable(inner)


def loss_form(subject: ForeignSubject, check: Check) -> Finding:
    """The loss takes what the model returns: logits, probabilities or their logarithms; and prefers the right answer."""
    roles, probe = subject.case.roles, subject.probe
    if probe is None or not roles.is_supervised or (roles.class_axis is None and roles.num_classes and not roles.guess):
        return skipped(roles.reason or "the target is not compared with the model's output, or that is a probability")
    axis = roles.class_axis
    with torch.no_grad():
        prediction = probe.predict(probe.batch)
        higher = prediction + (axis is not None)
        loss, raised = (float(probe.objective(x, probe.batch)) for x in (prediction, higher))
    one = torch.ones((), dtype=prediction.dtype)
    is_share = bool(prediction.min() >= 0 and prediction.max() <= 1) and roles.num_classes > 1
    # Cross-entropy does not change when all logits rise by one; nll_loss then falls by one.
    takes_logits, takes_logs = abs(raised - loss) < 1e-6 * abs(loss), math.isclose(raised - loss, -1.0, rel_tol=1e-3)
    if axis is None:  # binary_cross_entropy, with or without logits
        takes_logits, takes_logs = roles.guess > 0, False
    if takes_logits and is_share and (axis is None or torch.allclose(prediction.sum(axis), one)):
        what = "the model returns probabilities, and the loss takes them for logits: softmax or sigmoid is applied twice"
        return _failed("L2 softmax twice", what, subject.objective_line())
    if takes_logs and not torch.allclose(prediction.exp().sum(axis or 0), one):
        what = "the loss takes its input for logarithms of probabilities, and the model returns something else"
        return _failed("L2 no logarithms", what, subject.objective_line())
    return passed("the loss takes logarithms, and the model returns them") if takes_logs else check.run(subject)


def loss_mask(subject: ForeignSubject, check: Check) -> Finding:
    """Padding moves no prediction elsewhere, and is no target; and its id is not one that should be learned."""
    rows, roles = subject.case.rows, subject.case.roles
    shape = rows[roles.inputs].shape[:2]
    name = next((name for name in rows if "mask" in name and rows[name].shape == shape and len(shape) == 2), "")
    padded = (rows[name] == 0).any(1).nonzero().flatten()[:5] if name else []
    if roles.point is None or not len(padded):
        return skipped(roles.reason or "no entry of a batch is a mask of the inputs" if not name else "no row has padding")
    with torch.no_grad():
        system: Any = subject.perturbed()
        probe = system.probe(to_dtype(subject.case.take(torch.as_tensor(padded)), subject.dtype))
        return _padding(subject, probe, probe.batch[name] != 0) or passed("padding is neither seen nor a target")


def _padding(subject: ForeignSubject, probe: Probe, kept: Tensor) -> Finding | None:
    inputs, base, moved = probe.batch[probe.inputs], probe.predict(probe.batch), []
    for real in (kept, ~kept):  # in some masks 1 is padding
        change = (probe.predict({**probe.batch, probe.inputs: altered(inputs, (~real,))}) - base).abs()
        moved.append(float((change[real] if change.shape[:2] == real.shape else change).max()) / spread(base))
    if min(moved) > limit_for(base):
        what = f"what stands in the padding moves other predictions by {min(moved):.2g}x their mean"
        return _failed("L3 seen padding", what, subject.loss_line(), value=min(moved), limit=limit_for(base))
    kept = kept if moved[0] <= limit_for(base) else ~kept
    targets = probe.batch.get(probe.targets, inputs)
    if not subject.case.roles.is_token_wise or targets.shape != kept.shape:
        return None
    trained = ~kept & (targets != IGNORED)
    ignored = {**probe.batch, probe.targets: torch.where(trained, IGNORED, targets)}
    if trained.any() and not torch.equal(probe.objective(base, probe.batch), probe.objective(base, ignored)):
        what = f"{int(trained.sum())} labels in the padding of {len(kept)} rows count in the loss"
        return _failed("L3 padding as target", what, subject.batch_line())
    known, labels = subject.case.rows[probe.inputs], subject.case.rows[probe.targets]
    learned = known[labels == known].unique()
    lost = [id for id in inputs[~kept].unique() if (inputs[kept] == id).any() and len(learned) and id not in learned]
    if lost:
        what = f"id {int(lost[0])} is padding, occurs outside of it as well, and is never a target"
        return _failed("L3 padding id", what, subject.batch_line())
    return None


def target_leak(subject: ForeignSubject, check: Check) -> Finding:
    """The loss depends on the target; the prediction does not, or only on its earlier part."""
    probe, roles = subject.probe, subject.case.roles
    if probe is None or roles.point is None or not (roles.targets or probe.order == "causal"):
        return skipped(roles.reason or "inputs and targets are not separate entries of a batch")
    name = roles.targets or roles.inputs
    targets, index = probe.batch[name], (slice(None),) if roles.targets else (slice(None), slice(-1, None))
    with torch.no_grad():
        base, other = probe.predict(probe.batch), {**probe.batch, name: altered(targets, index)}
        losses = [probe.objective(base, batch) for batch in (probe.batch, other)]
        if torch.equal(*losses) and not torch.equal(targets, other[name]):
            what = f"other values of `{name}` leave the loss as it is" if roles.targets else "the last token is never a target"
            return _failed("C2 no effect", what, subject.objective_line())
        if not roles.targets:
            return passed("the last token is a target")
        shift = targets.shape[1] - base.shape[1] if min(targets.ndim, base.ndim) > 1 else -1
        if shift in (0, 1) and not torch.equal(probe.predict(other), base):
            half = targets.shape[1] // 2
            late = {**probe.batch, name: altered(targets, (slice(None), slice(half, None)))}
            if torch.equal(probe.predict(late)[:, : half + 1 - shift], base[:, : half + 1 - shift]):
                return passed("predictions see earlier targets only (teacher forcing)")
    return check.run(subject)


def lr_schedule(subject: ForeignSubject, check: Check) -> Finding:
    """The scheduler moves the learning rate of this optimizer, between 0 and not far above what it was given."""
    system: Any = subject.fresh_system()
    shown, where = "", subject.optimizer_line()
    for scheduler in system.schedulers:
        kind, group = type(scheduler).__name__, scheduler.optimizer.param_groups[0]
        if scheduler.optimizer not in system.optimizers:
            return _failed("O5 other optimizer", f"{kind} belongs to another optimizer", where)
        base, rates = base_lr(group), [float(group["lr"])]
        with contextlib.suppress(ValueError):  # some end
            for _ in range(NUM_RATES):
                scheduler.step(*([1.0] if hasattr(scheduler, "patience") else []))
                rates.append(float(group["lr"]))
        shown = f"{kind}: {min(rates):.3g} to {max(rates):.3g} in {len(rates)} steps; the optimizer was given {base:.3g}"
        if not PEAK[0] <= max(rates) / max(base, 1e-30) <= PEAK[1] or min(rates) < 0 or len({*rates}) == 1:
            return _failed("O5 rates", shown, where, severity="warn")
    return passed(shown) if shown else skipped("no scheduler was given")


def evaluation(subject: ForeignSubject, check: Check) -> Finding:
    """V1: evaluation is deterministic. T4: evaluating and sampling change nothing. I6: they run in evaluation mode."""
    if check.id == "V1":
        with torch.no_grad(), ActiveDropout() as seen:
            subject.loss_of(subject.fresh_system().eval(), subject.batch())
        if seen.line:
            return _failed("V1 dropout", "dropout is active in evaluation mode", seen.line)
    names = [name for name in ("evaluate", "sample") if getattr(subject.case.parts, name) is not None]
    found = [one for name in names for one in subject.once(("observed", name), lambda name=name: list(_observe(subject, name)))]
    sound = passed(f"{' and '.join(names)} called twice") if names else skipped("neither evaluate nor sample was given")
    return next((finding for id, finding in found if id == check.id), sound)


def _observe(subject: ForeignSubject, name: str) -> Iterator[tuple[str, Finding]]:
    """What is wrong with two calls of the user's function from different random states, which start in training mode."""
    function, model = getattr(subject.case.parts, name), subject.case.parts.model
    where = subject.line_of(function, getattr(type(model), "validation_step", None))
    values, states, in_training = [], [], []
    for seed in (11, 12):
        system: Any = subject.fresh_system()
        before = {n: t.clone() for n, t in system.state_dict().items()}
        for path, module in system.named_modules():
            module.register_forward_pre_hook(lambda m, args, path=path: in_training.append(path) if m.training else None)
        advance_global_rng(seed)
        values.append(function(system.model))
        states.append(torch.get_rng_state())
    modes = [subject.loss_of(subject.fresh_system().train(mode), subject.batch()) for mode in (True, False)]
    if in_training and not torch.equal(*modes):
        yield "I6", _failed("I6 training mode", f"{in_training[0]} runs in training mode in {name}", where)
    changed = next((n for n, t in system.state_dict().items() if not torch.equal(t, before[n])), "")
    if changed:
        yield "T4", _failed("T4 changed model", f"{name} changes {changed}", where)
    if torch.equal(*states):
        yield "T4", _failed("T4 global seed", f"{name} sets the global seed", where, severity="warn")
    if not system.model.training:
        yield "T4", _failed("T4 evaluation mode", f"{name} leaves the model in evaluation mode", where, severity="note")
    first, second = values if name == "evaluate" else ({}, {})
    apart = [key for key in first if not math.isclose(float(first[key]), float(second[key]), rel_tol=SAME, abs_tol=1e-12)]
    if apart:
        what = f"two evaluations of the same weights differ: {apart[0]} {first[apart[0]]:.6g} and {second[apart[0]]:.6g}"
        yield "V1", _failed("V1 noise", what, where)


VERSIONS: dict[str, Callable[[ForeignSubject, Check], Finding]] = {
    "D2": data_split,
    "D3": coverage,
    "M9": registration,
    "L2": loss_form,
    "L3": loss_mask,
    "C2": target_leak,
    "O5": lr_schedule,
    **dict.fromkeys(("T4", "V1", "I6"), evaluation),
}
