"""Checks M: initialisation, and what depends on what inside the model."""

import contextlib
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.checks import short_runs
from seedbed.checks.calls import influence_ends_in
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import loss_now
from seedbed.checks.subject import ROWS, Subject, limit_for, num_rows, outputs, probe_of, source_line, spread, take_rows
from seedbed.checks.watch_ops import Activations, Attentions, Broadcasts
from seedbed.nn.init import kind_of
from seedbed.report.findings import Finding
from seedbed.train import capabilities
from seedbed.train.engine import Engine
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, System

# First loss against chance, relative. Measured on clean presets: at most 0.04; unit-variance init 3.6, sum reduction 380.
CHANCE = 0.15
# The same for models of others: at most 0.4 (T5 as transformers initialises it).
FAR_FROM_CHANCE = 1.0
# Size of a block's output against the first block's. Measured: 1 to 2.
GROWTH = (0.1, 10.0)
# How much of a layer may be dead or saturated. Measured: 0.
DEAD = 0.2
# Deviation from linearity. Measured: 0.014 and more; 3.5e-16 without activation, 3e-4 at inputs of 1e-3.
BEND = 1e-6
# Smallest effect of a tensor on the loss, relative. Measured: 5e-9 and more (sixteen inference steps); without effect 0 to 1e-15.
EFFECT = 1e-12
# Positions: effect of a constant offset where none is allowed (measured 1e-7 in float32 angles), and of reversing them (0.2).
OFFSET, REVERSE = 1e-5, 1e-3


@check("M1", "initial loss", "err", humbatova=(4,), needs=("at_init",))
def initial_loss(subject: Subject) -> Finding:
    """The initial loss is that of a uniform guess."""
    system, batch = subject.fresh_system().eval(), subject.batch(size=32)
    probe = probe_of(system, batch)
    expected, loss = probe.at_init(probe.batch), float(subject.loss_of(system, batch).detach())
    off, limit = abs(loss - expected) / abs(expected) if expected else abs(loss), CHANCE
    if subject.unsure:
        off, limit = off if loss > expected else 0.0, FAR_FROM_CHANCE  # below: the model has been trained
    if not math.isfinite(loss) or off > limit:
        what = f"the first loss is {loss:.4g}, a guess costs {expected:.4g}"
        return failed(what, where=subject.objective_line(), value=off, limit=limit)
    return passed(f"first loss {loss:.4g}, a guess costs {expected:.4g}", off, limit)


@check("M2", "initialisation", "err", humbatova=(4, 5))
def initialisation(subject: Subject) -> Finding:
    """Every parameter and buffer is initialised, no matrix is constant, and blocks preserve the scale of activations."""
    torch.set_deterministic_debug_mode("warn")  # fills uninitialised memory with NaN
    system = subject.fresh_system()
    torch.set_deterministic_debug_mode("default")
    for name, tensor in [*system.named_parameters(), *system.named_buffers()]:
        owner = system.get_submodule(name.rpartition(".")[0])
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            where = subject.module_init_line(system, name)
            return failed(f"{name} was never initialised", where=where, case="M2-unset")
        is_matrix = isinstance(tensor, nn.Parameter) and tensor.ndim == 2 and min(tensor.shape) > 1
        if not is_matrix or kind_of(name, owner, tensor) == "scalar" or not tensor.any():
            continue
        if (tensor == tensor[:1]).all() or (tensor == tensor[:, :1]).all():
            what = f"all {'rows' if (tensor == tensor[:1]).all() else 'columns'} of {name} are equal"
            return failed(what, where=subject.module_init_line(system, name), case="M2-constant")
    return _growth(subject, system.eval())


def _growth(subject: Subject, system: System) -> Finding:
    """Output scale of consecutive equal blocks at initialisation."""
    batch = subject.batch()
    with torch.no_grad():
        seen = {name: (module, out) for name, module, out in outputs(system, lambda: subject.loss_of(system, batch))}
    worst = 1.0
    for path, row in system.named_modules():
        if not isinstance(row, nn.ModuleList):
            continue
        sizes = [(f"{path}.{i}", *seen[f"{path}.{i}"]) for i in range(len(row)) if f"{path}.{i}" in seen]
        for name, _, out in sizes[1:]:
            ratio = float(out.double().square().mean().sqrt() / sizes[0][2].double().square().mean().sqrt().clamp_min(1e-30))
            worst = max(worst, ratio, 1 / max(ratio, 1e-30))
            if not GROWTH[0] <= ratio <= GROWTH[1]:
                what = f"the output of {name} is {ratio:.3g} times that of {sizes[0][0]} at initialisation"
                where = subject.module_line(system, name)
                return failed(what, where=where, case="M2-growth", value=ratio, limit=GROWTH[1], severity=subject.unsure)
    return passed("all initialised, none constant; largest change of scale between blocks", worst, GROWTH[1])


