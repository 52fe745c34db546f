"""Checks that ask something else of a user's model than of a recipe, since less is declared; ids are the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.checks.foreign.batches import collect
from seedbed.checks.foreign.subject import ForeignSubject, base_lr
from seedbed.checks.foreign.system import IGNORED
from seedbed.checks.registry import Check, failed, passed, skipped
from seedbed.checks.small_jobs import advance_global_rng
from seedbed.checks.structure_checks import altered
from seedbed.checks.subject import limit_for, source_line, spread, to_dtype
from seedbed.checks.watch_ops import ActiveDropout
from seedbed.report.findings import Finding
from seedbed.train.probe import Batch, Probe

Version = Callable[[ForeignSubject, Check], Finding]
VERSIONS: dict[str, Version] = {}
# Rows that were there before: above this a loader repeats itself, or two loaders are one.
MAX_REPEATED = 0.5
# Evaluations of the same weights, relative: sums in another order differ by 1e-6.
SAME = 1e-5
# The steps of a schedule that are looked at, and its highest rate against the one that the optimizer was given.
NUM_RATES, PEAK = 5000, (0.02, 200.0)


def version(*ids: str) -> Callable[[Version], Version]:
    def register(run: Version) -> Version:
        VERSIONS.update(dict.fromkeys(ids, run))
        return run

    return register


@version("D2")
def data_split(subject: ForeignSubject, check: Check) -> Finding:
    """Rows are distinct, and those of a validation loader are others."""
    pool, valid, where = subject.case.pool, subject.case.parts.valid, subject.batch_line()
    rows = _hashes(pool.rows)
    repeated = 1.0 - len({*rows}) / len(rows)
    if repeated > MAX_REPEATED:
        why, fix = "the model would memorise a few rows and ignore the rest", "look for an index or a batch that is used again"
        return failed(f"{len({*rows})} distinct rows in {pool.taken}", where=where, why=why, fix=fix, severity="warn")
    held = _hashes(collect(valid).rows) if valid is not None else []
    known = sum(row in {*rows} for row in held) / max(len(held), 1)
    if known > MAX_REPEATED:
        why, fix = "the score would be earned on what was trained on", "split the data before the loaders are made"
        return failed(f"{known:.0%} of the validation rows are training rows", where=where, why=why, fix=fix)
    return passed(f"{pool.taken}; share of repeated ones", repeated, MAX_REPEATED)


def _hashes(rows: Batch) -> list[int]:
    return [hash(tuple(value[i].numpy().tobytes() for value in rows.values())) for i in range(len(next(iter(rows.values()))))]


@version("D3")
def id_coverage(subject: ForeignSubject, check: Check) -> Finding:
    """No id makes up most of the tokens, and no class nearly all of the labels."""
    rows, roles = subject.case.pool.rows, subject.case.roles
    for name in filter(None, (roles.inputs, roles.targets)):
        if rows[name].is_floating_point():
            continue
        values, counts = rows[name][rows[name] != IGNORED].unique(return_counts=True)
        share = float(counts.max() / counts.sum()) if len(counts) else 0.0
        if share > (0.5 if rows[name].ndim > 1 and len(values) > 2 else 0.95):
            what, why = f"{share:.0%} of `{name}` is {int(values[counts.argmax()])}", "always giving it scores well"
            return failed(what, where=subject.batch_line(), why=why, fix="look at padding and labels", severity="note")
    return passed("no id makes up most of them")


@version("D5")
def value_range(subject: ForeignSubject, check: Check) -> Finding:
    """As for recipes; and no column is constant."""
    finding, name = check.run(subject), subject.case.roles.inputs
    value = subject.case.pool.rows[name]
    still = (value == value[:1]).all(0).nonzero().flatten().tolist() if value.ndim == 2 and value.is_floating_point() else []
    if finding.status == "fail" or not still or len(value) < 8:
        return finding
    what, why = f"columns {still[:6]} of `{name}` are the same in every row", "a constant tells the model nothing"
    return failed(what, where=subject.batch_line(), why=why, fix="leave them out, or look why they are", severity="note")


@version("M9")
def registration(subject: ForeignSubject, check: Check) -> Finding:
    """Every module and parameter is registered, and tied weights are one tensor."""
    model = subject.case.parts.model
    known = {id(thing) for thing in (*model.modules(), *model.parameters())}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            lost = [inner for inner in _trainable(value) if id(inner) not in known] if not key.startswith("_") else []
            if lost:
                what = f"{name + '.' if name else ''}{key} holds a {type(lost[0]).__name__} that is not registered"
                why = "it is not trained, not saved, and not moved to another device"
                fix = "use nn.ModuleList, nn.ModuleDict or nn.ParameterList in place of a list or dict, nn.Parameter for a tensor"
                return failed(what, where=source_line(type(module).__init__), why=why, fix=fix)
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding | nn.Linear)]
    for table, a in named:
        for head, b in named if isinstance(a, nn.Embedding) else ():
            same = isinstance(b, nn.Linear) and a.weight.shape == b.weight.shape and torch.equal(a.weight, b.weight)
            if same and a.weight is not b.weight and a.weight.any():
                what = f"{table}.weight and {head}.weight hold the same numbers in two tensors"
                why, fix = (
                    "they part with the first step: they are not tied",
                    "share the parameter: head.weight = embedding.weight",
                )
                return failed(what, where=source_line(type(model).__init__), why=why, fix=fix)
    return passed("all modules and parameters are registered")


def _trainable(value: Any) -> Iterator[Any]:
    """Modules and tensors with gradients in an attribute, or in containers in it."""
    if isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad and value.is_leaf):
        yield value
    elif isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _trainable(inner)


@version("L2")
def loss_form(subject: ForeignSubject, check: Check) -> Finding:
    """The loss takes what the model returns: logits, probabilities or their logarithms; and prefers the right answer."""
    roles, probe = subject.case.roles, subject.probe
    if probe is None or not roles.is_supervised:
        return skipped(roles.reason or "the target is not compared with the model's output")
    with torch.no_grad():
        prediction = probe.predict(probe.batch)
        loss, raised = (float(probe.objective(x, probe.batch)) for x in (prediction, prediction + 1.0))
    one, axis = torch.ones((), dtype=prediction.dtype), roles.class_axis
    # Cross-entropy does not change when all logits rise by one; nll_loss then falls by one.
    takes_logits, takes_logs = abs(raised - loss) < 1e-6 * abs(loss), math.isclose(raised - loss, -1.0, rel_tol=1e-3)
    is_share = bool(prediction.min() >= 0 and torch.allclose(prediction.sum(axis), one)) if axis is not None else False
    if axis is None and roles.num_classes:  # binary_cross_entropy, with or without logits
        takes_logits, is_share = roles.guess > 0, bool(prediction.min() >= 0 and prediction.max() <= 1)
    where, fix = (
        subject.objective_line(),
        "give cross_entropy the raw outputs of the last layer, or nll_loss those of log_softmax",
    )
    if is_share and takes_logits:
        what = "the model returns probabilities, and the loss takes them for logits: softmax or sigmoid is applied twice"
        return failed(what, where=where, why="gradients are faint, and the loss cannot come near zero", fix=fix)
    if axis is not None and takes_logs and not torch.allclose(prediction.exp().sum(axis), one):
        what = "the loss takes its input for logarithms of probabilities, and the model returns something else"
        return failed(what, where=where, why="the loss falls without end and means nothing", fix=fix)
    return check.run(subject)


@version("L3")
def loss_mask(subject: ForeignSubject, check: Check) -> Finding:
    """Padding moves no prediction elsewhere, and is no target; and its id is not one that should be learned."""
    rows, roles = subject.case.pool.rows, subject.case.roles
    shape = rows[roles.inputs].shape[:2]
    name = next((name for name in rows if "mask" in name and rows[name].shape == shape and len(shape) == 2), "")
    if not name or roles.point is None:
        return skipped(roles.reason or "no entry of a batch is a mask of the inputs")
    padded = (rows[name] == 0).any(1).nonzero().flatten()[:5]
    if not len(padded):
        return skipped("no row has padding")
    with torch.no_grad():
        system: Any = subject.perturbed()
        probe = system.probe(to_dtype(subject.case.pool.take(padded), subject.dtype))
        return _padding(subject, probe, probe.batch[name] != 0) or passed("padding is neither seen nor a target")


def _padding(subject: ForeignSubject, probe: Probe, kept: Tensor) -> Finding | None:
    inputs, base, moved = probe.batch[probe.inputs], probe.predict(probe.batch), []
    for real in (kept, ~kept):  # in some masks 1 is padding
        change = (probe.predict({**probe.batch, probe.inputs: altered(inputs, (~real,))}) - base).abs()
        moved.append(float((change[real] if change.shape[:2] == real.shape else change).max()) / spread(base))
    if min(moved) > limit_for(base):
        what = f"what stands in the padding moves other predictions by {min(moved):.2g}x their mean"
        why, fix = "a row gives another result in another batch", "give the mask to attention, and to means over positions"
        return failed(what, where=subject.loss_line(), why=why, fix=fix, value=min(moved), limit=limit_for(base))
    kept = kept if moved[0] <= limit_for(base) else ~kept
    targets = probe.batch.get(probe.targets, inputs)
    if not probe.targets or targets.shape != kept.shape or targets.is_floating_point():
        return None
    where, fix = subject.batch_line(), "give padding an id of its own, and set labels to -100 where there is padding"
    trained = ~kept & (targets != IGNORED)
    ignored = {**probe.batch, probe.targets: torch.where(trained, IGNORED, targets)}
    if trained.any() and not torch.equal(probe.objective(base, probe.batch), probe.objective(base, ignored)):
        what = f"{int(trained.sum())} labels in the padding of {len(kept)} rows count in the loss"
        return failed(what, where=where, why="the model is trained to predict padding", fix=fix)
    rows = subject.case.pool.rows
    learned = rows[probe.inputs][rows[probe.targets] == rows[probe.inputs]].unique()
    lost = [id for id in inputs[~kept].unique() if (inputs[kept] == id).any() and len(learned) and id not in learned]
    if lost:
        what = f"id {int(lost[0])} is padding, occurs outside of it as well, and is never a target"
        return failed(what, where=where, why="the model cannot learn to give it, for example to end a text", fix=fix)
    return None


@version("C2")
def target_leak(subject: ForeignSubject, check: Check) -> Finding:
    """The loss depends on the target; the prediction does not, or only on its earlier part."""
    probe, roles = subject.probe, subject.case.roles
    if probe is None or roles.point is None:
        return skipped(roles.reason)
    with torch.no_grad():
        base, targets = probe.predict(probe.batch), probe.batch[probe.targets]
        other = {**probe.batch, probe.targets: altered(targets, (slice(None),))}
        if torch.equal(probe.objective(base, probe.batch), probe.objective(base, other)):
            what, why = f"other values of `{probe.targets}` leave the loss as it is", "nothing is learned from them"
            return failed(what, where=subject.objective_line(), why=why, fix="compare the prediction with the target")
        if targets.ndim > 1 and base.shape[:2] == targets.shape[:2] and not torch.equal(probe.predict(other), base):
            half = targets.shape[1] // 2
            late = {**probe.batch, probe.targets: altered(targets, (slice(None), slice(half, None)))}
            if torch.equal(probe.predict(late)[:, : half + 1], base[:, : half + 1]):
                return passed("predictions see earlier targets only (teacher forcing)")
    return check.run(subject)


@version("O1")
def optimizer_groups(subject: ForeignSubject, check: Check) -> Finding:
    """The optimizer holds the model's parameters, all of them, and no others."""
    known = {id(p) for p in subject.case.parts.model.parameters()}
    held = [p for optimizer in subject.case.parts.optimizers for group in optimizer.param_groups for p in group["params"]]
    others = sum(id(p) not in known for p in held)
    if not others:
        return check.run(subject.tuned)
    why = "they are of another model, or of layers that were replaced afterwards: what is trained is not what is used"
    what, fix = f"{others} of {len(held)} tensors in the optimizer are not of this model", "make the optimizer last"
    return failed(what, where=subject.optimizer_line(), why=why, fix=fix)


@version("O5")
def lr_schedule(subject: ForeignSubject, check: Check) -> Finding:
    """The scheduler moves the learning rate of this optimizer, between 0 and not far above what it was given."""
    system: Any = subject.fresh_system()
    shown, where = "", subject.optimizer_line()
    for scheduler in system.schedulers:
        kind = type(scheduler).__name__
        if scheduler.optimizer not in system.optimizers:
            why, fix = "the learning rate that is used never moves", "give the scheduler the optimizer that is stepped"
            return failed(f"{kind} belongs to another optimizer", where=where, why=why, fix=fix)
        base, rates = _rates(scheduler)
        shown = f"{kind}: {min(rates):.3g} to {max(rates):.3g} in {len(rates)} steps; the optimizer was given {base:.3g}"
        if not PEAK[0] <= max(rates) / max(base, 1e-30) <= PEAK[1] or min(rates) < 0:
            why, fix = "the learning rate is not what you set", "see its arguments; LambdaLR wants a factor, not a learning rate"
            return failed(shown, where=where, why=why, fix=fix, severity="warn")
        if len({*rates}) == 1:
            why, fix = "the schedule has no effect", "see its arguments: are they steps or epochs?"
            return failed(shown, where=where, why=why, fix=fix, severity="warn")
    return passed(shown) if shown else skipped("no scheduler was given")