@check("M3", "shapes", "err", humbatova=(7, 10), quick=True)
def shapes(subject: Subject) -> Finding:
    """The loss runs on an odd batch size, is a scalar, and nothing broadcasts rows against rows."""
    system = subject.fresh_system().eval()
    found: list[set[str]] = []
    for size in (5, 7):
        with Broadcasts(size) as seen:
            loss = subject.loss_of(system, subject.batch(size=size))
        if loss.ndim:
            return failed(f"the loss has shape {tuple(loss.shape)}", where=subject.objective_line())
        if not loss.isfinite() or not loss.requires_grad:
            what = f"the loss is {float(loss)}" if loss.requires_grad else "the loss has no gradient"
            return failed(what, where=subject.objective_line(), case="M3-finite")
        found.append(set(seen.found))
    if both := found[0] & found[1]:
        what = "an operation makes a table of rows against rows out of two operands with one row axis each"
        return failed(what, where=sorted(both)[0], case="M3-broadcast")
    return passed("the loss is one number at batch 5 and 7, and nothing is broadcast across rows")


@check("M4", "row independence", "err", humbatova=(5, 7))
def row_independence(subject: Subject) -> Finding:
    """Each row's prediction and loss depend on that row alone."""
    system, batch, other = subject.perturbed(), subject.perturbed_batch(0), subject.perturbed_batch(1)
    # With a probe the prediction itself is compared; the reduction is left to L1.
    is_known = subject.declared.declares("predict")
    mixed, limit = _prediction_mixing(subject, system) if is_known else _mixing(subject, system, batch, other)
    if mixed > limit and not subject.declared.mixes_rows:
        what = f"rows affect each other: one replaced row changes the result of another by {mixed:.2g}"
        where = _mixer(subject, system, batch, other) or subject.objective_line()
        return failed(what, where=where, value=mixed, limit=limit, severity="" if is_known else subject.unsure)
    norms = [name for name, module in system.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if buffer := _order_of_rows(subject):
        owner = system.get_submodule(buffer.rpartition(".")[0])
        what = f"a training step leaves another {buffer} when the rows of its batch come in another order"
        return failed(what, where=source_line(type(owner)), case="M4-order", severity=subject.unsure)
    if norms:
        return passed(f"in evaluation mode a row is alone in its batch; in training mode {norms[0]} mixes rows", mixed, limit)
    return passed("a row is alone in its batch", mixed, limit)


def _order_of_rows(subject: Subject) -> str:
    """A buffer that a step in training mode fills differently for permuted rows; empty when there is none.

    Rows carry their counters, so noise and slots that follow from them move along; drawn noise does not.
    """
    batch, found = subject.batch(), []
    for order in (slice(None), torch.arange(ROWS).flip(0)):
        system = subject.fresh_system().train()
        before = {n: b.clone() for n, b in system.named_buffers()}
        subject.loss_of(system, take_rows(batch, order))
        found.append({n: b.double() for n, b in system.named_buffers() if not torch.equal(b, before[n])})
    one, other = found
    apart = (n for n in one if n in other and one[n].shape == other[n].shape)
    return next((n for n in apart if float((one[n] - other[n]).abs().max()) > 1e-3 * spread(one[n])), "")


def _mixer(subject: Subject, system: System, batch: Batch, other: Batch) -> str:
    """The first module in which a row changes although another was replaced; empty when there is none."""
    for changed, watched in ((1, 0), (0, 1)):
        replaced = {k: _with_row(batch[k], other[k], changed) for k in batch}
        runs = (lambda: subject.loss_of(system, batch), lambda replaced=replaced: subject.loss_of(system, replaced))
        select = lambda x, row=watched: x[row] if x.ndim and len(x) == num_rows(batch) else None  # noqa: E731
        if found := subject.first_moved(*runs, select=select):
            return found
    return ""


def _with_row(a: Tensor, b: Tensor, row: int) -> Tensor:
    """A copy of `a` with one row from `b`."""
    if not a.ndim or len(a) <= row:
        return a
    out = a.clone()
    out[row] = b[row]
    return out


def _mixing(subject: Subject, system: System, batch: Batch, other: Batch) -> tuple[float, float]:
    """The part of the summed loss that depends on two rows at once, relative to what one row changes.

    f(a,b) - f(a',b) - f(a,b') + f(a',b') is zero exactly when f is a sum over rows; equal seeds make it true of noisy losses.
    """

    def total(row0: bool, row1: bool) -> Tensor:
        mixed = {k: _with_row(v, other[k], 0) if row0 else v for k, v in batch.items()}
        mixed = {k: _with_row(v, other[k], 1) if row1 else v for k, v in mixed.items()}
        return subject.loss_of(system, mixed).detach() * float(system.num_targets(mixed))

    with torch.no_grad():
        f, g, h, i = total(False, False), total(True, False), total(False, True), total(True, True)
    alone = max(abs(float(g - f)), abs(float(h - f)), 1e-3 * abs(float(f)), 1e-12)
    # Looser than for predictions: a loss may be rounded to float32. Measured: 2e-15, and 3e-6 where it is.
    return abs(float(f - g - h + i)) / alone, limit_for(f, 1e-6, 1e-3)


def _prediction_mixing(subject: Subject, system: System) -> tuple[float, float]:
    """The largest change of a prediction when neighbours are replaced, permuted or removed."""
    probe, other = subject.declared, probe_of(system, subject.perturbed_batch(1)).batch
    batch = probe.batch
    replaced = {k: _with_row(v, other[k], 1) for k, v in batch.items()}
    order = torch.arange(num_rows(batch)).flip(0)
    with torch.no_grad():
        base = probe.predict(batch)
        moved = (probe.predict(replaced)[0] - base[0]).abs().max()
        permuted = (probe.predict(take_rows(batch, order)) - base[order]).abs().max()
        alone = (probe.predict(take_rows(batch, slice(2, 3)))[0] - base[2]).abs().max()
        limit = max(limit_for(base), _rounding(probe, base))
    return float(max(moved, permuted, alone)) / spread(base), limit


def _rounding(probe: Probe, base: Tensor) -> float:
    """Allowed rounding error of the prediction for other shapes. At most 1e-3.

    Measured in float32: clean rows change each other by 0.5 to 0.6 times rounding, 3e-5 at most; leaks by 2.7.
    """
    if base.dtype == torch.float64:
        return 0.0
    last = 2 * torch.finfo(base.dtype).eps
    rng = torch.Generator().manual_seed(13)
    floats = {k: v * (1 + last * torch.randn(v.shape, generator=rng)) for k, v in probe.batch.items() if v.is_floating_point()}
    return min(8 * float((probe.predict({**probe.batch, **floats}) - base).abs().max()) / spread(base), 1e-3)


@check("M5", "dead units", "warn", humbatova=(14,))
def dead_units(subject: Subject) -> Finding:
    """Units behind an activation are neither dead nor saturated, at initialisation and after 20 steps."""
    subject = short_runs.learner(subject)
    engine = subject.fresh_engine("schedule.kind=constant", "batch=16", "accum=1")
    worst, seen = 0.0, 0
    for num_steps in (0, 20):
        train(engine, subject, num_steps)
        system = engine.system.eval()
        with torch.no_grad(), Activations() as watched:
            subject.loss_of(system, subject.batch(50, size=64))
        system.train()
        seen += len(watched.found)
        if not seen:
            return skipped("no activation function was called")
        for call in watched.found:
            worst = max(worst, call.dead)
            if call.dead > DEAD:
                what = f"{call.dead:.0%} of the units behind {call.name} are {call.state} after {num_steps} steps"
                severity = subject.unsure if call.dead < 1.0 else ""
                return failed(what, where=call.where, value=call.dead, limit=DEAD, severity=severity)
    return passed(f"{seen // 2} activations watched", worst, DEAD)


def train(engine: Engine, subject: Subject, num_steps: int) -> None:
    """Trains on fresh batches."""
    for step in range(num_steps):
        batch = subject.batch(step, size=engine.config.batch)
        engine.variant = engine.system.variant(step, num_steps)  # type: ignore[assignment]
        engine.begin(step, (step + 1) / num_steps)
        engine.step(lambda k, batch=batch: batch)


@check("M6", "curvature", "warn", humbatova=(14, 15))
def curvature(subject: Subject) -> Finding:
    """Modules with two or more weight layers are not linear."""
    system, calls = subject.perturbed(), dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]()
    layered = {n: m for n, m in system.named_modules() if n and sum(p.ndim >= 2 for p in m.parameters()) >= 2}
    wanted = {n: m for n, m in layered.items() if not hasattr(m, "parametrizations")}  # one weight as several parameters

    def keep(name: str, *call: Any) -> None:  # the first of each
        calls.setdefault(name, call)

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in wanted.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(keep, name), with_kwargs=True))
        subject.loss_of(system, subject.perturbed_batch())
    residuals = {name: found for name, call in calls.items() if (found := _residual(*call)) is not None}
    if straight := [name for name, residual in residuals.items() if residual < BEND]:
        what = f"{', '.join(straight[:3])} is an affine function although it has several weight layers"
        return failed(what, where=subject.module_line(system, straight[0]), value=0.0, limit=BEND)
    if not residuals:
        return skipped("no module of several weight layers takes one floating-point tensor")
    return passed("smallest departure from a straight line", min(residuals.values()), BEND)