def _rates(scheduler: Any) -> tuple[float, list[float]]:
    """The base rate and those of the first steps, until the scheduler ends."""
    group = scheduler.optimizer.param_groups[0]
    base, rates, given = base_lr(group), [float(group["lr"])], [1.0] if hasattr(scheduler, "patience") else []
    with contextlib.suppress(ValueError):
        for _ in range(NUM_RATES):
            scheduler.step(*given)
            rates.append(float(group["lr"]))
    return base, rates


# ---- evaluation and sampling ---------------------------------------------------------------------------------------------


@dataclass
class Observed:
    """What one call of evaluate or sample did, starting in training mode."""

    values: Any = None
    in_training: list[str] = field(default_factory=list)
    changed: str = ""
    is_left_in_eval: bool = False
    rng: bytes = b""


def _observe(subject: ForeignSubject, name: str, seed: int) -> Observed:
    system: Any = subject.fresh_system()
    model, seen = system.model, Observed()
    before = {n: t.clone() for n, t in model.state_dict().items()}

    def hook(path: str) -> Callable[..., None]:
        return lambda module, args: seen.in_training.append(path or "the model") if module.training else None

    for path, module in model.named_modules():
        module.register_forward_pre_hook(hook(path))
    advance_global_rng(seed)
    seen.values = getattr(subject.case.parts, name)(model)
    seen.changed = next((n for n, t in model.state_dict().items() if not torch.equal(t, before[n])), "")
    seen.is_left_in_eval, seen.rng = not model.training, torch.get_rng_state().numpy().tobytes()
    return seen


@version("V1", "T4", "I6")
def evaluation(subject: ForeignSubject, check: Check) -> Finding:
    """V1: evaluation is deterministic. T4: evaluating and sampling change nothing. I6: they run in evaluation mode."""
    names = [name for name in ("evaluate", "sample") if getattr(subject.case.parts, name) is not None]
    if check.id == "V1" and (found := _active_dropout(subject)):
        return found
    for name in names:
        where = subject.line_of(subject.case.parts.places[name])
        first, second = subject.once(("observed", name), lambda name=name: [_observe(subject, name, seed) for seed in (11, 12)])
        problem = _problem(subject, check.id, name, first, second)
        if problem is not None:
            return replace(problem, where=where)
    return passed(f"{' and '.join(names)} called twice") if names else skipped("neither evaluate nor sample was given")


def _problem(subject: ForeignSubject, id: str, name: str, first: Observed, second: Observed) -> Finding | None:
    if id == "I6" and first.in_training and _mode_matters(subject):
        why = "dropout is active there, or batch norm uses and changes its batch: results are worse than the model"
        return failed(f"{first.in_training[0]} runs in training mode in {name}", where="", why=why, fix="call model.eval() first")
    if id == "V1" and name == "evaluate" and (off := _difference(first.values, second.values)):
        return failed(
            f"two evaluations of the same weights differ: {off}", where="", why="scores are noise", fix="see I6; fix the seed"
        )
    if id == "T4" and first.changed:
        return failed(
            f"{name} changes {first.changed}", where="", why="how often it runs changes the model", fix="use eval() and no_grad()"
        )
    if id == "T4" and first.rng == second.rng:
        why, fix = "all noise after it is the same each time", "use a torch.Generator of its own instead of torch.manual_seed"
        return failed(f"{name} sets the global seed", where="", why=why, fix=fix, severity="warn")
    if id == "T4" and first.is_left_in_eval:
        why, fix = "training goes on without dropout unless the loop calls train()", "call model.train() at its end"
        return failed(f"{name} leaves the model in evaluation mode", where="", why=why, fix=fix, severity="note")
    return None


def _difference(a: Any, b: Any) -> str:
    pairs = ((name, float(a[name]), float(b[name])) for name in a) if isinstance(a, dict) else [("value", float(a), float(b))]
    return next(
        (f"{name} {x:.6g} and {y:.6g}" for name, x, y in pairs if not math.isclose(x, y, rel_tol=SAME, abs_tol=1e-12)), ""
    )


def _mode_matters(subject: ForeignSubject) -> bool:
    system = subject.fresh_system()
    with torch.no_grad():
        return not torch.equal(subject.loss_of(system, subject.batch()), subject.loss_of(system.eval(), subject.batch()))


def _active_dropout(subject: ForeignSubject) -> Finding | None:
    with torch.no_grad(), ActiveDropout() as seen:
        subject.loss_of(subject.fresh_system().eval(), subject.batch())
    if not seen.line:
        return None
    why, fix = "scores and samples are worse than the model", "honour the mode: F.dropout(x, p, self.training)"
    return failed("dropout is active in evaluation mode", where=seen.line, why=why, fix=fix)