@torch.no_grad()
def _residual(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> float | None:
    """Distance between the mean of two outputs and the output of the mean input, relative to their distance."""
    if not given or not isinstance(given[0], Tensor) or not given[0].is_floating_point() or len(given[0]) < 2:
        return None
    a, b = torch.randn_like(given[0]), torch.randn_like(given[0])  # far from zero, or at equal points, a bend may not show
    try:
        outs = [module(x, *given[1:], **options) for x in (a, b, (a + b) / 2)]
    except Exception:  # a cache in its arguments has been filled
        return None
    if not all(isinstance(out, Tensor) and out.ndim for out in outs):
        return None
    return float((outs[2] - (outs[0] + outs[1]) / 2).abs().max()) / max(float((outs[0] - outs[1]).abs().max()), 1e-30)


@check("M7", "parameter effect", "err", humbatova=(15,))
def parameter_effect(subject: Subject) -> Finding:
    """Every parameter affects the loss."""
    system, batch, dead = subject.perturbed(), subject.perturbed_batch(), subject.declared.dead
    idle, least = {name for name, _ in system.named_parameters()}, math.inf
    for variant in capabilities.variants(system, subject.small.steps):
        effects = _effects(subject, system, batch, idle, variant)
        # What the first variant does not use, a later one may.
        least = min([least, *(effect for effect in effects.values() if effect >= EFFECT)])
        idle = {name for name in idle if effects[name] < EFFECT}
    if idle := [name for name, _ in system.named_parameters() if name in idle and name not in dead]:
        what = f"{len(idle)} of {len(list(system.parameters()))} tensors change nothing: {', '.join(idle[:4])}"
        severity = subject.unsure if all(name.endswith("bias") for name in idle) else ""  # distances do not depend on a bias
        where = _lost_in(subject, system, batch, idle[0]) or subject.module_init_line(system, idle[0])
        return failed(what, where=where, value=0.0, limit=EFFECT, severity=severity)
    return passed("smallest effect of a tensor on the loss", least, EFFECT)


@torch.no_grad()
def _lost_in(subject: Subject, system: System, batch: Batch, name: str) -> str:
    """The function that gives the same when this parameter changes what it gets; empty when nothing changes at all."""
    param = system.get_parameter(name)
    values = param.clone(), param + spread(param)

    def run(value: Tensor) -> None:
        param.copy_(value)
        _seeded_loss(subject, system, batch)

    found = influence_ends_in(subject, *(partial(run, value) for value in reversed(values)))
    param.copy_(values[0])
    return found


@torch.no_grad()
def _effects(subject: Subject, system: System, batch: Batch, names: set[str], variant: Any) -> dict[str, float]:
    """Relative change of the loss of one step variant when one of these parameters changes."""
    rng = torch.Generator().manual_seed(3)
    effects: dict[str, float] = {}
    base = _seeded_loss(subject, system, batch, variant)
    for name, param in system.named_parameters():
        if name not in names:
            continue
        before = param.clone()
        param += 0.5 * spread(param) * torch.randn(param.shape, generator=rng).to(param.dtype)
        effects[name] = abs(_seeded_loss(subject, system, batch, variant) - base) / max(abs(base), 1e-12)
        param.copy_(before)
    return effects


@torch.enable_grad()  # a step may compute gradients
def _seeded_loss(subject: Subject, system: System, batch: Batch, variant: Any = None) -> float:
    torch.manual_seed(0)
    return loss_now(subject, system, batch, variant)


@check("M8", "positions", "err", humbatova=(4, 15), needs=("positions", "at_positions", "inputs"))
def positions(subject: Subject) -> Finding:
    """Position matters as the recipe declares."""
    probe = subject.declared
    places = torch.arange(probe.batch[probe.inputs].shape[1])
    plain, other = (_position_effect(probe, p) for p in (places, places.flip(0)))
    # As far as the positions of the run go; angles in float32 lose with distance.
    full = (size for key, (size, _) in subject.shrunk.items() if key.endswith((".block", ".context", ".length")))
    far = max(7, max(full, default=0) - len(places))
    moved = 0.0
    for offset in {7, far} if probe.positions == "relative" else ():
        moved = max(moved, _position_effect(probe, places + offset) * min(1.0, 64 / offset))
    where = _position_line(subject, probe, places + far)
    if plain > OFFSET:
        what = f"positions 0, 1, 2... given by hand change the prediction by {plain:.2g}"
        return failed(what, where=where, case="M8-count", value=plain, limit=OFFSET)
    if other < REVERSE:
        what = f"other positions change the prediction by {other:.2g} only"
        return failed(what, where=where, value=other, limit=REVERSE)
    if moved > OFFSET:
        what = f"a constant offset of all positions changes the prediction by {moved:.2g}"
        return failed(what, where=where, case="M8-offset", value=moved, limit=OFFSET)
    return passed("effect of other positions", other, REVERSE)


def _position_line(subject: Subject, probe: Any, places: Tensor) -> str:
    """The first module that reacts to other positions; else the line that calls attention."""
    if probe.positions == "relative":
        runs = (lambda at=at: probe.at_positions(probe.batch, at) for at in (places - places[0], places))
        if found := subject.first_moved(*runs):
            return found
    with Attentions() as seen, torch.no_grad():
        probe.predict(probe.batch)
    return seen.line or subject.loss_line()


@torch.no_grad()
def _position_effect(probe: Any, places: Tensor) -> float:
    """Change of the prediction when the inputs are at `places`."""
    base = probe.predict(probe.batch)
    return float((probe.at_positions(probe.batch, places) - base).abs().max()) / spread(base)


@check("M9", "state dict", "err", humbatova=(4,))
def state_dict(subject: Subject) -> Finding:
    """A state dict loaded into a system of another seed makes it equal."""
    one, two = subject.fresh_engine(seed=1), subject.fresh_engine(seed=2)
    saved, live = one.tensors()["model"], two.tensors()["model"]
    where = source_line(type(one.system))
    if saved.keys() != live.keys():
        return failed(f"names differ between two builds: {sorted(saved.keys() ^ live.keys())[:3]}", where=where, case="M9-names")
    if wrapped := [name for name in saved if "_orig_mod" in name or name.startswith("module.")]:
        what = f"{len(wrapped)} names carry a wrapper's prefix, such as {wrapped[0]}"
        return failed(what, where=where, case="M9-wrapper")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])
        losses = [subject.loss_of(engine.system.eval(), subject.batch()) for engine in (one, two)]
    if not torch.equal(losses[0], losses[1]):
        what = f"after loading all saved tensors the loss is {float(losses[1]):.6g}, it was {float(losses[0]):.6g}"
        return failed(what, where=where, case="M9-values")
    tensors = [[id(p) for _, p in engine.system.named_parameters(remove_duplicate=False)] for engine in (one, two)]
    if len({tuple(map(ids.index, ids)) for ids in tensors}) > 1:  # for each name the first of the same tensor
        return failed("tensors that were shared are no longer shared", where=where, case="M9-shared")
    return passed(f"{len(saved)} tensors give the same loss, bit for bit")
